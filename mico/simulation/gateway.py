"""A gateway of the simulated federation, with production's directory, decisions, offloading and failover.

It knows of a site only late reports, and its own assignments since.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from gateway.domain import Credit, LoadReport, Model, Sampling, SiteIdentity
from gateway.errors import MicoError
from gateway.failure import AttemptFailure, FailureCause, Resume
from gateway.federation.directory import Directory
from gateway.federation.offloading import Offloading
from gateway.routing.candidates import Policy
from gateway.routing.decide import decide
from gateway.routing.demand import Demand
from gateway.routing.failover import FailedTry, Try, tries
from gateway.routing.policies import JOINT_POLICIES, POLICIES
from gateway.routing.window import WINDOW_S, AssignmentWindow, WindowEntry, assign
from mico.simulation.affinity import Affinity
from mico.simulation.clock import Clock
from mico.simulation.queries import Expected, Query, Record, demand_of, expected_length
from mico.simulation.specification import MODEL, PROMPT_PRICE, SiteSpec

MAX_TRIES = 4
NO_CREDIT = Credit()


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt of a query at one site. `at_site_s`: arrival there; later reports cover it."""

    id: str
    query: Query
    demand: Demand
    moves: int
    site: str
    at_site_s: float
    produced_before: int


class Network(Protocol):
    """Carries messages from a gateway to a site, which arrive half a round trip later."""

    def assign(self, gateway: Gateway, attempt: Attempt) -> None: ...
    def release(self, gateway: Gateway, site: str, release_id: str, attempt_ids: list[str]) -> None: ...
    def query_ended(self) -> None: ...


