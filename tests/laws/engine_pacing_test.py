"""Lines of any order share a device: long answers hold memory, and prompts are computed beside them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from site_engine.core.load import CostFit
from site_engine.core.pacing import Pace
from site_engine.core.remaining_curve import RemainingCurve
from site_engine.core.request import Lane, Request
from site_engine.core.request_queue import AdmissionQueue
from site_engine.core.schedule_plan import SchedulePlan
from tests.support.counted_engine import CountedEngine

FREE_TOKENS = 128
BUDGET = 4096


def line(name: str, prompt: int, tokens: int, *, heavy: bool = False, tenant: str = "t") -> Request:
    """Return a line of any order; its prompt begins like no other."""
    begins = int.from_bytes(name.encode()[-6:]) << 20
    known, ids = RemainingCurve.exactly(tokens), range(begins, begins + prompt)
    made = Request(name, ids, remaining=known, lane=Lane.BATCH, tenant=tenant, any_order=True)
    made.prefill_heavy = heavy
    return made


def reads_weights(plan: SchedulePlan) -> float:
    """Return the seconds of a device that computes so many tokens while it reads the weights."""
    return max(1.0, plan.tokens / FREE_TOKENS)


def reading_weights() -> CostFit:
    """Return the fit of a device that has served for a while."""
    fit, rnd = CostFit(), random.Random(0)
    for prompt in [0, FREE_TOKENS, BUDGET] * 99:
        rows = rnd.randint(1, 64)
        fit.observe(rows, rows + prompt, 0, max(1.0, (rows + prompt) / FREE_TOKENS))
    return fit


def engine_for(
    requests: list[Request], kv_tokens: int, seconds: Callable[[SchedulePlan], float] = reads_weights
) -> CountedEngine:
    lengths = {each.id: each.remaining.points[0].p90 for each in requests}
    engine = CountedEngine(
        lengths, seconds, kv_tokens=kv_tokens, slots=64, token_budget=BUDGET, fit=reading_weights()
    )
    for each in requests:
        engine.submit(each)
    return engine


def running(engine: CountedEngine) -> set[str]:
    return {each.id for each in engine.scheduler.running}


@settings(max_examples=40)
@given(seed=st.integers(0, 100_000))
def test_every_line_ends_once_and_known_lengths_are_hardly_preempted(seed: int) -> None:
    """Paced prompts are read later than foreseen: where two of them fill the memory, one may have to wait."""
    rnd = random.Random(seed)
    requests = []
    for at in range(40):
        heavy = rnd.random() < 0.5
        prompt, tokens = (rnd.randint(50, 600), rnd.randint(1, 9)) if heavy else (5, rnd.randint(10, 300))
        requests.append(line(str(at), prompt, tokens, heavy=heavy, tenant=rnd.choice("ab")))
        if rnd.random() < 0.1:
            requests[-1].any_order = requests[-1].prefill_heavy = False
    kv_tokens = rnd.choice([640, 1024, 4096])
    counts = engine_for(requests, kv_tokens).run()
    assert counts.output == sum(each.remaining.points[0].p90 for each in requests)
    assert counts.preemptions <= (0 if kv_tokens == 4096 else 2)


def test_a_line_that_fits_beside_the_longest_starts_before_one_that_does_not() -> None:
    requests = [line("first", 16, 600), line("second", 16, 600), line("third", 16, 100)]
    engine = engine_for(requests, 1024)
    engine.step()
    assert running(engine) == {"first", "third"}


def test_lines_in_order_wait_for_one_another() -> None:
    requests = [line("first", 16, 600), line("second", 16, 600), line("third", 16, 100)]
    for each in requests:
        each.any_order = False
    engine = engine_for(requests, 1024)
    engine.step()
    assert running(engine) == {"first"}


def test_prefill_heavy_lines_overtake_last_also_if_some_go_on_from_another_site() -> None:
    queue = AdmissionQueue()
    lines = [line(str(at), 20, 9, heavy=at % 3 == 0) for at in range(12)]
    for at, each in enumerate(lines):
        each.resumed = [1] * (at < 6)
        queue.push(each)
    first = queue.first(0.0)
    assert first is lines[0]
    heavy = [each.prefill_heavy for each in queue.overtaking(first)]
    assert heavy == sorted(heavy)
    assert heavy


def test_a_line_in_order_is_overtaken_by_none() -> None:
    requests = [line("first", 16, 600), line("second", 16, 600), line("third", 16, 100)]
    requests[1].any_order = False
    engine = engine_for(requests, 1024)
    engine.step()
    assert running(engine) == {"first"}


@given(rows=st.integers(0, 4096), seed=st.integers(0, 1000), budget=st.integers(1, BUDGET))
def test_prompts_never_stand_still_whatever_iterations_took(rows: int, seed: int, budget: int) -> None:
    rnd, fit = random.Random(seed), CostFit()
    for _ in range(rnd.randint(0, 40)):
        rows_then = rnd.randint(0, 99)
        fit.observe(rows_then, rows_then + rnd.randint(0, 9999), rnd.randint(0, 99_999), rnd.expovariate(10))
    assert 1 <= Pace(fit).prompt_tokens(rows, budget) <= budget


class Device(NamedTuple):
    """Weights take `weights_s` to read and a token `token_s` to multiply, both at once in part; an iteration
    takes `fixed_s` besides, and `prompts_s` more with prompts.
    """

    weights_s: float
    token_s: float
    fixed_s: float
    prompts_s: float

    def seconds(self, rows: int, prompt: int) -> float:
        both_s = math.hypot(self.weights_s, self.token_s * (rows + prompt))
        return self.fixed_s + both_s + self.prompts_s * (prompt > 0)

    def token_of_prompts_s(self, rows: int, prompt: int) -> float:
        return (self.seconds(rows, prompt) - self.seconds(rows, 0)) / prompt


H200_8B = Device(3.3e-3, 21.4e-6, 1.4e-3, 1.2e-3)


def price_of_pieces_s(device: Device, rows: int) -> float:
    """Return what a prompt's token costs once the fit has seen pieces of the size that it leads to."""
    fit, rnd = CostFit(), random.Random(rows)
    pace = Pace(fit)
    for at in range(2000):
        piece = pace.prompt_tokens(rows, BUDGET) if at > 20 else rnd.choice([500, BUDGET])
        piece = piece if at % 3 else 0
        took_s = device.seconds(rows, piece) * rnd.uniform(0.98, 1.02)
        fit.observe(rows + (piece > 0), rows + piece, 0, took_s)
    return device.token_of_prompts_s(rows, pace.prompt_tokens(rows, BUDGET))


