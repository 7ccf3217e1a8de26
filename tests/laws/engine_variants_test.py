"""A row's tokens are those of its variant alone, whatever shares its batch, its pages and its engine."""

from __future__ import annotations

import gc
import json
import random
import shutil
import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from site_engine.core.remaining_curve import RemainingCurve
from site_engine.core.request import Finish, RejectionReason, Request, RequestRejected
from site_engine.errors import VariantRefused
from site_engine.model import certify as model_certify
from site_engine.variants import certify
from site_engine.variants.changes import LoadedVariant, LowRank
from tests.support.engine_models import (
    SHAPES,
    TOO_SHORT,
    VOCAB,
    Collected,
    assert_idle,
    drain,
    engine_for,
    gather,
    greedy,
    greedy_answer,
    is_greedy,
)
from tests.support.variants import Made, fine_tuned, lora, prefix_tuned, served, zoo

torch.set_num_threads(1)

Case = tuple[Made | None, list[int], int]
VARIANT_SHAPES = [*SHAPES, {**SHAPES[-1], "adapter_slots": 1}]


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_mixed_batch_gives_each_row_what_its_variant_gives_alone(name: str, tmp_path: Path) -> None:
    model, plain = served(name)
    variants: list[Made | None] = [None, *zoo(tmp_path, plain)]
    cases = random_cases(variants, seed=1, count=32)
    preempted = 0
    for shape in VARIANT_SHAPES:
        engine = engine_for(model, **shape)
        for made in variants[1:]:
            engine.add_variant(made.variant)
        collected: dict[str, Collected] = {}
        for at, (made, prompt, tokens) in enumerate(cases):
            engine.submit(request(str(at), made, prompt, tokens))
            if at % 2:
                gather(engine.step(), collected)
        drain(engine, collected)
        assert_answers_alone(collected, cases, plain)
        base = [is_greedy(plain, case[1], collected[str(at)].token_ids) for at, case in enumerate(cases)]
        assert base.count(False) > len(cases) // 2, "the variants do nothing"
        preempted += sum(each.last.timings.preemptions for each in collected.values())
        assert_idle(engine)
    assert preempted


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_many_random_requests_mixed(seed: int, tmp_path: Path) -> None:
    """Through engines that preempt, share prefixes and evict adapters."""
    model, plain = served("qwen2" if seed % 2 else "llama")
    variants: list[Made | None] = [None, *zoo(tmp_path, plain)]
    cases = random_cases(variants, seed=seed, count=32)
    engine = engine_for(model, **VARIANT_SHAPES[seed])
    for made in variants[1:]:
        engine.add_variant(made.variant)
    collected: dict[str, Collected] = {}
    for at, case in enumerate(cases):
        engine.submit(request(str(at), *case))
        gather(engine.step(), collected)
    drain(engine, collected)
    assert_answers_alone(collected, cases, plain)
    assert_idle(engine)


def test_adding_and_removing_changes_nobodys_tokens(tmp_path: Path) -> None:
    """Requests that wait or run when their variant is removed end with it; its name is free at once."""
    model, plain = served()
    variants: list[Made | None] = [None, *zoo(tmp_path / "zoo", plain)]
    cases = random_cases(variants, seed=5, count=120)
    engine = engine_for(model, slots=6, token_budget=32, kv_tokens=256)
    collected: dict[str, Collected] = {}
    for at, (made, prompt, tokens) in enumerate(cases):
        if made is not None and made.variant.id not in engine.variants:
            engine.add_variant(made.variant)
        engine.submit(request(str(at), made, prompt, tokens))
        gather(engine.step(), collected)
        if made is not None and at % 3 == 0:
            engine.remove_variant(made.variant.id)
            with pytest.raises(RequestRejected, match="is not served here any more") as refused:
                engine.submit(request("late", made, prompt, tokens))
            assert refused.value.reason is RejectionReason.MODEL_UNKNOWN
    drain(engine, collected)
    assert_answers_alone(collected, cases, plain)
    assert_idle(engine)


