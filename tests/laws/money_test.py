"""Laws of money: what was priced is what was paid, and every sum is of whole nano-dollars."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction

from hypothesis import event, given, settings
from hypothesis import strategies as st

from gateway.decision import Decision, Estimate
from gateway.domain import Caller, IterationCost, LoadReport, Model, Query, Sampling, SiteIdentity
from gateway.errors import UpstreamFailed
from gateway.federation.attempt import AttemptFailed, LiveAttempt
from gateway.federation.directory import Directory
from gateway.federation.link import Link
from gateway.federation.offloading import Offloading
from gateway.prices import NANO_USD, Prices, prices_of
from gateway.query.state import QueryState
from gateway.routing.demand import Demand
from gateway.store.rows import Record, from_line, record_of, to_line
from predictor.forecast import Forecast
from wire import federation_pb2 as pb

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


FORECAST = Forecast((0, 100), (1.0,), "test")
SITES = ("a", "b", "c")


@dataclass
class Bill:
    """What a provider would ask for one attempt, by its prices when it took it on."""

    usd_per_mtok: tuple[Fraction, Fraction, Fraction]  # input, cached, output
    resumed: int
    prompt: int = 0
    cached: int = 0
    made: int = 0
    void: bool = False  # it failed without having given anything

    @property
    def nano_usd(self) -> int:
        per_input, per_cached, per_output = self.usd_per_mtok
        usd = (self.prompt + self.resumed - self.cached) * per_input
        usd += self.cached * per_cached + self.made * per_output
        return 0 if self.void else int(usd * 1_000 + Fraction(1, 2))


class Providers:
    """Three sites that write bills, and the queries of one gateway, attempt by attempt."""

    def __init__(self) -> None:
        self.directory = Directory()
        self.links: dict[str, Link] = {}
        self.prices: dict[str, tuple[Fraction, Fraction, Fraction]] = {}
        self.bills: list[Bill] = []
        self.records: list[Record] = []
        self.state: QueryState | None = None
        self.number = 0
        for number, name in enumerate(SITES):
            self.set_prices(name, (1 + number, number, 3 * number))

    def set_prices(self, name: str, milli_usd_per_mtok: tuple[int, int, int]) -> None:
        """Restart a site with other prices: what ran there is lost."""
        if name in self.links:
            self._lose(name)
        per_input, per_cached, per_output = (each / 1_000 for each in milli_usd_per_mtok)
        identity = SiteIdentity(
            name,
            "boot",
            "cloud",
            "here",
            {"m": Model("m", "r", 10**6, 0, "o", frozenset({"resume"}))},
            slots=4,
            kv_capacity_tokens=10**6,
            input_usd_per_mtok=per_input,
            cached_usd_per_mtok=per_cached,
            output_usd_per_mtok=per_output,
        )
        a, b, c = milli_usd_per_mtok
        self.prices[name] = Fraction(a, 1_000), Fraction(b, 1_000), Fraction(c, 1_000)
        self.directory.join(identity, 0.0)
        offloading = Offloading(self.links, self.directory, lambda: 0.0)
        self.links[name] = Link(identity, self.directory, offloading, lambda: 0.0)

    def ask(self, name: str) -> None:
        """Begin a query, or its next attempt: every earlier one has ended."""
        if self.state is None:
            query = Query(f"q{self.number}", "m", "hi", Sampling(), Caller("k", "t"), 0.0, 100.0)
            self.number += 1
            self.state = QueryState(query, lambda: 0.0, 0.0)
            self.state.set_forecast(FORECAST)
        elif (current := self.state.current) is not None and not current.ended.is_set():
            return
        delivered = self.state.delivered
        estimates = tuple(Estimate(site, 0, 0, 0, float(self.prices[site][2]), 0, 0) for site in SITES)
        attempt_id = f"{self.state.query.id}.{len(self.bills)}"
        decision = Decision("q", attempt_id, name, "mico", "", estimates, {}, 0.0)
        demand = Demand("m", 10, 5.0, 100)
        attempt = self.links[name].assign(self.state.query, decision, demand, FORECAST, resume=delivered)
        self.bills.append(Bill(self.prices[name], delivered.tokens if delivered else 0))
        self.state.add_attempt(attempt)

    @property
    def running(self) -> LiveAttempt | None:
        current = self.state.current if self.state is not None else None
        return None if current is None or current.ended.is_set() else current

    def accept(self, tokens: int) -> None:
        if (attempt := self.running) is not None and attempt.prompt_tokens is None:
            self._send(attempt, accepted=pb.Accepted(attempt_id=attempt.id, prompt_tokens=10 + tokens % 50))
            self.bills[-1].prompt = 10 + tokens % 50

    async def give(self, tokens: int, *, finish: bool = False) -> None:
        attempt, state = self.running, self.state
        if attempt is None or state is None or attempt.prompt_tokens is None:
            return
        bill = self.bills[-1]
        bill.made += tokens
        delta = pb.Delta(
            attempt_id=attempt.id,
            text="x",
            token_ids=[7] * tokens,
            completion_tokens=bill.resumed + bill.made,
        )
        if finish:
            bill.cached = tokens % bill.prompt
            delta.finish = pb.Delta.STOP
            delta.timings.cached_prompt_tokens = bill.cached
        self._send(attempt, step=pb.Step(deltas=[delta]))
        with suppress(AttemptFailed):
            for each in await attempt.next():
                if not state.opened:
                    state.open(attempt)
                state.record_delta(each)
        if finish:
            state.answered = True
            self.settle()

    def fail(self) -> None:
        if (attempt := self.running) is not None:
            self._void_unless_given()
            reject = attempt.prompt_tokens is None
            if reject:
                self._send(attempt, rejected=pb.Rejected(attempt_id=attempt.id, reason=pb.Rejected.FULL))
            else:
                failed = pb.Delta(attempt_id=attempt.id, finish=pb.Delta.FAILED)
                self._send(attempt, step=pb.Step(deltas=[failed]))

    def _lose(self, name: str) -> None:
        if (attempt := self.running) is not None and attempt.site.name == name:
            self._void_unless_given()
        self.links[name].close("restarted")

    def _void_unless_given(self) -> None:
        self.bills[-1].void = self.bills[-1].made == 0

    def leave(self) -> None:
        """The client goes away: the site reports its last count."""
        if (attempt := self.running) is not None:
            if attempt.prompt_tokens is None:
                self.bills[-1].void = True
            attempt.cancel()
            cancelled = pb.Delta(attempt_id=attempt.id, finish=pb.Delta.CANCELLED)
            self._send(attempt, step=pb.Step(deltas=[cancelled]))
            self.settle()

    def give_up(self) -> None:
        """No site is left to try: the client gets an error."""
        if self.state is not None and self.running is None:
            self.state.fail(UpstreamFailed("no other site"))
            self.settle()

    def settle(self) -> None:
        assert self.state is not None
        self.state.end()
        record = record_of(self.state.outcome(self.directory.prices_of), "cloud")
        stored = from_line(to_line(record))
        assert isinstance(stored, Record)
        self.records.append(stored)
        self.state = None

    def _send(self, attempt: LiveAttempt, **body: object) -> None:
        self.links[attempt.site.name].receive(pb.SiteMessage(**body))  # type: ignore[arg-type]


PRICES = st.tuples(*[st.integers(0, 20_000)] * 3)
TRIES = st.tuples(
    st.sampled_from(SITES),
    st.lists(st.integers(1, 40), max_size=3),  # tokens of each delta
    st.sampled_from(["fail", "fail", "restart", "leave", "finish"]),
    PRICES,  # of that site afterwards, where it restarts
)


def check_attempts(record: Record) -> None:
    """Each stored attempt has its cost by its own tokens and prices; their sum is that of the query."""
    usage = record.usage
    assert usage.nano_usd == sum(each.nano_usd or 0 for each in record.decisions)
    assert usage.cheapest_nano_usd is not None
    assert usage.dearest_nano_usd is not None
    assert usage.cheapest_nano_usd <= usage.nano_usd <= usage.dearest_nano_usd
    for each in record.decisions:
        prices, resumed = Prices(**(each.prices or {})), each.resumed_tokens or 0
        made = max(0, each.completion_tokens - resumed)
        priced = prices.nano_usd(each.prompt_tokens + resumed, each.cached_tokens or 0, made)
        assert each.nano_usd == priced or (each.nano_usd == made == 0 and each.ended != "finished")


@settings(deadline=None, max_examples=200)
@given(queries=st.lists(st.lists(TRIES, min_size=1, max_size=4), max_size=5), refused=st.booleans())
def test_usage_is_the_sum_of_what_the_sites_of_its_attempts_would_bill(
    queries: list[list[tuple[str, list[int], str, tuple[int, int, int]]]], refused: bool
) -> None:
    """Over changes of prices, failover in mid-answer, refusals, clients that leave, and errors."""

    async def scenario() -> None:
        here = Providers()
        for plan in queries:
            for site, deltas, ending, prices in plan:
                here.ask(site)
                if deltas or not refused:
                    here.accept(sum(deltas))
                for tokens in deltas:
                    await here.give(tokens)
                if ending == "finish":
                    await here.give(1, finish=True)
                elif ending == "restart":
                    here.set_prices(site, prices)
                elif ending == "leave":
                    here.leave()
                else:
                    here.fail()
            here.leave()
            here.give_up()
            event(f"{len(here.records[-1].decisions)} attempts")
        usages = [record.usage for record in here.records]
        assert sum(row.nano_usd or 0 for row in usages) == sum(bill.nano_usd for bill in here.bills)
        for record in here.records:
            check_attempts(record)

    asyncio.run(scenario())