@pytest.mark.parametrize("rows", [1, 8, 32, 64])
def test_on_a_measured_device_no_size_of_pieces_is_much_better(rows: int) -> None:
    best_s = min(H200_8B.token_of_prompts_s(rows, piece) for piece in range(16, BUDGET, 16))
    assert price_of_pieces_s(H200_8B, rows) < 1.1 * best_s


@pytest.mark.parametrize("rows", [1, 32, 128, 250])
@pytest.mark.parametrize(
    "device",
    [
        H200_8B._replace(prompts_s=0.0),
        H200_8B._replace(prompts_s=3e-3),
        Device(0.3e-3, 2e-6, 1e-3, 1e-3),
        Device(0.0, 2e-3, 3e-3, 1e-3),
    ],
)
def test_pieces_cost_no_more_than_all_at_once(device: Device, rows: int) -> None:
    assert price_of_pieces_s(device, rows) < 1.06 * device.token_of_prompts_s(rows, BUDGET)


@settings(max_examples=40)
@given(seed=st.integers(0, 1000), long=st.integers(1, 40))
def test_prompts_are_computed_a_few_tokens_an_iteration_beside_long_answers(seed: int, long: int) -> None:
    rnd = random.Random(seed)
    requests = [line(f"long {at}", 5, rnd.randint(50, 200)) for at in range(long)]
    requests += [line(f"heavy {at}", rnd.randint(100, 900), 3, heavy=True) for at in range(20)]
    pace = Pace(reading_weights())

    def keeps_pace(plan: SchedulePlan) -> float:
        paced = sum(chunk.length for chunk in plan.prefills if chunk.request.prefill_heavy)
        if any(not request.prefill_heavy for request in plan.decoding):
            assert paced <= pace.prompt_tokens(len(plan.decoding), BUDGET)
        return 1.0

    assert engine_for(requests, 1 << 16, keeps_pace).run().output > 0