@pytest.mark.parametrize(("seed", "slots"), [(1, None), (2, 1), (3, 2)])
def test_sleeping_and_waking_changes_nobodys_tokens_and_frees_what_sleeps(
    seed: int, slots: int | None, tmp_path: Path
) -> None:
    """To an engine, to sleep is to be removed and to wake is to be added with the same contents.

    What is in memory, once nothing runs, is the union of the blocks of those that are awake.
    """
    model, plain = served("qwen2")
    variants = zoo(tmp_path / "zoo", plain)
    cases = random_cases([None, *variants], seed=seed, count=90)
    engine = engine_for(model, slots=6, token_budget=32, kv_tokens=256, adapter_slots=slots)
    draw, collected = random.Random(seed), dict[str, Collected]()
    contents = {each.variant.id: engine.add_variant(each.variant).fingerprint for each in variants}
    loaded = weakref.WeakSet(engine._variants.served.values())
    assert len(loaded) == len(variants)
    for at, (made, prompt, tokens) in enumerate(cases):
        for _ in range(draw.randrange(3)):
            name = draw.choice(list(contents))
            if name in engine.variants:
                engine.remove_variant(name)
        if made is not None and made.variant.id not in engine.variants:
            awake = made.variant._replace(fingerprint=contents[made.variant.id])
            engine.add_variant(awake)
            loaded.add(engine._variants.served[made.variant.id])
        engine.submit(request(str(at), made, prompt, tokens))
        gather(engine.step(), collected)
    drain(engine, collected)
    assert_answers_alone(collected, cases, plain)
    assert_idle(engine)
    gc.collect()
    assert set(loaded) == set(engine._variants.served.values()), "what sleeps is freed"
    blocks = {block for chain in engine.variants.values() for block in chain.blocks}
    assert own_bytes(loaded, model.model) == sum(block.bytes for block in blocks)


def own_bytes(loaded: Iterable[LoadedVariant], base: torch.nn.Module) -> int:
    """Return the bytes of the different tensors of variants, without those of the base.

    A difference of biases is as large as the bias.
    """
    shared = {each.data_ptr() for each in base.parameters()}
    found: dict[int, int] = {}
    for change in (change for each in loaded for change in each.changes.values()):
        tensors = [] if change.own is None else list(change.own.parameters())
        tensors += [] if change.bias is None else [change.bias]
        tensors += [] if change.low_rank is None else [change.low_rank.down, change.low_rank.up]
        found |= {each.data_ptr(): each.nbytes for each in tensors if each.data_ptr() not in shared}
    found |= {tensor.data_ptr(): tensor.nbytes for each in loaded for tensor in each.virtual}
    return sum(found.values())


def test_virtual_tokens_count_for_the_context_and_for_nothing_that_clients_see(tmp_path: Path) -> None:
    model, plain = served()
    made = prefix_tuned(tmp_path / "shop", plain, tokens=9)
    engine = engine_for(model, page_size=4, kv_tokens=64)
    engine.add_variant(made.variant)
    with pytest.raises(RequestRejected, match=r"has 55 tokens, but .* may have at most 55 here"):
        engine.submit(request("long", made, [3] * 55, 1))
    prompt = list(range(1, 22))
    for cached in (0, 20):
        one = request("r", made, prompt, 100)
        one.sampling = replace(one.sampling, repetition_penalty=1.3)
        one.remaining = RemainingCurve.exactly(34)
        engine.submit(one)
        assert one.max_tokens == 64 - 9 - 21
        found = drain(engine)["r"]
        assert found.last.finish is Finish.LENGTH
        assert found.last.timings.cached_prompt_tokens == cached // 4 * 4 - (9 % 4 if cached else 0)
        assert found.last.completion_tokens == 34
    assert engine.load().prompt_tokens_total == 2 * len(prompt)
    assert_idle(engine)


def test_log_probabilities_of_a_prompt_begin_after_virtual_tokens(tmp_path: Path) -> None:
    model, plain = served()
    made = prefix_tuned(tmp_path / "shop", plain, tokens=6)
    engine = engine_for(model, page_size=4, slots=2, token_budget=5)
    engine.add_variant(made.variant)
    prompt = [7, 3, 9, 1, 4, 2, 8]
    one = request("r", made, prompt, 1)
    one.sampling = replace(one.sampling, prompt_logprobs=True, logprobs=0)
    engine.submit(one)
    found = [each for output in drain(engine)["r"].outputs for each in output.prompt_logprobs]
    assert len(found) == len(prompt) and found[0].logprob is None
    expected = made.alone(torch.tensor([prompt])).logits[0].log_softmax(-1)
    wanted = [float(expected[at, token]) for at, token in enumerate(prompt[1:])]
    assert [each.logprob for each in found[1:]] == pytest.approx(wanted, abs=1e-4)


