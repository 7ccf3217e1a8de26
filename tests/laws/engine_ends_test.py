"""An answer ends at the model's end or a stop id, not before its least length, and not if told to go on."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch

from site_engine.core.request import Finish
from site_engine.model.loader import LoadedModel, from_model
from tests.support.engine_models import VOCAB, Collected, drain, engine_for, family, greedy, tokenizer

torch.set_num_threads(1)
PROMPT = [3, 4, 5]
WHOLE_TOKENS = 30


def whole() -> list[int]:
    return family("llama").generate(PROMPT, WHOLE_TOKENS)


@cache
def with_end(eos: int) -> LoadedModel:
    """The model, one of whose own tokens means the end."""
    return from_model(copy.deepcopy(family("llama").plain), tokenizer(), eos_token_ids=(eos,))


def answer(model: LoadedModel, **sampling: object) -> Collected:
    engine = engine_for(model)
    engine.submit(greedy("neighbour", [9, 9], 12, ignore_eos=True))
    engine.submit(greedy("it", PROMPT, WHOLE_TOKENS, **sampling))
    return drain(engine)["it"]


def finish(one: Collected) -> Finish | None:
    assert one.last is not None
    return one.last.finish


@pytest.mark.parametrize("place", [0, 5, 12])
def test_the_models_own_end_ends_it_as_in_generate(place: int) -> None:
    eos = whole()[place]
    one = answer(with_end(eos))
    assert one.token_ids == family("llama").generate(PROMPT, WHOLE_TOKENS, eos=eos)
    assert (finish(one), one.token_ids[-1]) == (Finish.STOP, eos)
    assert one.text == tokenizer().decode(one.token_ids[:-1])


def test_the_end_is_a_token_like_others_when_it_is_to_be_ignored() -> None:
    one = answer(with_end(whole()[5]), ignore_eos=True)
    assert one.token_ids == whole()
    assert finish(one) is Finish.LENGTH


def test_stop_ids_still_count_when_the_end_is_ignored() -> None:
    tokens = whole()
    stop = tokens[8]
    one = answer(with_end(tokens[5]), ignore_eos=True, stop_token_ids=(stop,))
    assert one.token_ids == tokens[: tokens.index(stop) + 1]
    assert finish(one) is Finish.STOP


@pytest.mark.parametrize("least", [1, 7, WHOLE_TOKENS])
def test_no_end_comes_before_the_least_length(least: int) -> None:
    """Until then the end cannot be chosen; what is chosen instead goes on from there."""
    eos = whole()[0]
    one = answer(with_end(eos), min_tokens=least)
    assert eos not in one.token_ids[:least]
    assert finish(one) is (Finish.STOP if eos in one.token_ids else Finish.LENGTH)
    assert one.token_ids != family("llama").generate(PROMPT, WHOLE_TOKENS, eos=eos)


@pytest.mark.parametrize("eos", [-1, VOCAB])
def test_an_end_that_is_no_token_ends_nothing_and_forbids_nothing(eos: int) -> None:
    """Settings name such a one to say that there is none."""
    assert answer(with_end(eos)).token_ids == whole()
    last = VOCAB - 1
    assert answer(with_end(eos), min_tokens=2, logit_bias={last: 100.0}).token_ids[:2] == [last, last]
