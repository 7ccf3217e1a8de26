"""The overlapped engine gives the tokens that the model gives alone. Kernels run interpreted."""

from __future__ import annotations

import copy
from itertools import count
from typing import Any

import pytest
import torch

from tests.support import interpreted  # noqa: F401 - skips where there is no Triton

# isort: split

from site_engine.core.request import Finish, Request, Sampling
from site_engine.cuda.cuda_graph import Step
from site_engine.cuda.runner import DeviceRunner
from site_engine.engine.build import packed_engine
from site_engine.engine.settings import EngineSettings
from tests.support.engine_models import (
    Collected,
    Ticks,
    drain,
    family,
    gather,
    greedy,
)
from tests.support.overlapped_engines import fused_family, overlapped, requests
from tests.support.training import equal, examples, run, trainer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "fused", "count"),
    [("gemma2", False, 5), ("llama", True, 5), ("mistral", True, 3), ("qwen2", True, 3)],
)
def test_tokens_equal_those_of_generate(name: str, fused: bool, count: int) -> None:
    """Five are more than there are slots; three run side by side."""
    of = fused_family(name) if fused else family(name)
    engine = overlapped(of, fused=fused, certified=True)
    asked = requests(count)
    for number, (prompt, tokens) in enumerate(asked):
        engine.submit(greedy(str(number), prompt, tokens))
    got = drain(engine)
    for number, (prompt, tokens) in enumerate(asked):
        found = got[str(number)].token_ids
        assert found == of.generate(prompt, tokens, guess=found), number


def test_gate_and_up_may_be_computed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("site_engine.cuda.llama_forward.faster_split", lambda weights: lambda rows: True)
    of = fused_family("llama")
    engine = overlapped(of, fused=True)
    engine.submit(greedy("one", [5, 6, 7], 4))
    assert drain(engine)["one"].token_ids == of.generate([5, 6, 7], 4)


def test_a_tight_pool_preempts_and_changes_no_token() -> None:
    of = family("llama")
    engine = overlapped(of, kv_tokens=72)
    asked = requests(5, seed=11)
    for number, (prompt, tokens) in enumerate(asked):
        engine.submit(greedy(str(number), prompt, tokens + 6))
    got = drain(engine)
    for number, (prompt, tokens) in enumerate(asked):
        found = got[str(number)].token_ids
        assert found == of.generate(prompt, tokens + 6, guess=found), number


def test_who_is_cancelled_or_stops_while_its_next_token_is_computed_leaves_nothing() -> None:
    of = family("llama")
    prompt = [9, 8, 7, 6]
    answer = of.generate(prompt, 8)
    stop = next(at for at in range(8) if answer[at] not in answer[:at] and at >= 2)
    engine = overlapped(of)
    engine.submit(greedy("stops", prompt, 8, stop_token_ids=(answer[stop],)))
    engine.submit(greedy("goes", [4, 4, 4], 8))
    collected: dict[str, Collected] = {}
    for _ in range(3):
        gather(engine.step(), collected)
    engine.cancel("goes")
    drain(engine, collected)
    assert collected["stops"].token_ids == answer[: stop + 1]
    last = collected["goes"].last
    assert last is not None and last.finish is Finish.CANCELLED
    prefixes = engine._scheduler.kv_cache_manager.prefixes
    assert prefixes is not None
    prefixes.clear()
    assert engine._pool.free == engine._pool.capacity


def test_drawn_tokens_depend_on_the_seed_alone() -> None:
    """Not on the other rows, nor on whether steps overlap."""
    of = fused_family("llama")
    rules = {"temperature": 0.9, "top_p": 0.9, "seed": 5}
    alone = packed_engine(of.served, EngineSettings(slots=2, page_size=4, kv_tokens=256), Ticks())
    alone.submit(Request("one", [5, 6, 7], Sampling(max_tokens=5, **rules)))
    wanted = drain(alone)["one"].token_ids
    engine = overlapped(of, fused=True)
    engine.submit(greedy("greedy", [5, 6, 7], 5))
    engine.submit(Request("one", [5, 6, 7], Sampling(max_tokens=5, **rules)))
    engine.submit(Request("other", [9, 9], Sampling(max_tokens=3, temperature=2.0)))
    collected: dict[str, Collected] = {}
    for _ in range(3):
        gather(engine.step(), collected)
    engine.submit(greedy("ruled", [3, 2, 1], 2, logprobs=1, prompt_logprobs=True))
    got = drain(engine, collected)
    assert got["one"].token_ids == wanted
    assert got["greedy"].token_ids == of.generate([5, 6, 7], 5) != wanted


def test_a_prompt_whose_log_probabilities_are_wanted_holds_the_others_back_until_it_is_read() -> None:
    of = family("llama")
    engine = overlapped(of)
    engine.submit(greedy("plain", [1, 2, 3], 8))
    engine.step()
    engine.submit(greedy("echo", [3, 2, 1], 5, logprobs=1, prompt_logprobs=True))
    collected: dict[str, Collected] = {}
    while "echo" not in collected:
        gather(engine.step(), collected)
        assert engine._pending is None
    assert len(collected["echo"].token_ids) == 1
    got = drain(engine, collected)
    assert got["plain"].token_ids == of.generate([1, 2, 3], 8)
    assert got["echo"].token_ids == of.generate([3, 2, 1], 5)
    assert sum(len(output.logprobs) for output in got["echo"].outputs) == 5