class Gateway:
    """One gateway: it assigns queries, follows their attempts, and records the results."""

    def __init__(
        self,
        specs: Sequence[SiteSpec],
        policy: Policy,
        clock: Clock,
        network: Network,
        *,
        expected: Mapping[int, Expected],
        offload: bool = True,
        window_s: float | None = None,
        window_length: Callable[[Expected], float] = expected_length,
        affinity: Affinity | None = None,
    ) -> None:
        self.directory = Directory()
        self.records: dict[int, Record] = {}
        self.links = {spec.name: Link(self, spec, network) for spec in specs}
        self.offloading = Offloading(self.links, self.directory, clock)  # type: ignore[arg-type]
        self._specs = {spec.name: spec for spec in specs}
        self._policy = policy
        self._clock = clock
        self._network = network
        self._expected = expected
        self._affinity = affinity or Affinity()
        self.offload = offload
        self._window_s, self._window_length = window_s, window_length
        self._window: list[Query] = []
        self._burst = AssignmentWindow()
        joint = any(policy is POLICIES[name] for name in JOINT_POLICIES)
        self._jointly = joint and not self._affinity.chooses
        self._turns = count()
        self._ids = count()
        self._plans: dict[int, Generator[Try, FailedTry, None]] = {}
        for spec in specs:
            self.site_joined(spec.name)

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    def rtt_s(self, site: str) -> float:
        return self._specs[site].rtt_s

    def site_joined(self, name: str) -> None:
        spec = self._specs[name]
        self.directory.join(site_identity(spec), self._clock.now_s)
        self.directory.set_rtt(name, spec.rtt_s)
        first = LoadReport(
            seq=1, received_s=self._clock.now_s, kv_free_tokens=spec.kv_tokens, iteration=spec.cost
        )
        self.directory.report(name, first, Credit())
        self._affinity.forget(name)
        self.offloading.mark_changed(name)

    # ---- a query

    def arrive(self, query: Query) -> None:
        self.records[query.number] = Record(query)
        if self._window_s is None:
            self._assign_or_batch(query)
            return
        if not self._window:
            self._clock.after(self._window_s, self._assign_window)
        self._window.append(query)

    def _assign_or_batch(self, query: Query) -> None:
        """Assign as production does: at once, or jointly with others of a burst while the sites are full."""
        first, demand = self._plan(query), self._demand(query)
        if not (self._jointly and self._burst.should_wait(demand, self.directory.fleet, self._clock.now_s)):
            self._dispatch(query, first, 0)
            return

        def place(site: str | None) -> None:
            self._dispatch(query, first._replace(preferred_site=site), 0)

        if self._burst.add(WindowEntry(demand, place)):
            self._clock.after(WINDOW_S, lambda: self._burst.close(self.directory.fleet, self._clock.now_s))

    def _plan(self, query: Query) -> Try:
        plan = self._plans[query.number] = tries(Sampling(), MAX_TRIES)
        return next(plan)

    def _assign_window(self) -> None:
        """Assign the queries of the window jointly, longest first."""
        queries, self._window = self._window, []
        fleet = self.directory.fleet
        lengths = [self._window_length(self._expected[query.number]) for query in queries]
        speeds = fleet.figures.slots / fleet.figures.iteration_s
        places = assign(lengths, speeds.tolist(), fleet.figures.token_load.tolist())
        for index in sorted(range(len(queries)), key=lambda index: -lengths[index]):
            first = self._plan(queries[index])
            site = fleet.sites[places[index]].name
            self._dispatch(queries[index], first._replace(preferred_site=site), 0)

    def attempt_failed(self, attempt: Attempt, failure: AttemptFailure, delivered: int) -> None:
        """End a failed attempt; production's failover decides on the next try."""
        self.links[attempt.site].forget(attempt)
        resume = Resume() if delivered else None
        try:
            next_try = self._plans[attempt.query.number].send(FailedTry(failure, resume))
        except MicoError:
            self._end(attempt.query)
            return
        self._dispatch(attempt.query, next_try, delivered)

    def _dispatch(self, query: Query, next_try: Try, delivered: int) -> None:
        affinity, now_s = self._affinity, self._clock.now_s
        demand = self._demand(query, delivered)
        preferred = next_try.preferred_site
        if preferred is None:
            preferred = affinity.choose(query, self.directory.fleet)
        placement = decide(
            demand,
            self.directory.fleet,
            self._policy,
            now_s=now_s,
            turn=next(self._turns),
            tried=next_try.tried,
            preferred_site=preferred,
            preference_reason=next_try.preference_reason,
            keep_estimates=False,
        )
        if placement.site is None:
            self._end(query)
            return
        name = placement.site.name
        affinity.assigned(query, name)
        at_site_s = now_s + self.rtt_s(name) / 2
        id_ = f"{query.number}.{next(self._ids)}"
        attempt = Attempt(id_, query, demand, next_try.moves, name, at_site_s, delivered)
        record = self.records[query.number]
        record.attempts, record.moves, record.site = record.attempts + 1, next_try.moves, name
        self.links[name].assign(attempt)

    def _demand(self, query: Query, delivered: int = 0) -> Demand:
        """Return the demand of a query, with what sites are expected to have of its prompt."""
        expected = self._expected[query.number]
        demand = demand_of(query, expected.forecast, delivered) if delivered else expected.demand
        cached = self._affinity.expected(query, self._clock.now_s)
        return replace(demand, cached=cached.times(query.prompt_tokens)) if cached.by_site else demand

    def _end(self, query: Query) -> None:
        del self._plans[query.number]
        self._network.query_ended()

    # ---- messages from sites

    def first_token(self, attempt: Attempt) -> None:
        record = self.records[attempt.query.number]
        self.links[attempt.site].started(attempt)
        self._affinity.started(attempt.query, attempt.site, self._clock.now_s)
        if record.first_token_s != record.first_token_s:  # not yet
            record.first_token_s = self._clock.now_s - attempt.query.arrival_s

    def last_token(self, attempt: Attempt, cached_tokens: int = 0) -> None:
        record = self.records[attempt.query.number]
        record.finish_s, record.cached_tokens = self._clock.now_s - attempt.query.arrival_s, cached_tokens
        self._affinity.ended(attempt.query, attempt.site, attempt.demand.cached, cached_tokens)
        self.links[attempt.site].forget(attempt)
        self._end(attempt.query)

    def report(self, name: str, load: LoadReport, taken_s: float) -> None:
        """Apply a load report; it covers what had arrived at the site by `taken_s`, when it was taken."""
        self.links[name].report(load, taken_s)

    def released(self, name: str, release_id: str, attempt_ids: list[str]) -> None:
        bidder = self.offloading.close_round(release_id)
        for attempt_id in attempt_ids:
            attempt = self.links[name].live.get(attempt_id)
            if attempt is not None:
                self.attempt_failed(
                    attempt, AttemptFailure(name, FailureCause.RELEASED, "released", preferred_site=bidder), 0
                )

    def site_lost(self, name: str, delivered: Callable[[Attempt], int]) -> None:
        self.directory.leave(name)
        self.offloading.mark_changed(name)
        for attempt in list(self.links[name].live.values()):
            self.attempt_failed(
                attempt, AttemptFailure(name, FailureCause.LOST, f"{name} was lost"), delivered(attempt)
            )


