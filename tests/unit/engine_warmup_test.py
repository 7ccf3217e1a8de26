"""The first short answers of a site: they measure, and leave nothing behind."""

from __future__ import annotations

import pytest

from site_engine.core.schedule_plan import SchedulePlan
from site_engine.engine.warmup import warm_up
from site_engine.model.runner import Logits
from tests.support.engine_models import VOCAB, Ticks, assert_idle, engine_for, family, greedy


def test_a_warm_engine_knows_what_an_iteration_costs_and_counts_nothing() -> None:
    engine = engine_for(family("llama").served, iteration_floor_s=0.05)
    free = engine.load().kv_free_tokens
    warm_up(engine, VOCAB, free)
    load = engine.load()
    assert_idle(engine)
    assert (load.tokens_total, load.prompt_tokens_total, load.kv_free_tokens) == (0, 0, free)
    assert load.seconds_per_iteration == pytest.approx(0.05)
    assert load.iteration.seconds(rows=1, tokens=1, kv_tokens=40) == pytest.approx(0.05, rel=0.1)
    assert load.tokens_per_s > 0


def test_long_prompts_run_alone_and_beside_answers_of_any_context() -> None:
    engine = engine_for(family("llama").served, slots=4, token_budget=16, kv_tokens=512)
    plans = []
    plan_of = engine._scheduler.plan

    def seen(now: float, **limits: int | None) -> SchedulePlan:
        plans.append(plan := plan_of(now, **limits))
        return plan

    engine._scheduler.plan = seen  # type: ignore[method-assign]
    warm_up(engine, VOCAB, 512, longest=40)
    assert_idle(engine)
    steps = [(len(plan.decoding), plan.prefills[0]) for plan in plans if plan.prefills]
    assert {bool(decodes) for decodes, chunk in steps if chunk.start == 0 and chunk.length > 8} == {
        True,
        False,
    }
    assert {bool(decodes) for decodes, chunk in steps if chunk.start and chunk.length > 4} == {True, False}
    assert engine.load().prompt_tokens_total == 0


@pytest.mark.parametrize("slots", [16, 64])
def test_a_site_that_lets_few_requests_wait_starts(slots: int) -> None:
    """One tenant may have a part of these places alone."""
    engine = engine_for(family("llama").served, slots=slots, max_pending=16, token_budget=64)
    warm_up(engine, VOCAB, engine.load().kv_free_tokens, longest=64)
    assert_idle(engine)


def test_a_site_without_room_for_an_answer_is_left_alone() -> None:
    engine = engine_for(family("llama").served)
    warm_up(engine, VOCAB, room_tokens=8)
    assert engine.load().tokens_per_s == 0


def test_an_answer_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(family("llama").served)

    def broken(plan: object) -> None:
        raise ValueError("no kernel image")

    monkeypatch.setattr(engine.runner, "run", broken)
    with pytest.raises(RuntimeError, match="no kernel image"):
        warm_up(engine, VOCAB, 1000)


def test_an_iteration_takes_until_the_next_begins_however_unevenly_its_floor_is_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_for(family("llama").served, iteration_floor_s=0.05)
    clock, run = engine._clock, engine.runner.run
    assert isinstance(clock, Ticks)

    def every_other_takes_longer(plan: SchedulePlan) -> Logits:
        clock.now_s += 0.03 * (turn % 2)
        return run(plan)

    monkeypatch.setattr(engine.runner, "run", every_other_takes_longer)
    engine.submit(greedy("r", [5, 6, 7], 40, ignore_eos=True))
    for turn in range(40):
        clock.now_s = 0.05 * turn
        engine.step()
    assert engine.load().seconds_per_iteration == pytest.approx(0.05, rel=0.01)
    assert engine.load().tokens_total == 40
