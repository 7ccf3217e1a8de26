"""The attempts of one gateway at a site, without an engine."""

from __future__ import annotations

from typing import NoReturn

import pytest

from site_engine import messages as m
from site_engine.core.remaining_curve import RemainingCurve
from site_engine.core.request import Finish, Lane, Output, Sampling
from site_engine.engine_client import Delivered, Prepared
from site_engine.federation.attempts import Attempts, Routes


class FaultyCalls:
    """A style of calls whose parser fails."""

    calls = 0

    def parser(self, choice: str, delivered: Delivered) -> FaultyCalls:
        return self

    def feed(self, text: str) -> NoReturn:
        raise RecursionError

    def end(self) -> NoReturn:
        raise RecursionError


def test_a_text_that_the_parser_fails_at_ends_its_own_attempt_alone(caplog: pytest.LogCaptureFixture) -> None:
    attempts = Attempts(1, {})
    for name, calls in (("faulty", FaultyCalls()), ("other", None)):
        prompt, rest = m.TextPrompt("hi"), (Sampling(), 1, False, RemainingCurve(), Lane.CHAT, 0, None, "")
        attempts.assign(m.Assign(name, name, "m", prompt, *rest), 0.0)
        attempts.prepared(name, Prepared((1,), "", tool_calling=calls))
        attempts.admitted(name)
    cancelled = list[str]()
    for name in ("faulty", "other", "faulty"):
        cancelled += attempts.deliver(name, 0, Output(name, "text", (2,), completion_tokens=1))
    deltas = [
        delta for step in attempts.outbox.take(1e9) if isinstance(step, m.Step) for delta in step.deltas
    ]
    assert [(delta.attempt_id, delta.text, delta.completion_tokens, delta.finish) for delta in deltas] == [
        ("faulty", "", 1, Finish.FAILED),
        ("other", "text", 1, None),
    ]
    assert "RecursionError" in deltas[0].error
    assert ("faulty" in attempts, "other" in attempts) == (False, True)
    assert cancelled == ["1/0/faulty"]  # the engine computes nothing more of it
    assert "cannot be passed on" in caplog.text


def test_a_fault_after_a_finish_ends_the_attempt_and_its_other_choices() -> None:
    """The first choice has its end already; the engine still works on the second."""

    def on_finish(*_: object) -> NoReturn:
        raise ValueError

    routes: Routes = {}
    attempts = Attempts(1, routes, on_finish)
    prompt, rest = m.TextPrompt("hi"), (Sampling(), 2, False, RemainingCurve(), Lane.CHAT, 0, None, "")
    attempts.assign(m.Assign("a", "a", "m", prompt, *rest), 0.0)
    attempts.prepared("a", Prepared((1,), ""))
    attempts.admitted("a")
    end = Output("1/0/a", "text", (2,), completion_tokens=1, finish=Finish.STOP)
    assert attempts.deliver("a", 0, end) == ["1/1/a"]
    deltas = [
        delta for step in attempts.outbox.take(1e9) if isinstance(step, m.Step) for delta in step.deltas
    ]
    assert [(delta.choice, delta.finish) for delta in deltas] == [(0, Finish.STOP), (1, Finish.FAILED)]
    assert (attempts.live, routes) == (0, {})
