"""Tokens in columns come in the order in which they were made, also where a step publishes two iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from site_engine.core.request import Output
from site_engine.engine.build import overlapped_engine
from site_engine.engine.engine import SiteEngine
from site_engine.engine.engine_thread import EngineThread
from site_engine.engine.settings import EngineSettings
from site_engine.engine_client import Listener
from site_engine.text.detokenize import TokenNames
from tests.support.engine_models import Ticks, family, greedy


class Heard:
    """An engine whose steps overlap, on its thread's operations, and what it has told."""

    def __init__(self) -> None:
        settings = EngineSettings(slots=8, token_budget=64, page_size=4, kv_tokens=512)
        served = replace(family("llama").served, vocabulary=TokenNames())
        self.engine: SiteEngine = overlapped_engine(served, settings, Ticks())
        self.outputs: list[Output] = []
        self.thread = EngineThread(self.engine, lambda call: call(), Ticks())
        self.thread.listener = Listener(self._heard, ignore, ignore)

    def _heard(self, outputs: Sequence[Output]) -> None:
        self.outputs += outputs

    def of(self, name: str) -> list[Output]:
        return [each for each in self.outputs if each.request_id == name]

    def drain(self) -> None:
        while self.engine.has_work:
            self.thread.turn()


def ignore(_: object) -> None:
    """Stand in for who wants to know."""


def fail_once(engine: SiteEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    runner: Any = engine.runner
    launch = runner.launch

    def fails(*_: Any) -> None:
        monkeypatch.setattr(runner, "launch", launch)
        raise RuntimeError("there is no room for another graph")

    monkeypatch.setattr(runner, "launch", fails)


@pytest.mark.parametrize("tokens", [2, 3, 8])
@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("cause", ["echo", "failure"])
def test_two_iterations_of_one_step_are_told_in_order(
    cause: str, turns: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    heard.thread.submit([greedy("r", [1, 2, 3], tokens), greedy("beside", [4, 5], 9)], ignore)
    for _ in range(turns):
        heard.thread.turn()
    if cause == "echo":
        heard.thread.submit([greedy("echo", [3, 2, 1], 5, logprobs=1, prompt_logprobs=True)], ignore)
    else:
        fail_once(heard.engine, monkeypatch)
    heard.drain()
    told = heard.of("r")
    assert [each.completion_tokens for each in told] == list(range(1, tokens + 1))
    assert [each.finish is not None for each in told] == [False] * (tokens - 1) + [True]
    assert [token for each in told for token in each.token_ids] == family("llama").generate([1, 2, 3], tokens)
    assert not heard.thread._live