def test_a_variant_whose_files_have_changed_does_not_wake(tmp_path: Path) -> None:
    model, plain = served()
    engine = engine_for(model)
    made = lora(tmp_path / "shop", plain, rank=4, seed=1)
    fingerprint = engine.add_variant(made.variant).fingerprint
    engine.remove_variant("shop")
    shutil.rmtree(tmp_path / "shop")
    lora(tmp_path / "shop", plain, rank=4, seed=2)
    with pytest.raises(VariantRefused, match="the files of shop have changed"):
        engine.add_variant(made.variant._replace(fingerprint=fingerprint))
    assert not engine.variants
    engine.add_variant(made.variant)


def test_what_rounding_does_is_computed_for_a_variant_beyond_the_tolerance_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = served("llama")
    rounded: list[Any] = []
    monkeypatch.setattr(certify, "round_otherwise", lambda _, undo: rounded.append(undo))
    engine_for(model).add_variant(lora(tmp_path / "near", plain, rank=4, seed=1).variant)
    assert not rounded
    monkeypatch.setattr(model_certify, "largest_difference", lambda *_, **__: 0.5)
    with pytest.raises(VariantRefused, match=r"differ by 5.0e-01 of the largest"):
        engine_for(model).add_variant(lora(tmp_path / "far", plain, rank=4, seed=2).variant)
    assert len(rounded) == 1
    monkeypatch.setattr(certify, "relative", lambda *_: 0.3)
    engine_for(model).add_variant(lora(tmp_path / "moved", plain, rank=4, seed=3).variant)
    assert len(rounded) == 2