def test_nobody_is_paced_beside_the_lines_of_another_tenant() -> None:
    requests = [line("other", 5, 500, tenant="u"), line("heavy", 2000, 3, heavy=True)]
    engine = engine_for(requests, 1 << 14)
    for _ in range(3):
        engine.step()
    assert engine.counts.computed >= 2000


def submit_chat(engine: CountedEngine, name: str, prompt: int, tokens: int) -> None:
    begins = (1 << 60) + (int(name) << 20)
    known, ids = RemainingCurve.exactly(tokens), range(begins, begins + prompt)
    engine._lengths[name] = tokens
    engine.submit(Request(name, ids, remaining=known, tenant="u", lane=Lane.CHAT))


def test_a_chat_takes_the_memory_of_as_many_lines_as_it_needs_at_once() -> None:
    engine = engine_for([line(f"line {at}", 16, 96) for at in range(9)], 1024)
    for _ in range(80):
        engine.step()
    assert len(running(engine)) >= 7
    submit_chat(engine, "0", 600, 20)
    engine.step()
    assert "0" in running(engine)
    assert 2 <= len(engine.scheduler.preempted) <= 5
    engine.run()


def test_lines_that_end_soon_are_not_preempted_for_what_a_chat_needs_later() -> None:
    """The long line and the chat do not fit together at their ends; by then the short lines have ended."""
    short = [line(f"short {at}", 15, 20) for at in range(10)]
    engine = engine_for([line("long", 300, 600), *short], 1024)
    engine.step()
    assert len(running(engine)) == 11
    submit_chat(engine, "0", 15, 400)
    engine.step()
    assert "0" in running(engine)
    assert engine.run().preemptions == 1


@settings(max_examples=6)
@given(seed=st.integers(0, 1000))
def test_no_chat_waits_for_lines_however_wrong_their_forecasts_are(seed: int) -> None:
    """As long as chats alone have rows and memory, each starts in the next iteration."""
    rnd = random.Random(seed)
    lines = [line(f"line {at}", rnd.randint(5, 200), rnd.randint(5, 200)) for at in range(80)]
    engine = engine_for(lines, 2048)
    for each in lines:
        engine._lengths[each.id] = rnd.randint(5, 400)
        each.max_tokens = 1 << 20
    chats = 0
    while engine.scheduler.has_work:
        if rnd.random() < 0.1 and len(chats_of(engine)) < 6:
            submit_chat(engine, str(chats), rnd.randint(5, 60), rnd.randint(1, 60))
            chats += 1
        engine.step()
        assert not engine.scheduler.queue.has_lane(Lane.CHAT)


def chats_of(engine: CountedEngine) -> list[Request]:
    return [each for each in engine.scheduler.running if each.lane is Lane.CHAT]


def test_prompts_of_lines_are_computed_in_pieces_while_chats_may_come() -> None:
    """Also of lines that came together; a minute after the last chat all at once."""
    requests = [line(f"line {at}", 900, 3, heavy=at % 2 > 0) for at in range(60)]
    fit, most = reading_weights(), [0]
    beside = Pace(fit).beside_chats(BUDGET)
    assert FREE_TOKENS < beside < BUDGET / 4

    def seconds(plan: SchedulePlan) -> float:
        most.append(sum(chunk.length for chunk in plan.prefills if chunk.request.lane is Lane.BATCH))
        return 1.0

    engine = engine_for(requests, 1 << 16, seconds)
    submit_chat(engine, "0", 20, 5)
    for _ in range(30):
        engine.step()
    assert 0 < max(most) <= beside
    for _ in range(60):
        engine.step()
    assert max(most) > 2 * beside


def test_lines_take_no_rows_beside_chats_before_their_prompts_are_computed() -> None:
    engine = engine_for([line(f"line {at}", 900, 3) for at in range(60)], 1 << 16)
    submit_chat(engine, "0", 20, 50)
    engine.step()
    assert len(running(engine)) <= 3


def test_two_kinds_of_lines_end_sooner_together_than_in_turn() -> None:
    def took(any_order: bool) -> float:
        requests = [line(f"long {at}", 20, 400 + at) for at in range(40, 0, -1)]
        requests += [line(f"heavy {at}", 700, 3, heavy=any_order) for at in range(60)]
        for each in requests:
            each.any_order = any_order
        return engine_for(requests, 6000).run().seconds

    assert took(True) < 0.85 * took(False)
