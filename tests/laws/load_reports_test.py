"""Laws of load reports: what a gateway decides by is off by the stated bound at most, whatever happens at a
site, whoever assigns, and however many sites each gateway has; and a site that tells nothing new sends next
to nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.decision import Decision
from gateway.domain import Caller, Query, Sampling, Site
from gateway.federation import codec as gateway_codec
from gateway.federation.directory import Directory
from gateway.federation.link import Link
from gateway.federation.offloading import Offloading
from gateway.federation.report_pace import LINKS_PER_SECOND, MAX_EVERY_S, ReportPace, in_share
from gateway.routing.demand import Demand
from gateway.routing.filters import is_stale
from gateway.routing.policies import REPORTS_EVERY_S
from predictor.forecast import Forecast
from site_engine import messages as m
from site_engine.core.load import IterationCost, LoadFigures, condense
from site_engine.core.request import Finish, Output
from site_engine.engine_client import Group, Listener, LoadSeen, Prepared
from site_engine.errors import NotServed
from site_engine.federation import codec as site_codec
from site_engine.federation import site as site_module
from site_engine.federation.report_pace import MAX_TIMES, REPORT_EVERY_S, SECONDS, SHARE, LoadSummary
from wire import federation_pb2 as pb

SLOTS, KV_TOKENS, PROMPT_TOKENS = 64, 200_000, 400
COST = IterationCost(0.02, 0.0002, 0.0001, 1e-8)
TURN_S = 0.05
"""As often as an engine that works reports to its site, and a site to its gateways."""
HELLO = m.Hello(
    site="s",
    boot_id="b",
    cloud="c",
    region="r",
    models=(m.Model("m", "1", 8192, 0, ("chat", "resume")),),
    slots=SLOTS,
    kv_capacity_tokens=KV_TOKENS,
    input_usd_per_mtok=0.0,
    output_usd_per_mtok=0.0,
    cached_usd_per_mtok=None,
    usd_per_hour=0.0,
    version="1",
)
FORECAST = Forecast((0, 100), (1.0,), "test")


@dataclass
class Engine:
    """Runs requests of known lengths, an iteration at a time, and finds `rate` times its first costs."""

    running: dict[str, int] = field(default_factory=dict)  # tokens to come
    pending: dict[str, int] = field(default_factory=dict)
    tokens_total: int = 0
    rate: float = 1.0
    next_tokens: int = 1
    waiting: int = 0
    training_s: float = 0.0

    def waiting_of(self, tenant: str) -> int:
        return 0

    def stalled_s(self) -> float:
        return 0.0

    def prepare(
        self,
        assign: m.Assign,
        reply: Callable[[Prepared | NotServed], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        reply(Prepared((0,) * PROMPT_TOKENS, ""))

    def count(self, *_: object) -> None:
        raise NotImplementedError

    def submit(self, prepared: Prepared, group: Group, reply: Callable[[NotServed | None], None]) -> None:
        for request in group:
            self.pending[request.id] = self.next_tokens
        reply(None)

    def cancel(self, request_ids: Iterable[str]) -> None: ...
    def release(self, groups: Sequence[Sequence[str]], reply: Callable[[list[bool]], None]) -> None: ...
    def request_load(self) -> None: ...

    def iterate(self, listener: Listener) -> None:
        while self.pending and len(self.running) < SLOTS:
            name = next(iter(self.pending))
            self.running[name] = self.pending.pop(name)
        outputs = []
        for name in list(self.running):
            self.running[name] -= 1
            self.tokens_total += 1
            if self.running[name] <= 0:
                del self.running[name]
                outputs.append(Output(name, "x", (1,), Finish.STOP, completion_tokens=1))
        if outputs:
            listener.outputs(outputs)

    def figures(self) -> LoadFigures:
        values, weight = condense([float(each) for each in self.running.values()])
        cost = IterationCost(*(self.rate * each for each in COST))
        used = min(KV_TOKENS, sum(PROMPT_TOKENS + each for each in self.running.values()))
        response = float(sum(self.pending.values()))
        return LoadFigures(
            running=len(self.running),
            pending=len(self.pending),
            token_load=sum(self.running.values()) + response,
            kv_free_tokens=KV_TOKENS - used,
            kv_reserved_tokens=sum(self.running.values()),
            tokens_per_s=1.0,
            seconds_per_iteration=0.02,
            iteration=cost,
            running_remaining=values,
            running_weight=weight,
            pending_prompt_tokens=PROMPT_TOKENS * len(self.pending),
            pending_response_tokens=response,
            tokens_total=self.tokens_total,
            prompt_tokens_total=0,
            unread_tokens=len(self.running),
            training_s_per_iteration=self.training_s,
        )


class Gateway:
    """The link of one gateway to the site, and the connection of the site to it."""

    def __init__(self, name: str, site: site_module.Site, clock: Callable[[], float]) -> None:
        self.directory, self.loads, self.assigned = Directory(), 0, 0
        identity = gateway_codec.identity(next(iter(site_codec.encode(site.hello()))).hello)
        self.directory.join(identity, clock())
        self.told = self.directory.sites[0].load
        offloading = Offloading({}, self.directory, clock)
        self.link = Link(identity, self.directory, offloading, clock, paces_reports=True)
        hello = site.hello()
        welcome = m.Welcome(name, (), 1.0, 60.0, hello.attempts, protocol=3)
        self.connection = site.welcomed(hello, welcome, lambda: None)
        self.name, self._site, self._clock = name, site, clock

    def assign(self) -> None:
        self.assigned += 1
        query = Query(f"{self.name}{self.assigned}", "m", "hi", Sampling(), Caller("k", "t"), 0.0, 100.0)
        decision = Decision(query.id, query.id, "s", "mico", "test", (), {}, 0.0)
        self.link.assign(query, decision, Demand("m", PROMPT_TOKENS, 50.0, 90), FORECAST)

    async def deliver(self) -> None:
        """Carry what is assigned to the site, and what the site owes now to the gateway."""
        while self.link.outbox.bytes:
            sent = pb.GatewayMessage.FromString(await self.link.next_message())
            decoded = site_codec.decode(sent)
            assert decoded is not None
            if isinstance(decoded, m.ReportPace):
                self.connection.paced(decoded)
            else:
                self._site.receive(self.connection, decoded)

    def take(self) -> None:
        for message in self.connection.attempts.outbox.take(self._clock()):
            for part in site_codec.encode(message):
                self.loads += part.HasField("load")
                self.link.receive(part)
                if part.HasField("load"):
                    self.told = self.view.load

    @property
    def pace(self) -> ReportPace:
        return self.link.reports

    @property
    def view(self) -> Site:
        return self.directory.sites[0]


class World:
    def __init__(self) -> None:
        self.now_s, self.engine = 100.0, Engine()
        clock = lambda: self.now_s  # noqa: E731
        self.site = site_module.Site(HELLO, self.engine, clock, 1_000)
        self.listener = Listener(self.site.outputs, self.site.load, lambda _: None)
        self._clock = clock
        self.gateways = [Gateway(name, self.site, clock) for name in ("east", "west")]

    def relink(self, number: int) -> None:
        """Break the link of a gateway, and open the next one."""
        before = self.gateways[number]
        before.link.close("cut")
        self.site.lost(before.connection)
        self.gateways[number] = Gateway(before.name, self.site, self._clock)
        self.gateways[number].assigned = before.assigned

    async def turn(
        self,
        assigned: Sequence[int] = (),
        tokens: int = 1,
        iterations: int = 0,
        links: Sequence[tuple[int, bool]] = (),
        lasts_s: float = TURN_S,
    ) -> None:
        """Let gateways assign, the engine work, and the site report what it sees at the end. `links`: of each
        gateway now, and whether it has the site in its share.
        """
        for gateway, (count, shared) in zip(self.gateways, links, strict=False):
            gateway.link.reports.adapt(count, 1.0, in_share=shared)
        self.engine.next_tokens = tokens
        for number in assigned:
            self.gateways[number].assign()
        for each in self.gateways:
            await each.deliver()
        for _ in range(iterations):
            self.engine.iterate(self.listener)
        self.now_s += lasts_s
        self.site.load(LoadSeen(self.engine.figures(), self.now_s))
        for each in self.gateways:
            each.take()

    def check(self, turn_s: float = TURN_S) -> None:
        figures = self.engine.figures()
        true = LoadSummary.of(figures, SLOTS, KV_TOKENS)
        for gateway in self.gateways:
            share, every_s = SHARE * gateway.pace.times_off, REPORT_EVERY_S * gateway.pace.every_s
            site = gateway.view
            seen = LoadSummary.of(site.load, SLOTS, KV_TOKENS)
            seconds = share / SHARE * SECONDS
            assert abs(seen.requests - true.requests) <= share * SLOTS
            assert abs(seen.running - true.running) <= share * SLOTS
            assert abs(seen.kv_tokens - true.kv_tokens) <= share * KV_TOKENS
            assert abs(seen.prefill_s - true.prefill_s) <= max(seconds, share * seen.prefill_s)
            told = LoadSummary.of(gateway.told, SLOTS, KV_TOKENS)
            assert abs(told.decode_s - true.decode_s) <= max(seconds, share * told.decode_s)
            assert seen.decode_s <= told.decode_s, "without the answers that have ended since"
            assert abs(seen.iteration_s - true.iteration_s) <= share * seen.iteration_s + 1e-12
            assert site.credit.requests <= share * SLOTS, "what is added to a report is bounded, too"
            assert self.now_s - site.load.received_s < every_s + turn_s
            assert self.now_s - site.load.received_s <= REPORTS_EVERY_S + site.load.quiet_s
            assert not is_stale(site.load, self.now_s)
            if true.requests == 0 and gateway.pace.times_off < MAX_TIMES:
                assert seen.requests + site.credit.requests == 0


def test_what_training_adds_to_each_token_is_reported_at_once() -> None:
    async def scenario() -> None:
        world = World()
        await world.turn()
        for world.engine.training_s in (0.01, 0.0):
            await world.turn(lasts_s=0.06)
            for each in world.gateways:
                assert each.view.load.training_s_per_iteration == world.engine.training_s

    asyncio.run(scenario())


turns = st.tuples(
    st.lists(st.integers(0, 1), max_size=12), st.integers(1, 400), st.integers(0, 60), st.floats(0.5, 2.0)
)


@given(st.lists(turns, min_size=1, max_size=25))
def test_no_gateway_is_ever_off_by_more_than_the_bound(
    happens: list[tuple[list[int], int, int, float]],
) -> None:
    async def scenario() -> None:
        world = World()
        await world.turn()
        for assigned, tokens, iterations, rate in happens:
            world.engine.rate = rate
            await world.turn(assigned, tokens, iterations)
            world.check()

    asyncio.run(scenario())


sizes = st.tuples(st.integers(0, 5 * LINKS_PER_SECOND), st.booleans())
walks = st.lists(
    st.tuples(turns, st.none() | st.tuples(sizes, sizes), st.none() | st.integers(0, 1), st.integers(0, 20)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=50)
@given(walks)
def test_fleets_grow_and_shrink_and_no_gateway_is_off_by_more_than_it_asks_for(
    walk: list[
        tuple[tuple[list[int], int, int, float], tuple[tuple[int, bool], ...] | None, int | None, int]
    ],
) -> None:
    """Nor does any take the site for silent. The link after one that broke begins as in a small fleet."""

    async def scenario() -> None:
        small = (0, True), (0, True)
        world, sizes = World(), small
        await world.turn()
        for (assigned, tokens, iterations, rate), news, broken, idle_turns in walk:
            world.engine.rate = rate
            if broken is not None:
                world.relink(broken)
            sizes = news or (sizes if broken is None else small)
            await world.turn(assigned, tokens, iterations, sizes)
            world.check()
            for _ in range(idle_turns):
                await world.turn(links=sizes, lasts_s=0.25)
                world.check(turn_s=0.25)

    asyncio.run(scenario())


def test_a_site_of_a_large_fleet_tells_a_quarter_as_often_that_nothing_is_new() -> None:
    async def scenario() -> None:
        world, large = World(), (4 * LINKS_PER_SECOND, True)
        await world.turn(links=(large, large))
        assert {each.pace.every_s for each in world.gateways} == {MAX_EVERY_S}

        async def reports_in(seconds: int) -> list[int]:
            before = [each.loads for each in world.gateways]
            for _ in range(2 * seconds):
                await world.turn(lasts_s=0.5)
                world.check(turn_s=0.5)
            return [each.loads - past for each, past in zip(world.gateways, before, strict=True)]

        assert await reports_in(5 * MAX_EVERY_S) == [5, 5]
        await world.turn(links=(large, (LINKS_PER_SECOND - 1, True)), lasts_s=0.5)
        assert await reports_in(2 * MAX_EVERY_S) == [2, 2 * MAX_EVERY_S], "each gets what it asks for"

    asyncio.run(scenario())


def test_outside_of_a_share_a_busy_site_reports_as_seldom_as_without_news() -> None:
    async def scenario() -> None:
        world, links = World(), 4 * LINKS_PER_SECOND
        await world.turn([0] * 32, tokens=1_000, links=((links, True), (links, False)))
        await world.turn(iterations=1)
        before = [each.loads for each in world.gateways]
        for number in range(160):  # 8 s, in which half of the slots fill and empty again
            await world.turn([0] * 2 if number % 32 < 16 else [], tokens=40, iterations=1)
            world.check()
        often, seldom = (each.loads - past for each, past in zip(world.gateways, before, strict=True))
        assert seldom <= 3 < often

    asyncio.run(scenario())


names = st.text(max_size=8)


@given(st.sets(names, min_size=1, max_size=9), names, st.lists(names, min_size=1, max_size=5))
def test_each_site_is_in_the_share_of_half_of_the_gateways_and_few_change_with_one(
    gateways: set[str], more: str, sites: list[str]
) -> None:
    before, after = tuple(sorted(gateways)), tuple(sorted(gateways | {more}))
    for site in sites:
        shared = {each for each in before if in_share(site, each, before)}
        now = {each for each in after if in_share(site, each, after)}
        assert len(shared) == (len(before) + 1) // 2
        assert len(shared - now) <= 1 >= len(now - shared)
    assert in_share("site", "alone", ()), "none is known yet"


def test_a_site_that_tells_nothing_new_reports_once_a_second() -> None:
    async def scenario() -> None:
        world = World()
        await world.turn([0] * 40, tokens=1_000_000)
        for _ in range(2):
            await world.turn(iterations=1)
        before = [each.loads for each in world.gateways]
        for _ in range(100):  # of work for 5 s
            await world.turn(iterations=2)
            world.check()
        assert all(each.loads - past <= 6 for each, past in zip(world.gateways, before, strict=True))

    asyncio.run(scenario())


def test_one_query_more_or_less_at_a_large_site_is_no_news() -> None:
    async def scenario() -> None:
        world = World()
        await world.turn([0] * 20, tokens=100_000)
        await world.turn(iterations=1)
        before = [each.loads for each in world.gateways]
        for number in range(10):  # half a second
            await world.turn([0] if number % 5 == 0 else [], tokens=2, iterations=1)
            world.check()
        assert all(each.loads - past <= 1 for each, past in zip(world.gateways, before, strict=True))

    asyncio.run(scenario())


def test_what_gateways_add_to_a_report_stays_bounded_while_as_many_end_as_come() -> None:
    """The figures do not change, but each gateway counts what it has assigned since the report on top."""

    async def scenario() -> None:
        world = World()
        for tokens in range(1, 41):
            await world.turn([0], tokens=tokens)
        for _ in range(19):
            await world.turn([1], tokens=40, iterations=1)
            world.check()

    asyncio.run(scenario())


def test_a_gateway_counts_no_request_of_which_it_has_the_end() -> None:
    """Before the next report, which comes when more have ended than the bound; others count until then."""

    async def scenario() -> None:
        world = World()
        await world.turn([0] * 16, tokens=1_000)
        for tokens in range(1, 5):
            await world.turn([0], tokens=tokens)
        await world.turn(iterations=1, lasts_s=REPORT_EVERY_S)
        east, west = world.gateways
        before = east.view.load
        assert (before.running, before.running_remaining[:4]) == (19, (1, 2, 3, 999))
        for ended in (1, 2, 3):
            await world.turn(iterations=1)
            seen = east.view.load
            assert (seen.seq, seen.running, west.view.load) == (before.seq, 19 - ended, before)
            assert seen.running_remaining == before.running_remaining[ended:]
            assert seen.kv_free_tokens == before.kv_free_tokens + ended * (PROMPT_TOKENS + 1)
            assert east.view.credit.requests == 0

    asyncio.run(scenario())


def test_a_site_that_falls_idle_says_so_at_once() -> None:
    async def scenario() -> None:
        world = World()
        await world.turn([0, 0, 1], tokens=30)
        for _ in range(30):
            await world.turn(iterations=1)
            world.check()
        assert not world.engine.running

    asyncio.run(scenario())