@pytest.mark.parametrize("moved", [float("inf"), float("nan")])
def test_rounding_that_overflows_excuses_no_difference(
    moved: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = served("llama")
    monkeypatch.setattr(model_certify, "largest_difference", lambda *_, **__: 0.5)
    monkeypatch.setattr(certify, "relative", lambda *_: moved)
    with pytest.raises(VariantRefused, match=r"differ by 5.0e-01 of the largest"):
        engine_for(model).add_variant(lora(tmp_path / "far", plain, rank=4, seed=2).variant)


def test_the_same_contents_are_certified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = served()
    engine = engine_for(model)
    made = lora(tmp_path / "shop", plain, rank=4, seed=1)
    engine.add_variant(made.variant)
    engine.remove_variant("shop")
    monkeypatch.setattr("site_engine.variants.certify.Certifier.certify", lambda *_: pytest.fail("again"))
    engine.add_variant(made.variant)
    engine.submit(request("r", made, [3, 1, 4], 8))
    assert drain(engine)["r"].token_ids == made.answer([3, 1, 4], 8)


def test_a_name_given_to_other_contents_finds_nothing_stale(tmp_path: Path) -> None:
    model, plain = served()
    first, second = (lora(tmp_path / str(seed) / "shop", plain, rank=4, seed=seed) for seed in (1, 2))
    engine = engine_for(model)
    prompt = list(range(1, 60))
    answers = []
    for made in (first, second, first):
        engine.add_variant(made.variant)
        engine.submit(request("r", made, prompt, 8))
        answers.append(drain(engine)["r"])
        engine.remove_variant("shop")
    assert [each.token_ids for each in answers] == [made.answer(prompt, 8) for made in (first, second, first)]
    cached = [each.last.timings.cached_prompt_tokens for each in answers]
    assert cached[:2] == [0, 0]
    assert cached[2] > 40, "the same contents find their pages again"


def test_equal_parts_are_stored_once_and_go_with_the_last_that_has_them(tmp_path: Path) -> None:
    model, plain = served()
    engine = engine_for(model)
    made = [
        fine_tuned(tmp_path / "a", plain, lambda name: ".layers.1." in name, seed=3),
        fine_tuned(tmp_path / "b", plain, lambda name: ".layers.1." in name, seed=3),
        fine_tuned(tmp_path / "c", plain, lambda name: ".layers." in name and "proj" in name, seed=4),
    ]
    chains = [engine.add_variant(each.variant) for each in made]
    assert chains[0].blocks == chains[1].blocks
    assert [(block.first, block.last) for block in chains[0].blocks] == [(1, 2)]
    assert [(block.first, block.last) for block in chains[2].blocks] == [(0, 1), (1, 2)]
    layer_bytes = sum(each.nbytes for each in plain.model.layers[1].parameters())
    assert chains[0].own_bytes == layer_bytes
    own = [engine._variants.served[each].changes["model.layers.1.mlp.up_proj"].own for each in "abc"]
    assert own[0] is own[1] is not own[2]
    gone = weakref.ref(own[0])
    del own
    engine.remove_variant("a")
    gc.collect()
    assert gone() is not None
    engine.remove_variant("b")
    gc.collect()
    assert gone() is None, "its memory is free"


def test_a_variant_goes_with_its_last_request_also_where_that_moves_away(tmp_path: Path) -> None:
    model, plain = served()
    made = lora(tmp_path / "a", plain)
    engine = engine_for(model)
    engine.add_variant(made.variant)
    gone = weakref.ref(engine._variants.served["a"])
    engine.submit(request("r", made, [1, 2, 3], 8))
    for _ in range(3):
        engine.step()
    _, moved = engine.export("r")
    assert moved is not None and moved.fingerprint
    engine.remove_variant("a")
    gc.collect()
    assert gone() is None, "its memory is free"


def test_a_variants_own_end_token_ends_its_answers_alone(tmp_path: Path) -> None:
    model, plain = served()
    made = lora(tmp_path / "ends", plain, rank=4, seed=9)
    prompt = [3, 1, 4]
    whole = made.answer(prompt, 12)
    end = next(token for token in whole[2:] if token not in whole[:2])
    ends = {"eos_token_id": [-1, end, 10_000]}  # others than those of the vocabulary end nothing
    (tmp_path / "ends" / "generation_config.json").write_text(json.dumps(ends))
    engine = engine_for(model)
    assert engine.add_variant(made.variant).eos_token_ids == (end,)
    for name, chain in (("variant", made), ("base", None)):
        engine.submit(request(name, chain, prompt, 12))
    answers = drain(engine)
    assert answers["variant"].token_ids == whole[: whole.index(end) + 1]
    assert answers["base"].token_ids == greedy_answer(plain, prompt, 12)


def test_a_variant_that_computes_something_else_in_a_batch_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = served()
    made = lora(tmp_path / "a", plain, rank=4, seed=1)
    engine = engine_for(model)
    product = LowRank.__call__

    def wrong_beside_others(self: LowRank, given: torch.Tensor) -> torch.Tensor:
        return product(self, given) * (1.0 if given.shape[1] > 30 else 1.5)

    monkeypatch.setattr(LowRank, "__call__", wrong_beside_others)
    with pytest.raises(VariantRefused, match="computes other logits beside other rows than alone"):
        engine.add_variant(made.variant)
    assert not engine.variants


def random_cases(variants: list[Made | None], seed: int, count: int) -> list[Case]:
    """Prompts share beginnings, also between variants."""
    draw = random.Random(seed)
    beginning = [draw.randrange(1, VOCAB) for _ in range(40)]
    cases = []
    for at in range(count):
        prompt = beginning[: draw.choice((0, 8, 40))] + [
            draw.randrange(1, VOCAB) for _ in range(draw.choice((1, 5, 17)))
        ]
        cases.append((variants[at % len(variants)], prompt, draw.choice((1, 5, 40))))
    return cases


def assert_answers_alone(collected: dict[str, Collected], cases: list[Case], plain: Any) -> None:
    for at, (made, prompt, tokens) in enumerate(cases):
        found = collected[str(at)].token_ids
        alone = plain if made is None else made.alone
        assert found == greedy_answer(alone, prompt, tokens, guess=found), (at, made)


def request(name: str, made: Made | None, prompt: list[int], tokens: int) -> Request:
    one = greedy(name, prompt, tokens)
    one.chain = "" if made is None else made.variant.id
    one.remaining = TOO_SHORT
    return one
