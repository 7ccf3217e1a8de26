"""A federation on one virtual clock: queries arrive, gateways decide, sites compute, the network delays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gateway.domain import LoadReport, Site
from gateway.routing.candidates import Policy
from mico.simulation.affinity import AffinityFactory, without_affinity
from mico.simulation.clock import Clock
from mico.simulation.gateway import Attempt, Gateway
from mico.simulation.machines import Machines, Scaling
from mico.simulation.queries import Expected, Query, Record, expected_length
from mico.simulation.row import Row
from mico.simulation.site import SimulatedSite
from mico.simulation.specification import SiteSpec
from mico.simulation.view import views_of
from site_engine.core.request import Lane
from site_engine.core.request_queue import Score

LOSS_DETECTION_S = 3.0
"""Three heartbeats, during which a gateway still assigns to a site that is lost."""
HEARTBEAT_INTERVAL_S = 1.0
NONE: Mapping[int, Expected] = {}


@dataclass(frozen=True, slots=True)
class Outage:
    """The loss of a site and of its requests, at least for the time that it takes to detect."""

    site: str
    from_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything but the queries that a run depends on.

    Sites report changes at most every `report_every_s`, and without news every `quiet_report_every_s`; a
    report takes half a round trip plus `report_delay_s`.
    A gateway collects queries for `window_s` to assign them jointly by `window_length`; with None, as in
    production, only those that arrive in a burst while the sites are full. `block_tokens`: of the blocks of
    prompts that sites cache; 0: they cache none. `affinity` makes what the gateways know of the caches.
    """

    specs: tuple[SiteSpec, ...]
    policy: Policy
    score: Score
    starving_after_s: float
    offload: bool = True
    report_every_s: float = 0.05
    quiet_report_every_s: float = HEARTBEAT_INTERVAL_S
    report_delay_s: float = 0.0
    gateways: int = 1
    window_s: float | None = None
    window_length: Callable[[Expected], float] = expected_length
    outages: tuple[Outage, ...] = ()
    block_tokens: int = 0
    affinity: AffinityFactory = without_affinity
    scaling: Scaling | None = None


