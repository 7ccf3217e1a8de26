"""The overlapped engine gives the tokens that the model gives alone. Kernels run interpreted."""

from __future__ import annotations

import copy
import json
import random
from contextlib import nullcontext
from itertools import count
from typing import Any

import pytest
import torch

from tests.support import interpreted  # noqa: F401 - skips where there is no Triton

# isort: split

from site_engine.core.remaining_curve import RemainingCurve
from site_engine.core.request import Finish, Request, Sampling
from site_engine.cuda.cuda_graph import Step
from site_engine.cuda.llama_forward import llama_forward
from site_engine.cuda.ruled_rows import RuledRows
from site_engine.cuda.runner import DeviceRunner
from site_engine.engine.build import overlapped_engine, packed_engine
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.model.loader import from_model
from site_engine.text.grammar import Grammars
from tests.support.engine_models import (
    FAMILIES,
    Collected,
    Family,
    Ticks,
    drain,
    family,
    gather,
    greedy,
    random_model,
    uncertified,
)
from tests.support.training import equal, examples, run, trainer

pytestmark = pytest.mark.slow


def overlapped(of: Family, *, fused: bool = False, certified: bool = False, **settings: int) -> SiteEngine:
    chosen = {"slots": 4, "token_budget": 40, "page_size": 4, "kv_tokens": 256} | settings
    forward = llama_forward(of.served) if fused else None
    with nullcontext() if certified else uncertified():
        return overlapped_engine(of.served, EngineSettings(**chosen, debug_poison=True), Ticks(), forward)


def requests(count: int, seed: int = 3) -> list[tuple[list[int], int]]:
    rnd = random.Random(seed)
    return [
        ([rnd.randrange(1, 300) for _ in range(rnd.choice((1, 5, 17, 30)))], rnd.choice((1, 2, 5, 8)))
        for _ in range(count)
    ]


def fused_family(name: str) -> Family:
    plain = random_model(FAMILIES[name]())
    return Family(from_model(copy.deepcopy(plain), eos_token_ids=()), plain)


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


RULED: dict[str, dict[str, Any]] = {
    "log probabilities": {"logprobs": 2},
    "presence and frequency": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    "repetition": {"repetition_penalty": 1.5},
    "bias": {"logit_bias": {17: 30.0}},
    "least length": {"min_tokens": 4, "stop_token_ids": (17,), "logit_bias": {17: 100.0}},
    "drawn": {"temperature": 0.9, "top_p": 0.9, "seed": 5, "presence_penalty": 1.5, "logprobs": 1},
}