class Link:
    """One gateway's account of one site, as production's link keeps it, without messages."""

    def __init__(self, gateway: Gateway, spec: SiteSpec, network: Network) -> None:
        self.live: dict[str, Attempt] = {}
        self._gateway = gateway
        self._name = spec.name
        self._slots = spec.slots
        self._network = network
        self._uncovered: dict[str, Attempt] = {}
        self._pending: dict[str, Attempt] = {}

    def assign(self, attempt: Attempt) -> None:
        self.live[attempt.id] = attempt
        self._uncovered[attempt.id] = attempt
        self._publish_credit()
        self._network.assign(self._gateway, attempt)

    def accepted(self, attempt: Attempt) -> None:
        if attempt.id in self.live:
            self._pending[attempt.id] = attempt
            self._gateway.offloading.mark_changed(self._name)

    def started(self, attempt: Attempt) -> None:
        if self._pending.pop(attempt.id, None) is not None:
            self._gateway.offloading.mark_changed(self._name)

    def forget(self, attempt: Attempt) -> None:
        self.live.pop(attempt.id, None)
        self.started(attempt)
        if self._uncovered.pop(attempt.id, None) is not None:
            self._publish_credit()

    def pending(self) -> list[Attempt]:
        """Return the attempts that the site has accepted and, as far as the gateway knows, not started."""
        return list(self._pending.values())

    def release(self, release_id: str, attempt_ids: list[str]) -> None:
        self._network.release(self._gateway, self._name, release_id, attempt_ids)

    def report(self, load: LoadReport, taken_s: float) -> None:
        if self._uncovered:
            self._uncovered = {k: each for k, each in self._uncovered.items() if each.at_site_s > taken_s}
        self._gateway.directory.report(self._name, load, self._credit())
        self._gateway.offloading.mark_changed(self._name)
        if self._gateway.offload and load.running < self._slots and load.pending == 0:
            self._gateway.offloading.bid(self._name)

    def _publish_credit(self) -> None:
        self._gateway.directory.set_credit(self._name, self._credit())
        self._gateway.offloading.mark_changed(self._name)

    def _credit(self) -> Credit:
        if not self._uncovered:
            return NO_CREDIT
        demands = [each.demand for each in self._uncovered.values()]
        prompt_tokens = sum(demand.prompt_tokens for demand in demands)
        return Credit(len(demands), prompt_tokens, sum(demand.response_tokens for demand in demands))


def site_identity(spec: SiteSpec) -> SiteIdentity:
    model = Model(MODEL, "", 1 << 20, 0, "mico", frozenset({"chat", "resume"}))
    return SiteIdentity(
        name=spec.name,
        boot_id="",
        cloud=spec.name,
        region=spec.region or spec.name,
        models={MODEL: model},
        slots=spec.slots,
        kv_capacity_tokens=spec.kv_tokens,
        input_usd_per_mtok=PROMPT_PRICE * spec.usd_per_mtok,
        output_usd_per_mtok=spec.usd_per_mtok,
    )
