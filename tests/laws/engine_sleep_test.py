"""Answers of an engine that has slept are those of one that has not."""

from __future__ import annotations

import pytest
import torch

from site_engine.core.request import Output, Request, Sampling
from site_engine.engine.build import build_engine
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.errors import NoMemory
from site_engine.model.loader import from_model
from site_engine.model.sleep_memory import SleepMemory
from tests.support.engine_models import FAMILIES
from tests.support.model_families import random_model

PROMPT = tuple(range(10, 60))


def make(family: str) -> SiteEngine:
    model = from_model(random_model(FAMILIES[family]()), eos_token_ids=())
    settings = EngineSettings(slots=4, page_size=4, kv_tokens=400, sleep="host", debug_poison=True)
    return build_engine(model, settings, lambda: 0.0)


def answers(engine: SiteEngine, name: str) -> tuple[list[int], list[Output]]:
    rules = Sampling(max_tokens=12, temperature=0.0)
    engine.submit(Request(name, PROMPT, rules))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return [token for each in outputs for token in each.token_ids], outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_after_sleep_are_those_before_it(family: str) -> None:
    engine = make(family)
    assert engine.sleeper is not None
    before, _ = answers(engine, "before")
    weights = list(engine._model.model.parameters())
    for turn in range(2):
        assert engine.sleeper.sleep() == ""
        assert not any(each.any() for each in weights)
        assert not any(each.any() for each in (*engine.runner.kv_cache.keys, *engine.runner.kv_cache.values))
        assert engine.sleeper.wake() == ""
        after, outputs = answers(engine, f"after {turn}")
        assert after == before
        timings = outputs[-1].timings
        assert timings is not None
        assert timings.cached_prompt_tokens == 0  # nothing is left of the pages
        again, outputs = answers(engine, f"again {turn}")
        assert again == before
        assert outputs[-1].timings is not None
        assert outputs[-1].timings.cached_prompt_tokens > 0


def test_an_engine_that_has_no_memory_to_wake_says_so_and_sleeps_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make("llama")
    assert engine.sleeper is not None
    before, _ = answers(engine, "before")
    assert engine.sleeper.sleep() == ""

    def full(self: SleepMemory) -> None:
        raise NoMemory("cuda:0 has 5 bytes free, which is too little")

    with monkeypatch.context() as patched:
        patched.setattr(SleepMemory, "wake", full)
        assert engine.sleeper.wake() == "cuda:0 has 5 bytes free, which is too little"
    assert engine.sleeper.wake() == ""
    assert answers(engine, "after")[0] == before


def test_an_engine_without_room_in_host_memory_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make("llama")
    assert engine.sleeper is not None

    def full(self: SleepMemory) -> int:
        raise NoMemory("no host memory")

    before, _ = answers(engine, "before")
    monkeypatch.setattr(SleepMemory, "sleep", full)
    assert engine.sleeper.sleep() == "no host memory"
    assert answers(engine, "after")[0] == before
    assert torch.is_tensor(engine.runner.kv_cache.keys[0])
