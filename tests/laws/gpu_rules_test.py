"""Rules of sampling and grammars in the overlapped engine: as on the host, and nobody waits for them.

Kernels run interpreted.
"""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest
import torch

from tests.support import interpreted  # noqa: F401 - skips where there is no Triton

# isort: split

from site_engine.core.remaining_curve import RemainingCurve
from site_engine.core.request import Finish, Request, Sampling
from site_engine.core.schedule_plan import SchedulePlan
from site_engine.core.scheduler import Scheduler
from site_engine.cuda.ruled_rows import RuledRows
from site_engine.cuda.runner import DeviceRunner
from site_engine.engine.build import packed_engine
from site_engine.engine.settings import EngineSettings
from site_engine.model.runner import NOT_FINITE
from site_engine.text.grammar import Grammars
from tests.support.engine_models import Collected, Ticks, drain, family, gather, greedy
from tests.support.overlapped_engines import fused_family, overlapped, requests

pytestmark = pytest.mark.slow


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
    assert not [each.last.error for each in got.values() if each.last is not None and each.last.error]
    assert got["plain"].token_ids == of.generate([1, 2, 3], 6)
    for name, one in wanted.items():
        assert got[name].token_ids == one.token_ids, name
        told, known = ([each for output in of.outputs for each in output.logprobs] for of in (got[name], one))
        assert [each.token for each in told] == [each.token for each in known], name
        assert [each.logprob for each in told] == pytest.approx([each.logprob for each in known], abs=1e-4)
        tops = [[other.token for other in each.top] for each in told]
        assert tops == [[other.token for other in each.top] for each in known], name


def test_rules_are_queued_as_soon_as_the_step_before_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the next step has been planned, for which the device would wait."""
    engine, plan, finished = overlapped(family("llama")), Scheduler.plan, list[bool]()

    def planned(scheduler: Scheduler, *given: Any, **more: Any) -> SchedulePlan:
        pending: Any = engine._pending
        finished.append(pending is None or pending._finished)
        return plan(scheduler, *given, **more)

    monkeypatch.setattr(Scheduler, "plan", planned)
    engine.submit(greedy("ruled", [3, 2, 1], 6, presence_penalty=0.7))
    engine.submit(greedy("plain", [1, 2, 3], 8))
    drain(engine)
    assert len(finished) > 8
    assert all(finished)


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
    with torch.no_grad():
        of.served.model.model.embed_tokens.weight[77] = float("nan")
    engine.submit(greedy("plain", [1, 2, 3], 6))
    engine.submit(greedy("ruled", [3, 2, 1], 6, presence_penalty=0.5))
    engine.submit(greedy("sick", [77, 2, 3], 4))
    engine.step()

    def failing(*_: Any) -> None:
        raise ValueError("no such rule")

    monkeypatch.setattr(RuledRows, "sample", failing)
    got = drain(engine)
    last = got["ruled"].last
    assert last is not None and last.finish is Finish.FAILED and "no such rule" in last.error
    sick = got["sick"].last
    assert sick is not None and (sick.error, got["sick"].token_ids) == (NOT_FINITE, [])
    assert got["plain"].token_ids == of.generate([1, 2, 3], 6)
