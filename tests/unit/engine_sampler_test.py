"""Each rule of sampling does what its name says, and to its own row only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from site_engine.core.request import Request, Sampling
from site_engine.model.logit_rules import LogitRules
from site_engine.model.sampler import Sampler, uniforms

torch.set_num_threads(1)
VOCAB = 50
LOGITS = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
RANKED = LOGITS[0].argsort(descending=True).tolist()


def cpu_sampler(eos: tuple[int, ...] = ()) -> Sampler:
    cpu = torch.device("cpu")
    return Sampler(LogitRules(eos, cpu), cpu)


def draws(
    sampling: Sampling, count: int = 300, prompt: tuple[int, ...] = (1,), eos: tuple[int, ...] = ()
) -> list[int]:
    """Return the tokens of a row at `count` places of its own."""
    sampler = cpu_sampler(eos)
    requests = [Request(str(at), prompt, sampling) for at in range(count)]
    return sampler.sample(requests, LOGITS.repeat(count, 1)).token_ids


def test_greedy_takes_the_best() -> None:
    for sampling in (Sampling(temperature=0), Sampling(top_p=0), Sampling(top_k=1)):
        assert set(draws(sampling)) == {RANKED[0]}


@pytest.mark.parametrize("least", [5e-324, 2.2e-308, 1e-46, 1e-40, 1e-30, 1e-8, 1e-6])
def test_what_is_all_but_greedy_takes_the_best(least: float) -> None:
    for sampling in (Sampling(temperature=least), Sampling(top_p=least)):
        assert set(draws(sampling)) == {RANKED[0]}


def test_draws_follow_the_model() -> None:
    found = np.bincount(draws(Sampling(), 20_000), minlength=VOCAB) / 20_000
    assert np.abs(found - torch.softmax(LOGITS[0], -1).numpy()).max() < 0.015


def test_top_k_keeps_k() -> None:
    assert set(draws(Sampling(top_k=3), 500)) == set(RANKED[:3])


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    chances = torch.softmax(LOGITS[0], -1)[RANKED]
    count = int((chances.cumsum(0) < 0.6).sum()) + 1
    assert set(draws(Sampling(top_p=0.6), 2000)) == set(RANKED[:count])


def test_top_p_is_right_when_the_nucleus_is_wide() -> None:
    flat = torch.zeros(1, 5000)
    flat[0, 17] = 1e-3
    sampler = cpu_sampler()
    requests = [Request(str(at), [1], Sampling(top_p=0.999)) for at in range(200)]
    assert len(set(sampler.sample(requests, flat.repeat(200, 1)).token_ids)) > 150


def test_min_p_is_relative_to_the_best() -> None:
    chances = torch.softmax(LOGITS[0], -1)
    allowed = set(torch.nonzero(chances >= 0.3 * chances.max()).flatten().tolist())
    assert set(draws(Sampling(min_p=0.3), 1000)) == allowed


def test_bias_and_minimum_length() -> None:
    assert set(draws(Sampling(temperature=0, logit_bias={5: 100.0}))) == {5}
    assert RANKED[0] not in draws(Sampling(logit_bias={RANKED[0]: -100.0}))
    assert set(draws(Sampling(temperature=0, min_tokens=1), eos=(RANKED[0],))) == {RANKED[1]}
    assert set(draws(Sampling(temperature=0, min_tokens=1, stop_token_ids=(RANKED[0],)))) == {RANKED[1]}


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=0, presence_penalty=0.5), -0.5),
        (Sampling(temperature=0, frequency_penalty=0.5), -1.0),
        (Sampling(temperature=0, presence_penalty=0.25, frequency_penalty=0.5), -1.25),
    ],
)
def test_penalties_count_the_response_only(sampling: Sampling, expected: float) -> None:
    request = Request("a", [7, 8], sampling, resumed=[9, 9, 4])
    logits = LOGITS.clone()
    cpu_sampler().sample([request], logits)
    changed = logits - LOGITS
    assert changed[0, 9].item() == pytest.approx(expected, abs=1e-5)
    assert changed[0, [7, 8]].tolist() == [0.0, 0.0]


def test_repetition_counts_the_prompt_too() -> None:
    request = Request("a", [7, 7], Sampling(temperature=0, repetition_penalty=2.0), resumed=[9])
    logits = LOGITS.clone()
    cpu_sampler().sample([request], logits)
    for token in (7, 9):
        old = LOGITS[0, token].item()
        assert logits[0, token].item() == pytest.approx(old / 2 if old > 0 else old * 2)


def test_the_least_length_counts_a_token_on_its_way() -> None:
    rules = LogitRules((3,), torch.device("cpu"))
    request = Request("a", [1], Sampling(min_tokens=2), resumed=[5])
    tokens, added = rules.edits([request], [2], [0])[0]
    assert (tokens.tolist(), added.tolist()) == ([3], [float("-inf")])
    assert not rules.edits([request], [3], [0])


@settings(max_examples=40, deadline=None)
@given(
    own=st.builds(
        Sampling,
        temperature=st.floats(0, 2),
        top_p=st.floats(0, 1),
        top_k=st.integers(0, 60),
        min_p=st.floats(0, 1),
        presence_penalty=st.floats(-2, 2),
        repetition_penalty=st.floats(0.5, 2),
        seed=st.integers(0, 2**64 - 1),
    ),
    others=st.lists(st.builds(Sampling, temperature=st.floats(0, 2), top_k=st.integers(0, 9)), max_size=4),
)
def test_a_row_does_not_notice_its_neighbours(own: Sampling, others: list[Sampling]) -> None:
    def at_row(row: int) -> int:
        requests = [Request(f"other {n}", [n], other) for n, other in enumerate(others)]
        requests.insert(row, Request("own", [1, 2], own, resumed=[3, 4]))
        logits = torch.randn(len(requests), VOCAB, generator=torch.Generator().manual_seed(5))
        logits[row] = LOGITS[0]
        return cpu_sampler().sample(requests, logits).token_ids[row]

    alone = cpu_sampler().sample([Request("own", [1, 2], own, resumed=[3, 4])], LOGITS.clone())
    assert {at_row(0), at_row(len(others))} == set(alone.token_ids)


def test_the_settings_of_a_batch_follow_its_rows() -> None:
    sampler = cpu_sampler()
    first = Request("a", [1], Sampling(temperature=0))
    second = Request("b", [1], Sampling(temperature=0, logit_bias={3: 100.0}))
    assert sampler.sample([first], LOGITS.clone()).token_ids == [RANKED[0]]
    namesake = Request("a", [1], Sampling(temperature=0, logit_bias={5: 100.0}))
    assert sampler.sample([namesake], LOGITS.clone()).token_ids == [5]
    assert sampler.sample([second], LOGITS.clone()).token_ids == [3]
    assert sampler.sample([first, second], LOGITS.repeat(2, 1)).token_ids == [RANKED[0], 3]


def test_rows_that_are_not_finite_are_named() -> None:
    logits = LOGITS.repeat(4, 1)
    logits[1, 3] = float("nan")
    logits[2, 3] = float("inf")
    requests = [Request(str(at), [1], Sampling()) for at in range(4)]
    sampled = cpu_sampler().sample(requests, logits)
    assert sampled.broken == [1, 2]


def test_uniforms_are_uniform_and_depend_on_seed_and_place_alone() -> None:
    seeds = np.arange(200, dtype=np.uint64).repeat(50)
    places = np.tile(np.arange(50, dtype=np.uint64), 200)
    found = uniforms(seeds, places)
    assert found.min() >= 0.0
    assert found.max() < 1.0
    assert len(np.unique(found)) == len(found)
    assert abs(np.histogram(found, 10)[0] / 1000 - 1).max() < 0.15
    assert uniforms(seeds[77:78], places[77:78])[0] == found[77]