class Federation:
    """Gateways, sites and the network between them. Messages take half a round trip."""

    def __init__(self, setting: Setting, expected: Mapping[int, Expected] = NONE) -> None:
        """Create an idle federation. `expected`: of the queries of `run`, by their numbers."""
        self.clock = Clock()
        self._setting = setting
        self._forecasts = expected
        self._expected: dict[int, Expected] = {}  # of open queries
        self.sites = {spec.name: self._new_site(spec) for spec in setting.specs}
        affinities = setting.affinity(setting.gateways)
        seen = views_of(setting.specs, setting.gateways, self.clock)
        self._views = list(dict.fromkeys(seen))
        self.gateways = [
            Gateway(
                seen[number],
                setting.policy,
                self.clock,
                self,
                number=number,
                gateways=setting.gateways,
                expected=self._expected,
                offload=setting.offload,
                window_s=setting.window_s,
                window_length=setting.window_length,
                affinity=affinities[number],
            )
            for number in range(setting.gateways)
        ]
        self._attempts: dict[str, tuple[Gateway, Attempt]] = {}
        self._lost: set[str] = set()  # in an outage
        self._down: set[str] = set()  # these, and machines that do not run
        scaling = setting.scaling
        self.machines = Machines(scaling, setting.specs, self, self.clock) if scaling is not None else None
        self._reported_s = dict.fromkeys(self.sites, -1e9)
        self._reporting: set[str] = set()
        self._seq = 1
        self._last_came = False
        self._ended: Callable[[Record], None] = lambda _: None

    def _new_site(self, spec: SiteSpec) -> SimulatedSite:
        return SimulatedSite(
            spec,
            self.clock,
            score=self._setting.score,
            starving_after_s=self._setting.starving_after_s,
            on_first_token=self._first_token,
            on_end=self._last_token,
            on_change=self._schedule_report,
            block_tokens=self._setting.block_tokens,
        )

    def run(self, queries: Sequence[Query]) -> list[Record]:
        """Run until every query has ended; return their records in the order of `queries`."""
        in_order = sorted(queries, key=lambda query: query.arrival_s)
        found: dict[int, Record] = {}
        arrivals = ((query, self._forecasts[query.number]) for query in in_order)
        self.stream(arrivals, lambda record: found.__setitem__(record.query.number, record))
        return [found[query.number] for query in queries]

    def stream(self, arrivals: Iterable[tuple[Query, Expected]], ended: Callable[[Record], None]) -> None:
        """Run until every query has ended, in memory for those that are open. `ended` gets each record."""
        self._ended = ended
        self._schedule_next_arrival(iter(arrivals))
        if self._last_came:
            return
        for outage in self._setting.outages:
            self.clock.at(outage.from_s, self._begin_outage, outage)
        for site in self.sites.values():
            self.clock.after(HEARTBEAT_INTERVAL_S, self._heartbeat, site)
        if self.machines is not None:
            self.machines.begin()
        self.clock.run()

    def _schedule_next_arrival(self, arrivals: Iterator[tuple[Query, Expected]]) -> None:
        """Schedule the next arrival only after the one before, so that the clock's heap stays small."""
        arrival = next(arrivals, None)
        self._last_came = arrival is None
        if arrival is not None:
            self.clock.at(arrival[0].arrival_s, self._arrive, *arrival, arrivals)

    def _arrive(self, query: Query, expected: Expected, rest: Iterator[tuple[Query, Expected]]) -> None:
        self._expected[query.number] = expected
        self._schedule_next_arrival(rest)
        self.gateways[query.number % len(self.gateways)].arrive(query)

    # ---- from a gateway to a site

    def assign(self, gateway: Gateway, attempt: Attempt) -> None:
        self._attempts[attempt.id] = (gateway, attempt)
        self.clock.at(attempt.at_site_s, self._submit, gateway, attempt)

    def _submit(self, gateway: Gateway, attempt: Attempt) -> None:
        back_s = gateway.rtt_s(attempt.site) / 2
        self.clock.after(back_s, gateway.links[attempt.site].accepted, attempt)
        if attempt.site in self._down or attempt.id not in self._attempts:
            return
        query = attempt.query
        expected = self._expected[query.number]
        row = Row(
            attempt.id,
            query.prompt_tokens,
            expected.curve,
            typical=expected.typical,
            tenant=query.tenant,
            lane=Lane(query.lane),
            response_tokens=query.response_tokens,
            produced=attempt.produced_before,
            blocks=query.blocks,
        )
        self.sites[attempt.site].submit(row)

    def release(self, gateway: Gateway, site: str, release_id: str, attempt_ids: list[str]) -> None:
        self.clock.after(gateway.rtt_s(site) / 2, self._release, gateway, site, release_id, attempt_ids)

    def _release(self, gateway: Gateway, site: str, release_id: str, attempt_ids: list[str]) -> None:
        if site in self._down:
            return
        donor = self.sites[site]
        released = [each for each in attempt_ids if donor.release(each)]
        for each in released:
            del self._attempts[each]
        self.clock.after(gateway.rtt_s(site) / 2, gateway.released, site, release_id, released)

    # ---- from a site to a gateway

    def _first_token(self, row: Row) -> None:
        gateway, attempt = self._attempts[row.id]
        self.clock.after(gateway.rtt_s(attempt.site) / 2, gateway.first_token, attempt)

    def _last_token(self, row: Row) -> None:
        gateway, attempt = self._attempts.pop(row.id)
        self.clock.after(gateway.rtt_s(attempt.site) / 2, gateway.last_token, attempt, row.cached_tokens)

    def query_ended(self, record: Record) -> None:
        """Take the record of a query that ended, answered or refused; stop the clock after the last one."""
        del self._expected[record.query.number]
        self._ended(record)
        if self._last_came and not self._expected:
            self.clock.stop()

    def _schedule_report(self, site: SimulatedSite) -> None:
        """Schedule a site's report, unless one is already scheduled."""
        name = site.spec.name
        if name in self._reporting:
            return
        self._reporting.add(name)
        due_s = max(self.clock.now_s, self._reported_s[name] + self._setting.report_every_s)
        self.clock.at(due_s, self._report, site)

    def _heartbeat(self, site: SimulatedSite) -> None:
        every_s = self._setting.quiet_report_every_s
        due_s = self._reported_s[site.spec.name] + every_s
        if due_s <= self.clock.now_s:
            self._schedule_report(site)
            due_s = self.clock.now_s + every_s
        self.clock.at(due_s, self._heartbeat, site)

    def _report(self, site: SimulatedSite) -> None:
        name = site.spec.name
        self._reporting.discard(name)
        if name in self._down:
            return
        self._reported_s[name] = self.clock.now_s
        self._seq += 1
        taken_s = self.clock.now_s
        load: LoadReport | None = None
        for view in self._views:
            after_s = view.rtt_s[name] / 2 + self._setting.report_delay_s
            received_s = taken_s + after_s
            if load is None:
                load = self.report_of(site, received_s)
            elif load.received_s != received_s:
                load = replace(load, received_s=received_s)
            self.clock.after(after_s, view.report, name, load, taken_s)

    def report_of(self, site: SimulatedSite, received_s: float) -> LoadReport:
        load = load_report(site, self._seq, received_s)
        return replace(load, quiet_s=self._setting.quiet_report_every_s - HEARTBEAT_INTERVAL_S)

    # ---- outages

    def _begin_outage(self, outage: Outage) -> None:
        name, noticed_s = outage.site, outage.from_s + LOSS_DETECTION_S
        self._lost.add(name)
        if name not in self._down:
            self._down.add(name)
            site = self.sites[name]
            site.settle_rows()
            produced = {row.id: row.produced for row in site.running.values()}
            site.cancel_all()
            self.clock.at(noticed_s, self._detect_loss, name, produced)
        self.clock.at(max(outage.until_s, noticed_s), self._end_outage, name)

    def _detect_loss(self, site: str, produced: dict[str, int]) -> None:
        for view in self._views:
            view.leave(site)
        for gateway in self.gateways:
            for attempt in gateway.links[site].live.values():
                self._attempts.pop(attempt.id, None)
            gateway.site_lost(site, lambda attempt: produced.get(attempt.id, attempt.produced_before))

    def _end_outage(self, name: str) -> None:
        self._lost.discard(name)
        if self.machines is None or self.machines.is_wanted(name):
            self.bring_up(name)

    # ---- machines

    def sites_now(self) -> Iterable[Site]:
        """Return the sites as the first gateway knows them."""
        return self.gateways[0].fleet.sites

    def is_lost(self, name: str) -> bool:
        return name in self._lost

    def is_idle(self, name: str) -> bool:
        """Return whether no gateway has an attempt at a site."""
        return not any(gateway.links[name].live for gateway in self.gateways)

    def bring_up(self, name: str) -> None:
        """Let an idle site join."""
        self._down.discard(name)
        for view in self._views:
            view.join(name)
        for gateway in self.gateways:
            gateway.site_joined(name)
        self._schedule_report(self.sites[name])

    def drain(self, name: str) -> None:
        """Give a site no more work."""
        for view in self._views:
            view.drain(name)

    def take_down(self, name: str) -> None:
        """End an idle site."""
        self._down.add(name)
        for view in self._views:
            view.leave(name)


def load_report(site: SimulatedSite, seq: int, received_s: float) -> LoadReport:
    """Return a site's load report, as the engine writes it."""
    reserved_tokens = site.settle_rows()
    remaining, weight = site.remaining()
    queue, unread = site.queue, site.unread_tokens
    return LoadReport(
        seq=seq,
        received_s=received_s,
        running=len(site.running),
        pending=site.pending,
        token_load=sum(remaining) * weight + unread + queue.prompt_tokens + queue.response_tokens,
        kv_free_tokens=max(0, site.kv_free),
        kv_reserved_tokens=reserved_tokens,
        iteration=site.spec.cost,
        running_remaining=remaining,
        running_weight=weight,
        pending_prompt_tokens=queue.prompt_tokens,
        pending_response_tokens=queue.response_tokens,
        computed_tokens_total=site.computed_tokens,
        unread_tokens=unread,
        training_s_per_iteration=site.training_s_per_iteration,
    )
