"""Laws of money: what was priced is what was paid, and every sum is of whole nano-dollars."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import event, given, settings
from hypothesis import strategies as st

from gateway.domain import IterationCost, LoadReport, SiteIdentity
from gateway.prices import NANO_USD, prices_of

USD_PER_HOUR = 3.0
SLOTS = 8
PREFILL_TOKENS = 512
OWN = SiteIdentity("own", "boot", "on-prem", "here", {}, SLOTS, 10**6, usd_per_hour=USD_PER_HOUR)


@dataclass
class Row:
    prompt: int
    cached: int
    answer: int
    read: int = 0
    made: int = 0


def run_site(cost: IterationCost, waiting: list[Row], arrivals_each: int) -> tuple[float, float]:
    """Answer the rows, iteration by iteration; a new one arrives every `arrivals_each` iterations.

    Returns the hours that passed, and those in which slots were empty: all of an iteration's time without
    rows, and of its fixed time the part of the empty slots.
    """
    hours = idle = 0.0
    running: list[Row] = []
    number = 0
    while waiting or running:
        if waiting and len(running) < SLOTS and number % arrivals_each == 0:
            row = waiting.pop()
            row.read = row.cached
            running.append(row)
        number += 1
        budget, tokens, kv, decoding = PREFILL_TOKENS, 0, 0, 0
        for row in running:
            if row.read < row.prompt:
                part = min(budget, row.prompt - row.read)
                row.read += part
                budget -= part
                tokens += part
            else:
                row.made += 1
                tokens += 1
                decoding += 1
                kv += row.prompt + row.made
        seconds = cost.seconds(decoding, tokens, kv) if running else 0.01
        hours += seconds / 3600
        empty_s = cost.base_s * (SLOTS - decoding) / SLOTS if running else seconds
        idle += empty_s / 3600
        running = [row for row in running if row.made < row.answer]
    return hours, idle


COSTS = st.builds(
    IterationCost,
    base_s=st.floats(0.001, 0.05),
    per_row_s=st.floats(0, 0.002),
    per_token_s=st.floats(1e-6, 1e-4),
    per_kv_token_s=st.floats(0, 1e-6),
)
ROWS = st.lists(
    st.builds(Row, st.integers(1, 4_000), st.just(0), st.integers(1, 300)), min_size=1, max_size=40
)


@settings(deadline=None, max_examples=100)
@given(cost=COSTS, rows=ROWS, cached=st.floats(0, 1), arrivals_each=st.integers(1, 60))
def test_priced_tokens_and_idle_hours_are_all_hours_of_an_own_site(
    cost: IterationCost, rows: list[Row], cached: float, arrivals_each: int
) -> None:
    rows = [replace(row, cached=min(row.prompt - 1, int(cached * row.prompt))) for row in rows]
    prices = prices_of(OWN, LoadReport(seq=1, received_s=0.0, iteration=cost))
    priced = sum(prices.nano_usd(row.prompt, row.cached, row.answer) for row in rows) / NANO_USD
    hours, idle = run_site(cost, list(rows), arrivals_each)
    paid = USD_PER_HOUR * hours
    event(f"{round(10 * idle / hours)} tenths idle")
    assert abs(priced + USD_PER_HOUR * idle - paid) <= 0.02 * paid
