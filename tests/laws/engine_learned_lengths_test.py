"""A batch whose lengths are all off by one factor is corrected as its lines end, and no other is."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from site_engine.core.learned_lengths import MAX_KINDS, LengthFactors
from site_engine.core.request import Lane, Request
from site_engine.engine.build import overlapped_engine
from site_engine.engine.settings import EngineSettings
from site_engine.text.detokenize import TokenNames
from tests.laws.engine_reserve_test import WRONG_BY, wrong_forecast
from tests.support.counted_engine import CountedEngine, Counts
from tests.support.engine_models import Ticks, drain, engine_for, family, greedy, tokenizer

EXPECTED = 200.0
CURVE = wrong_forecast(EXPECTED)


def line(at: int, generated: int, tenant: str = "t", lane: Lane = Lane.BATCH) -> Request:
    made = Request(str(at), [1], remaining=CURVE, lane=lane, tenant=tenant)
    made.tokens += [7] * generated
    made.max_tokens = 1 << 20
    return made


def end(factors: LengthFactors, ended: Request) -> None:
    factors.ended(ended, ended.generated)


def learned(times: float, part: float, seed: int) -> float:
    """Return the factor after `part` of the median length, when 200 lines have begun together."""
    rnd, factors = random.Random(seed), LengthFactors()
    lengths = [times * EXPECTED * math.exp(rnd.gauss(0, WRONG_BY)) for _ in range(200)]
    now = part * times * EXPECTED
    for at, length in enumerate(lengths):
        if length <= now:
            end(factors, line(at, max(1, round(length))))
    running = [line(at, round(now)) for at, length in enumerate(lengths) if length > now]
    for _ in range(60):
        factors.update(running)
    return factors.factor(line(0, 0))


@pytest.mark.parametrize("part", [0.3, 0.6, 1.0, 2.5])
@pytest.mark.parametrize("times", [0.5, 1.0, 2.0])
def test_the_factor_is_found_though_the_short_lines_end_first(times: float, part: float) -> None:
    """The mean of those that have ended says half of it at first, whatever the factor is."""
    for seed in range(3):
        assert abs(math.log(learned(times, part, seed) / times)) <= (0.35 if part < 0.5 else 0.15)


def test_a_few_lines_say_little_and_none_says_nothing() -> None:
    factors = LengthFactors()
    factors.update([line(1, 900)])
    assert factors.factor(line(2, 0)) == 1.0
    end(factors, line(3, 400))
    factors.update([])
    assert 1.0 < factors.factor(line(2, 0)) < 1.1


def test_chats_and_other_tenants_are_forecast_as_before() -> None:
    factors = LengthFactors()
    for at in range(100):
        end(factors, line(at, 900))
        end(factors, line(at, 900, "u", Lane.CHAT))
    factors.update([])
    assert factors.factor(line(0, 0)) > 3
    for other in (line(0, 0, "u"), line(0, 0, lane=Lane.CHAT)):
        assert factors.factor(other) == 1.0


def test_what_a_limit_cut_off_and_other_kinds_of_lines_say_nothing() -> None:
    factors = LengthFactors()
    for at in range(100):
        cut = line(at, 900)
        cut.max_tokens = 900
        end(factors, cut)
        short = line(at, 900)
        short.prefill_heavy = True
        end(factors, short)
    factors.update([])
    assert factors.factor(line(0, 0)) == 1.0
    assert factors.factor(short) > 3


def test_a_tenants_next_batch_of_another_kind_is_learned_and_old_tenants_are_forgotten() -> None:
    factors = LengthFactors()
    for generated in (900, 200):
        for at in range(1200):
            end(factors, line(at, generated))
    factors.update([])
    assert factors.factor(line(0, 0)) < 1.2
    for at in range(MAX_KINDS):
        end(factors, line(at, 900, f"u{at}"))
    factors.update([])
    assert factors.factor(line(0, 0)) == 1.0


def run(times: float, seed: int) -> Counts:
    """Run lines that are `times` as long as forecast, in memory for 20 of them."""
    rnd = random.Random(seed)
    lengths = {str(at): max(1, round(EXPECTED * math.exp(rnd.gauss(0, WRONG_BY)))) for at in range(240)}
    engine = CountedEngine(
        lengths,
        lambda plan: 1 + 0.01 * plan.tokens,
        kv_tokens=4800,
        slots=128,
        token_budget=512,
        page_size=1,
    )
    curve = wrong_forecast(EXPECTED / times)
    return engine.run(Request(name, [7] * 20, remaining=curve, lane=Lane.BATCH) for name in lengths)


def test_a_batch_that_is_forecast_wrong_as_a_whole_leaves_no_memory_empty_and_preempts_few() -> None:
    right, shorter, longer = run(1.0, 0), run(0.5, 0), run(2.0, 0)
    assert shorter.seconds <= 1.1 * right.seconds
    assert longer.preemptions <= 2 * right.preemptions  # 5 times as many if nothing is learned


def test_what_a_stop_string_ends_is_learned_wherever_its_text_is_read() -> None:
    """An engine that has no text has gone on when it is told of the end."""
    whole = family("llama").generate([9, 8, 7], 12)
    stop = tokenizer().decode(whole)[3]
    learned_by = []
    for of in (family("llama").served, replace(family("llama").served, vocabulary=TokenNames())):
        engine = engine_for(of)
        request = greedy("line", [9, 8, 7], 40, stop=(stop,), ignore_eos=True)
        request.lane = Lane.BATCH
        engine.submit(request)
        if not learned_by:
            length = len(drain(engine)["line"].token_ids)
            assert length < 12
        else:
            for _ in range(length + 2):
                engine.step()
            engine.end_by_text("line", length)
            drain(engine)
        learned_by.append(engine._scheduler.reservation.factors._ended)
    assert learned_by[0] == learned_by[1] != {}


def test_a_line_whose_text_has_ended_is_learned_once_though_a_token_under_way_ends_it_too() -> None:
    chosen = EngineSettings(slots=8, token_budget=64, page_size=4, kv_tokens=512)
    engine = overlapped_engine(family("llama").served, chosen, Ticks())
    whole = family("llama").generate([9, 8, 7], 12)
    request = greedy("line", [9, 8, 7], 40, ignore_eos=True, stop_token_ids=(whole[5],))
    request.lane = Lane.BATCH
    engine.submit(request)
    while request.generated < whole.index(whole[5]):
        engine.step()
    engine.end_by_text("line", request.generated - 1)
    engine.expect()  # whose next step publishes what is under way
    drain(engine)
    ((lines, _),) = engine._scheduler.reservation.factors._ended.values()
    assert lines == 1
