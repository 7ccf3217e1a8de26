"""Memory is reserved by its future peak: what ends makes room for what grows."""

from __future__ import annotations

import math
import random
from statistics import NormalDist, pvariance, quantiles

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from site_engine.core.remaining_curve import LIKELY_LENGTHS, RemainingCurve, RemainingPoint, likely_lengths
from site_engine.core.request import Lane, Request, Sampling
from site_engine.core.request_queue import POLICIES
from site_engine.core.reserve import ENDS_LATE, KEPT_DEVIATIONS, FuturePeak, Span
from site_engine.core.schedule_plan import SchedulePlan
from tests.support.counted_engine import CountedEngine, Counts
from tests.support.held_to_the_end import HeldToTheEnd

WRONG_BY = 0.6
"""Standard deviation of the logarithm of a length beside its forecast."""


def at_once(_plan: SchedulePlan) -> float:
    return 1.0


def known(name: str, prompt: list[int], tokens: int) -> Request:
    return Request(name, prompt, remaining=RemainingCurve.exactly(tokens), lane=Lane.BATCH)


SPANS = st.builds(
    Span,
    st.lists(st.integers(0, 60), min_size=1, max_size=LIKELY_LENGTHS).map(sorted).map(tuple),
    st.integers(1, 50),
)


@given(spans=st.lists(SPANS, max_size=40), new=SPANS, gone=st.integers(0, 40))
def test_the_peak_is_the_most_that_is_expected_of_every_iteration(
    spans: list[Span], new: Span, gone: int
) -> None:
    def held(at: int, those: list[Span]) -> float:
        running = [sum(end >= at for end in span.ends) / len(span.ends) for span in those]
        return sum(share * (span.base + at) for share, span in zip(running, those, strict=True))

    future = FuturePeak()
    for at in range(len(spans), len(spans) + len(spans[:gone])):
        future.put({at: new})
    if spans:
        future.put(dict(enumerate([new, *spans[1:]])))
        future.put({0: spans[0]})
    for at in range(len(spans), len(spans) + len(spans[:gone])):
        future.remove(at)
    assert future.peak() == pytest.approx(max((held(at, spans) for at in range(61)), default=0))
    expected = max(held(at, [*spans, new]) for at in range(int(new.ends[-1]) + 1))
    kept = KEPT_DEVIATIONS * math.sqrt(sum(pvariance(span.ends) for span in [*spans, new]))
    assert future.with_one_more(new) == pytest.approx(expected + kept)


def test_likely_lengths_are_the_quantiles_of_the_forecast() -> None:
    """Of a known length, a geometric one, and a lognormal one."""
    assert likely_lengths(RemainingCurve.exactly(700)) == (700.0,) * LIKELY_LENGTHS
    middles = [(at + 0.5) / LIKELY_LENGTHS for at in range(LIKELY_LENGTHS)]
    memoryless = likely_lengths(
        RemainingCurve((RemainingPoint(0, 100.0, 230), RemainingPoint(900, 100.0, 230)))
    )
    assert memoryless == pytest.approx([-100 * math.log(1 - middle) for middle in middles], rel=0.01)
    lognormal = [400 * math.exp(WRONG_BY * NormalDist().inv_cdf(middle)) for middle in middles]
    assert likely_lengths(wrong_forecast(400.0)) == pytest.approx(lognormal, rel=0.08)


@settings(max_examples=40)
@given(seed=st.integers(0, 100_000), page_size=st.sampled_from([1, 4, 16]), slots=st.integers(2, 12))
def test_with_known_lengths_nothing_is_ever_preempted(seed: int, page_size: int, slots: int) -> None:
    rnd = random.Random(seed)
    prefixes = [[1000 * (at + 1) + each for each in range(rnd.choice([3, 20, 60]))] for at in range(3)]
    requests, lengths = [], {}
    for at in range(40):
        prompt = [*rnd.choice([[], *prefixes]), *([at + 5] * rnd.randint(1, 40))]
        lengths[str(at)] = rnd.choice([1, 5, 30, 100])
        requests.append(known(str(at), prompt, lengths[str(at)]))
    engine = CountedEngine(
        lengths,
        at_once,
        kv_tokens=rnd.choice([208, 400, 800]),
        slots=slots,
        token_budget=rnd.choice([slots + 8, 64, 512]),
        page_size=page_size,
        policy=rnd.choice([POLICIES["fcfs"], POLICIES["forecast"]]),
    )
    counts = engine.run(requests)
    assert counts.output == sum(lengths.values())
    assert counts.preemptions == 0


@settings(max_examples=40)
@given(seed=st.integers(0, 100_000), page_size=st.sampled_from([1, 4]))
def test_every_page_counts_once_whoever_shares_starts_leaves_or_is_preempted(
    seed: int, page_size: int
) -> None:
    rnd = random.Random(seed)
    prefixes = [[1000 * (at + 1) + each for each in range(rnd.choice([4, 24]))] for at in range(2)]
    lengths = {str(at): rnd.choice([1, 5, 30, 60]) for at in range(40)}
    engine = CountedEngine(lengths, at_once, kv_tokens=160, slots=6, token_budget=24, page_size=page_size)
    scheduler, reservation = engine.scheduler, engine.scheduler.reservation
    for at in range(60):
        if at < 40:
            prompt = [*rnd.choice([[], *prefixes]), *([at + 5] * rnd.randint(1, 12))]
            forecast = RemainingCurve((RemainingPoint(0, rnd.choice([2.0, 40.0]), 50),))
            engine.submit(Request(str(at), prompt, remaining=forecast, lane=rnd.choice(list(Lane))))
        engine.step()
        if scheduler.running and rnd.random() < 0.2:
            scheduler.release(rnd.choice(scheduler.running))
        held = {page for request in scheduler.running for page in request.pages}
        assert set(reservation._spans) == set(reservation._shared) == set(scheduler.running)
        assert 0 <= reservation._own_pages() <= len(held)
        assert all(page in keeper.pages for page, keeper in reservation._keepers.items())
        assert reservation.reserved_tokens() >= 0
        assert reservation._at_limit.keys() == reservation._spans.keys()
        assert reservation._all_at_limit == sum(reservation._at_limit.values())
    engine.run()
    assert not reservation._spans and not reservation._keepers
    assert reservation._all_at_limit == 0