def test_rows_with_rules_keep_them_and_hold_nobody_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of rule at once, beside a plain row: each as alone on the host, with steps overlapped."""
    of = fused_family("llama")
    wanted = {}
    for name, rules in RULED.items():
        alone = packed_engine(of.served, EngineSettings(slots=2, page_size=4, kv_tokens=256), Ticks())
        alone.submit(Request(name, [3, 2, 1], Sampling(**{"temperature": 0.0, "max_tokens": 5} | rules)))
        wanted[name] = drain(alone)[name]
    engine = overlapped(of, fused=True, slots=8)
    monkeypatch.delattr(DeviceRunner, "run")  # the way without overlap
    engine.submit(greedy("plain", [1, 2, 3], 6))
    for name, rules in RULED.items():
        engine.submit(Request(name, [3, 2, 1], Sampling(**{"temperature": 0.0, "max_tokens": 5} | rules)))
    got = drain(engine)
    assert got["plain"].token_ids == of.generate([1, 2, 3], 6)
    for name, one in wanted.items():
        assert got[name].token_ids == one.token_ids, name
        told, known = ([each for output in of.outputs for each in output.logprobs] for of in (got[name], one))
        assert [each.token for each in told] == [each.token for each in known], name
        assert [each.logprob for each in told] == pytest.approx([each.logprob for each in known], abs=1e-4)
        tops = [[other.token for other in each.top] for each in told]
        assert tops == [[other.token for other in each.top] for each in known], name


def test_penalties_survive_preemption_and_resumption() -> None:
    of = fused_family("llama")
    rules = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3}
    asked = [(prompt[:9], 9) for prompt, _ in requests(3, seed=11)]
    wanted = []
    for number, (prompt, tokens) in enumerate(asked):
        alone = packed_engine(of.served, EngineSettings(slots=2, page_size=4, kv_tokens=256), Ticks())
        alone.submit(greedy(str(number), prompt, tokens, **rules))
        wanted.append(drain(alone)[str(number)].token_ids)
    engine = overlapped(of, fused=True, kv_tokens=32)
    for number, (prompt, tokens) in enumerate(asked):
        sampling = Sampling(max_tokens=tokens, temperature=0.0, **rules)
        request = Request(str(number), prompt, sampling, resumed=wanted[number][: number % 3])
        request.remaining = RemainingCurve.exactly(2)  # too few: the pages run out
        engine.submit(request)
    got = drain(engine)
    preempted = 0
    for number, tokens_ in enumerate(wanted):
        last = got[str(number)].last
        assert got[str(number)].token_ids == tokens_[number % 3 :], number
        assert last is not None and last.timings is not None
        preempted += last.timings.preemptions
    assert preempted


def test_logits_that_are_not_finite_fail_a_row_with_rules() -> None:
    of = fused_family("llama")
    engine = overlapped(of)
    with torch.no_grad():
        of.served.model.model.embed_tokens.weight[77] = float("nan")
    engine.submit(greedy("sick", [77, 2, 3], 4, presence_penalty=0.5, logprobs=1))
    engine.submit(greedy("well", [1, 2, 3], 4, logprobs=1))
    got = drain(engine)
    last = got["sick"].last
    assert last is not None and last.finish is Finish.FAILED
    assert got["well"].token_ids == of.generate([1, 2, 3], 4)


def test_a_prompt_whose_log_probabilities_are_wanted_holds_the_others_back_until_it_is_read() -> None:
    of = family("llama")
    engine = overlapped(of)
    engine.submit(greedy("plain", [1, 2, 3], 8))
    engine.step()
    engine.submit(greedy("echo", [3, 2, 1], 5, logprobs=1, prompt_logprobs=True))
    collected: dict[str, Collected] = {}
    while engine._live.needs_host:
        gather(engine.step(), collected)
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


def test_who_is_given_to_another_site_does_not_hold_the_lead_back() -> None:
    engine = overlapped(family("llama"))
    engine.submit(greedy("ruled", [3, 2, 1], 3, logprobs=1, prompt_logprobs=True))
    assert engine.release(["ruled"]) == ["ruled"]
    assert not engine._live.needs_host


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


def test_a_row_with_a_grammar_keeps_to_it_and_holds_nobody_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain rows get their tokens in the iterations in which they would get them alone; the other in each."""
    of = family("llama")
    served = of.served
    grammars = Grammars(served.tokenizer, served.vocab_size, served.eos_token_ids)
    guided = greedy("guided", [5, 6, 7], 20)
    guided.grammar = grammars.compile('start: %json {"enum": ["yes", "no"]}', "response_format")
    alone, beside = overlapped(of), overlapped(of)
    monkeypatch.delattr(DeviceRunner, "run")
    asked = requests(3)
    for number, (prompt, tokens) in enumerate(asked):
        for engine in (alone, beside):
            engine.submit(greedy(str(number), prompt, tokens))
    beside.submit(guided)
    ends: list[dict[str, int]] = []
    for engine in (alone, beside):
        collected: dict[str, Collected] = {}
        ended: dict[str, int] = {}
        steps: list[int] = []
        for step in count():
            if not engine.has_work:
                break
            outputs = engine.step()
            gather(outputs, collected)
            ended |= {output.request_id: step for output in outputs if output.finish is not None}
            steps += [step for output in outputs if output.request_id == "guided"]
        ends.append(ended)
    assert steps == list(range(steps[0], steps[0] + len(steps))) and len(steps) > 2
    last = collected["guided"].last
    assert collected["guided"].text in {'"yes"', '"no"'}
    assert last is not None and last.finish is Finish.STOP
    for number, (prompt, tokens) in enumerate(asked):
        assert collected[str(number)].token_ids == of.generate(prompt, tokens)
    assert ends[0] == {name: step for name, step in ends[1].items() if name != "guided"}


@pytest.mark.parametrize("pages", [64, 10])
def test_rows_with_grammars_have_the_tokens_of_the_host(pages: int) -> None:
    """Drawn, with other rules, and where pages run out: rows leave while their token is on its way."""
    of = family("llama")
    served = of.served
    grammars = Grammars(served.tokenizer, served.vocab_size, served.eos_token_ids)
    schema = {"type": "array", "items": {"enum": ["yes", "no", 17]}, "minItems": 2, "maxItems": 4}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.9, "seed": 3},
        {"presence_penalty": 1.0, "min_tokens": 6, "logprobs": 2},
        {"temperature": 1.2, "seed": 5, "top_p": 0.9, "logit_bias": {20: 3.0}},
    ]

    def asked(number: int) -> Request:
        sampling = Sampling(**{"temperature": 0.0, "max_tokens": 20} | kinds[number % len(kinds)])
        request = Request(str(number), [5 + number, 6, 7], sampling)
        request.grammar = grammars.compile(f"start: %json {json.dumps(schema)}", "response_format")
        request.remaining = RemainingCurve.exactly(2)  # too few: where pages are few they run out
        return request

    wanted = {}
    for number in range(5):
        alone = packed_engine(served, EngineSettings(slots=2, page_size=4, kv_tokens=256), Ticks())
        alone.submit(asked(number))
        wanted |= drain(alone)
    engine = overlapped(of, kv_tokens=4 * pages)
    for number in range(5):
        engine.submit(asked(number))
    preempted = 0
    for name, one in drain(engine).items():
        assert (one.token_ids, one.text) == (wanted[name].token_ids, wanted[name].text), name
        assert one.last is not None and one.last.timings is not None
        preempted += one.last.timings.preemptions
    assert bool(preempted) == (pages == 10)


def test_rules_that_fail_end_their_row_with_the_reason_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    of = fused_family("llama")
    engine = overlapped(of, fused=True)
    engine.submit(greedy("plain", [1, 2, 3], 6))
    engine.submit(greedy("ruled", [3, 2, 1], 6, presence_penalty=0.5))
    engine.step()

    def failing(*_: Any) -> None:
        raise ValueError("no such rule")

    monkeypatch.setattr(RuledRows, "sample", failing)
    got = drain(engine)
    last = got["ruled"].last
    assert last is not None and last.finish is Finish.FAILED and "no such rule" in last.error
    assert got["plain"].token_ids == of.generate([1, 2, 3], 6)


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