def test_a_row_that_starts_beside_such_a_prompt_keeps_its_own_rules() -> None:
    """Its slot had other rules before."""
    of = fused_family("llama")
    engine = overlapped(of, slots=2)
    engine.submit(Request("drawn", [9, 9], Sampling(max_tokens=2, temperature=2.0)))
    engine.submit(Request("too", [9, 8], Sampling(max_tokens=2, temperature=2.0)))
    drain(engine)
    engine.submit(greedy("echo", [3, 2, 1], 3, prompt_logprobs=True))
    engine.submit(greedy("plain", [5, 6, 7], 8))
    assert drain(engine)["plain"].token_ids == of.generate([5, 6, 7], 8)


def test_a_prompt_that_waits_for_a_slot_holds_nobody_back() -> None:
    engine = overlapped(family("llama"), slots=2)
    for name in ("one", "other"):
        engine.submit(greedy(name, [5, 6, 7], 20))
    engine.step()
    engine.submit(greedy("echo", [3, 2, 1], 3, logprobs=1, prompt_logprobs=True))
    for _ in range(3):
        engine.step()
        assert engine.waits("echo")
        assert engine._pending is not None
    assert len(drain(engine)["echo"].token_ids) == 3


def test_who_waits_for_its_last_token_is_not_preempted() -> None:
    of = family("llama")
    engine = overlapped(of)
    engine.submit(greedy("one", [5, 6, 7], 4))
    got = drain(engine)["one"]
    assert got.token_ids == of.generate([5, 6, 7], 4)
    assert got.last is not None
    assert got.last.timings is not None
    assert got.last.timings.preemptions == 0


def test_what_was_computed_for_nobody_is_not_counted_as_served() -> None:
    of = family("llama")
    prompt = [9, 8, 7, 6]
    answer = of.generate(prompt, 8)
    engine = overlapped(of)
    for number in range(3):
        engine.submit(greedy(str(number), prompt, 8, stop_token_ids=(answer[2],)))
    engine.submit(greedy("gone", [4, 4, 4], 8))
    collected: dict[str, Collected] = {}
    for _ in range(3):
        gather(engine.step(), collected)
    engine.cancel("gone")
    drain(engine, collected)
    assert engine.load().tokens_total == sum(len(each.token_ids) for each in collected.values())


def test_a_token_on_its_way_is_still_to_be_read() -> None:
    """Beside one token of each that runs, a report has what the prompts under way have left."""
    engine = overlapped(family("llama"), token_budget=8)
    for number in range(3):
        engine.submit(greedy(str(number), [9, 8, 7], 8))
    engine.submit(greedy("long", list(range(1, 31)), 4))
    seen = []
    while engine.has_work:
        engine.step()
        load = engine.load()
        seen.append(load.unread_tokens - load.running)
    assert max(seen) > 8
    assert min(seen) == seen[-1] == 0


def test_logits_that_are_not_finite_fail_the_request_and_no_other() -> None:
    of = fused_family("llama")
    engine = overlapped(of)
    with torch.no_grad():
        of.served.model.model.embed_tokens.weight[77] = float("nan")
    engine.submit(greedy("sick", [77, 2, 3], 4))
    engine.submit(greedy("well", [1, 2, 3], 4))
    got = drain(engine)
    last = got["sick"].last
    assert last is not None and last.finish is Finish.FAILED
    assert got["well"].token_ids == of.generate([1, 2, 3], 4)


@pytest.mark.parametrize("failing", [0, 3])
def test_an_iteration_that_the_device_did_not_take_is_computed_again(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first reads prompts, the fourth comes to a new page."""
    of = family("llama")
    engine = overlapped(of)
    make, asked = DeviceRunner._step, count()

    def step(*given: Any, **more: Any) -> Step:
        if next(asked) == failing:
            raise RuntimeError("there is no room for another graph")
        return make(*given, **more)

    monkeypatch.setattr(DeviceRunner, "_step", step)
    engine.submit(greedy("one", [5, 6, 7, 8, 9, 10], 6))
    engine.submit(greedy("two", [9, 9, 9], 6))
    got = drain(engine)
    assert got["one"].token_ids == of.generate([5, 6, 7, 8, 9, 10], 6)
    assert got["two"].token_ids == of.generate([9, 9, 9], 6)
    figures = engine.load()
    assert figures.tokens_total == 12
    assert figures.computed_tokens_total == 6 + 3 + 2 * 5


def test_an_iteration_that_fails_with_its_one_request_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not computed again: long prompts would look as if they took no time."""
    engine = overlapped(family("llama"))

    def step(*_: Any, **__: Any) -> Step:
        raise RuntimeError("there is no room for another graph")

    monkeypatch.setattr(DeviceRunner, "_step", step)
    engine.submit(greedy("one", list(range(1, 41)), 6))
    (output,) = engine.step()
    assert output.finish is Finish.FAILED
    figures = engine.load()
    assert (figures.computed_tokens_total, figures.seconds_per_iteration) == (0, 0.0)


def test_tokens_and_adapters_are_the_same_beside_each_other() -> None:
    """The step that runs is published before a slice, and the adapter is trained on joined weights."""
    of, data = fused_family("llama"), examples(5, seed=2, longest=12)
    alone = trainer(data, model=copy.deepcopy(of.plain))
    run(alone)
    engine = overlapped(of, fused=True)
    job = trainer(data, model=of.served.model)
    engine.training.begin("job", "acme", job)
    collected: dict[str, Collected] = {}
    for number, (prompt, tokens) in enumerate(asked := requests(2)):
        for _ in range(7):
            gather(engine.step(), collected)
        engine.submit(greedy(str(number), prompt, tokens + 2))
    drain(engine, collected)
    for number, (prompt, tokens) in enumerate(asked):
        assert collected[str(number)].token_ids == of.generate(prompt, tokens + 2), number
    assert equal(job.adapter.tensors(), alone.adapter.tensors())