@settings(max_examples=40)
@given(seed=st.integers(0, 100_000), page_size=st.sampled_from([1, 4, 16]))
def test_requests_whose_limits_fit_all_start_whatever_is_forecast(seed: int, page_size: int) -> None:
    rnd = random.Random(seed)
    lengths = {str(at): rnd.choice([1, 5, 30, 60]) for at in range(8)}
    requests, room = [], 0
    for name, tokens in lengths.items():
        forecast = RemainingCurve((RemainingPoint(0, rnd.choice([2.0, 500.0]), 900),))
        prompt, sampling = [int(name) + 5] * rnd.randint(1, 20), Sampling(max_tokens=tokens, ignore_eos=True)
        requests.append(Request(name, prompt, sampling, remaining=forecast))
        room += -(-(len(prompt) + tokens + ENDS_LATE) // page_size)
    engine = CountedEngine(
        lengths, at_once, kv_tokens=room * page_size, slots=8, token_budget=512, page_size=page_size
    )
    counts = engine.run(requests)
    assert counts.most_running == 8
    assert counts.preemptions == 0


def test_requests_that_end_make_room_for_one_that_grows() -> None:
    """200 tokens of memory: the long one needs 150 at its end, when the three short ones have long ended."""
    lengths = {"long": 140, "a": 20, "b": 20, "c": 20}
    engine = CountedEngine(lengths, at_once, kv_tokens=200, slots=4, token_budget=64, page_size=1)
    for name, tokens in lengths.items():
        engine.submit(known(name, [ord(name[0])] * 10, tokens))
    engine.step()
    assert len(engine.scheduler.running) == 4
    assert engine.run().preemptions == 0


def wrong_forecast(expected: float) -> RemainingCurve:
    """Return the curve of a length that is lognormal around `expected`, as a calibrated forecast is."""
    normal, points = NormalDist(), []
    for part in (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0):
        begins = math.log(part) / WRONG_BY if part else -9.0
        left = 1 - normal.cdf(begins)
        mean = math.exp(WRONG_BY**2 / 2) * (1 - normal.cdf(begins - WRONG_BY)) / left
        p90 = math.exp(WRONG_BY * normal.inv_cdf(1 - 0.1 * left))
        points.append(
            RemainingPoint(
                round(part * expected), (mean - part) * expected, max(1, round((p90 - part) * expected))
            )
        )
    return RemainingCurve(tuple(points))


def run_wrong(seed: int, held_to_the_end: bool, lane: Lane) -> Counts:
    rnd = random.Random(seed)
    lengths: dict[str, int] = {}
    requests = []
    for at in range(240):
        expected = rnd.choice([40.0, 120.0, 400.0])
        lengths[str(at)] = max(1, round(expected * math.exp(rnd.gauss(0, WRONG_BY))))
        prompt = [at] * rnd.randint(10, 200)
        requests.append(Request(str(at), prompt, remaining=wrong_forecast(expected), lane=lane))
    engine = CountedEngine(
        lengths,
        lambda plan: 0.01 + 1e-4 * plan.tokens,
        kv_tokens=12_000,
        slots=64,
        token_budget=512,
        policy=POLICIES["fcfs"],
    )
    if held_to_the_end:
        engine.scheduler.reservation = HeldToTheEnd(engine.pool)
    return engine.run(requests)


@pytest.mark.parametrize("seed", range(3))
def test_wrong_forecasts_cost_less_than_quantiles_held_to_the_end(seed: int) -> None:
    held, peak = run_wrong(seed, True, Lane.BATCH), run_wrong(seed, False, Lane.BATCH)
    assert peak.output == held.output
    assert held.seconds >= 1.4 * peak.seconds
    assert peak.preemptions <= 24  # of 240 requests


def test_requests_of_like_forecasts_are_not_expected_to_be_at_their_longest_at_one_time() -> None:
    """Memory is for 20 of the mean length, and for 43 of the mean over a life."""
    curve, rnd = wrong_forecast(400.0), random.Random(0)
    lengths = {str(at): max(1, round(400 * math.exp(rnd.gauss(0, WRONG_BY)))) for at in range(200)}
    mean = curve.expected(0) + 10
    engine = CountedEngine(
        lengths, at_once, kv_tokens=int(20 * mean), slots=200, token_budget=512, page_size=1
    )
    for at, name in enumerate(lengths):
        engine.submit(Request(name, [at] * 10, remaining=curve, lane=Lane.BATCH))
    engine.step()
    assert len(engine.scheduler.running) >= 30
    counts = engine.run()
    assert counts.computed <= 1.12 * (counts.output + counts.asked)  # again after a preemption


@pytest.mark.parametrize("seed", range(3))
def test_first_tokens_of_chats_come_no_later(seed: int) -> None:
    held, peak = (run_wrong(seed, way, Lane.CHAT).first_token_s.values() for way in (True, False))
    assert sum(peak) <= sum(held)
    assert quantiles(peak, n=100)[98] <= quantiles(held, n=100)[98]
