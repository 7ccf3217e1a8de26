"""A gateway of the simulated federation, with production's directory, decisions, offloading and failover.

It knows of a site only late reports, and its own assignments since.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from gateway.domain import Credit, Sampling, Site
from gateway.errors import MicoError
from gateway.failure import AttemptFailure, FailureCause, Resume
from gateway.federation.offloading import Offloading
from gateway.routing.candidates import Policy
from gateway.routing.decide import decide
from gateway.routing.demand import Demand
from gateway.routing.failover import FailedTry, Try, tries
from gateway.routing.fleet import Fleet
from gateway.routing.policies import JOINT_POLICIES, POLICIES
from gateway.routing.traffic import Traffic
from gateway.routing.window import WINDOW_S, AssignmentWindow, WindowEntry, assign
from mico.simulation.affinity import Affinity
from mico.simulation.clock import Clock
from mico.simulation.queries import Expected, Query, Record, demand_of, expected_length
from mico.simulation.view import NO_CREDIT, Assigned, View

MAX_TRIES = 4
TURNS_APART = 1_000_003
"""Between the turns of two gateways, which production starts at random."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt of a query at one site.

    `at_site_s`: arrival there; later reports cover it. `excluded`: sites that failed the query before.
    """

    id: str
    query: Query
    demand: Demand
    moves: int
    site: str
    at_site_s: float
    produced_before: int
    excluded: frozenset[str]


class Network(Protocol):
    """Carries messages from a gateway to a site, which arrive half a round trip later."""

    def assign(self, gateway: Gateway, attempt: Attempt) -> None: ...
    def release(self, gateway: Gateway, site: str, release_id: str, attempt_ids: list[str]) -> None: ...
    def query_ended(self, record: Record) -> None: ...


class Gateway:
    """One gateway: it assigns queries, follows their attempts, and records the results."""

    def __init__(
        self,
        view: View,
        policy: Policy,
        clock: Clock,
        network: Network,
        *,
        number: int = 0,
        gateways: int = 1,
        expected: Mapping[int, Expected],
        offload: bool = True,
        window_s: float | None = None,
        window_length: Callable[[Expected], float] = expected_length,
        affinity: Affinity | None = None,
    ) -> None:
        self.number, self.view, self._gateways = number, view, gateways
        self.records: dict[int, Record] = {}  # of open queries
        self.assigned: dict[str, Assigned] = {}  # by site, as far as reports do not cover it
        self.contested: set[str] = set()  # crowded sites where its attempts wait
        self.links = {name: Link(self, name, network) for name in view.rtt_s}
        self.offloading = Offloading(self.links, self, clock)  # type: ignore[arg-type]  # attempts of the simulation
        self._policy = policy
        self._clock = clock
        self._network = network
        self._expected = expected
        self._affinity = affinity or Affinity()
        self.offload = offload
        self._window_s, self._window_length = window_s, window_length
        self._window: list[Query] = []
        self._burst = AssignmentWindow()
        self._traffic = Traffic()
        joint = any(policy is POLICIES[name] for name in JOINT_POLICIES)
        self._jointly = joint and not self._affinity.chooses
        self._turns = count(number * TURNS_APART)
        self._ids = count()
        self._plans: dict[int, Generator[Try, FailedTry, None]] = {}

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    @property
    def fleet(self) -> Fleet:
        """The sites as this gateway knows them now."""
        return self.view.fleet(self)

    def site(self, name: str) -> Site | None:
        """Return a site with what this gateway has assigned to it."""
        assigned = self.assigned.get(name)
        return assigned.site if assigned is not None else self.view.directory.site(name)

    def crowded(self, name: str) -> Site | None:
        """Return a site where one more of its queries would have to wait, None if it would not."""
        return self.view.crowded(self, name)

    def rtt_s(self, site: str) -> float:
        return self.view.rtt_s[site]

    def site_joined(self, name: str) -> None:
        """Learn that a site is back, with an empty cache."""
        self._affinity.forget(name)

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
        first, demand = self._plan(query), self._traffic.arrive(self._demand(query), self._clock.now_s)
        if self._affinity.chooses:  # where a first turn goes, its session stays
            demand = replace(demand, arriving=demand.arriving._replace(returning=1.0))
        if not (self._jointly and self._burst.should_wait(demand, self.fleet, self._clock.now_s)):
            self._dispatch(query, first, 0, demand)
            return

        def place(site: str | None) -> None:
            self._dispatch(query, first._replace(preferred_site=site), 0, demand)

        if self._burst.add(WindowEntry(demand, place)):
            self._clock.after(WINDOW_S, lambda: self._burst.close(self.fleet, self._clock.now_s))

    def _plan(self, query: Query) -> Try:
        plan = self._plans[query.number] = tries(Sampling(), MAX_TRIES)
        return next(plan)

    def _assign_window(self) -> None:
        """Assign the queries of the window jointly, longest first."""
        queries, self._window = self._window, []
        fleet = self.fleet
        lengths = [self._window_length(self._expected[query.number]) for query in queries]
        speeds = fleet.figures.slots / fleet.figures.iteration_s
        places = assign(lengths, speeds.tolist(), fleet.figures.token_load.tolist())
        for index in sorted(range(len(queries)), key=lambda index: -lengths[index]):
            first = self._plan(queries[index])
            site = fleet.sites[places[index]].name
            demand = self._demand(queries[index])
            self._dispatch(queries[index], first._replace(preferred_site=site), 0, demand)

    def attempt_failed(self, attempt: Attempt, failure: AttemptFailure, delivered: int) -> None:
        """End a failed attempt; production's failover decides on the next try."""
        self.links[attempt.site].forget(attempt)
        resume = Resume() if delivered else None
        try:
            next_try = self._plans[attempt.query.number].send(FailedTry(failure, resume))
        except MicoError:
            self._end(attempt.query)
            return
        demand = replace(self._demand(attempt.query, delivered), arriving=attempt.demand.arriving)
        self._dispatch(attempt.query, next_try, delivered, demand)

    def _dispatch(self, query: Query, next_try: Try, delivered: int, demand: Demand) -> None:
        affinity, now_s = self._affinity, self._clock.now_s
        preferred = next_try.preferred_site
        if preferred is None:
            preferred = affinity.choose(query, self.fleet)
        placement = decide(
            demand,
            self.fleet,
            self._policy,
            now_s=now_s,
            turn=next(self._turns),
            tried=next_try.tried,
            is_retry=next_try.failures > 0,
            preferred_site=preferred,
            preference_reason=next_try.preference_reason,
            keep_estimates=False,
            gateways=self._gateways,
        )
        if placement.site is None:
            self._end(query)
            return
        name = placement.site.name
        affinity.assigned(query, name)
        at_site_s = now_s + self.rtt_s(name) / 2
        id_ = f"{query.number}.{next(self._ids)}"
        attempt = Attempt(id_, query, demand, next_try.moves, name, at_site_s, delivered, next_try.tried)
        record = self.records[query.number]
        record.attempts, record.moves, record.site = record.attempts + 1, next_try.moves, name
        self.links[name].assign(attempt)

    def _demand(self, query: Query, delivered: int = 0) -> Demand:
        """Return the demand of a query, with what sites are expected to have of its prompt."""
        expected = self._expected[query.number]
        demand = demand_of(query, expected.forecast, delivered) if delivered else expected.demand
        cached = self._affinity.expected(query, self.fleet, self._clock.now_s)
        return replace(demand, cached=cached.times(query.prompt_tokens)) if cached.by_site else demand

    def _end(self, query: Query) -> None:
        del self._plans[query.number]
        self._network.query_ended(self.records.pop(query.number))

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
        self.links[attempt.site].ended(attempt)
        self._end(attempt.query)

    def released(self, name: str, release_id: str, attempt_ids: list[str]) -> None:
        bidder = self.offloading.close_round(release_id)
        for attempt_id in attempt_ids:
            attempt = self.links[name].live.get(attempt_id)
            if attempt is not None:
                self.attempt_failed(
                    attempt, AttemptFailure(name, FailureCause.RELEASED, "released", preferred_site=bidder), 0
                )

    def site_lost(self, name: str, delivered: Callable[[Attempt], int]) -> None:
        for attempt in list(self.links[name].live.values()):
            self.attempt_failed(
                attempt, AttemptFailure(name, FailureCause.LOST, f"{name} was lost"), delivered(attempt)
            )


class Link:
    """One gateway's account of one site, as production's link keeps it, without messages."""

    __slots__ = ("_ended_tokens", "_gateway", "_name", "_network", "_pending", "_uncovered", "live")

    def __init__(self, gateway: Gateway, name: str, network: Network) -> None:
        self.live: dict[str, Attempt] = {}
        self._gateway = gateway
        self._name = name
        self._network = network
        self._uncovered: dict[str, Attempt] = {}
        self._pending: dict[str, Attempt] = {}
        self._ended_tokens: list[int] = []  # of KV, of each that has ended since the report

    def assign(self, attempt: Attempt) -> None:
        self.live[attempt.id] = attempt
        self._uncovered[attempt.id] = attempt
        self._gateway.view.watch(self._name, self)
        self._publish_credit()
        self._network.assign(self._gateway, attempt)

    def accepted(self, attempt: Attempt) -> None:
        if attempt.id in self.live:
            self._pending[attempt.id] = attempt
            self._gateway.view.watch(self._name, self)
            self._mark_changed()

    def started(self, attempt: Attempt) -> None:
        if self._pending.pop(attempt.id, None) is not None:
            self._mark_changed()

    def forget(self, attempt: Attempt) -> None:
        self.live.pop(attempt.id, None)
        self.started(attempt)
        if self._uncovered.pop(attempt.id, None) is not None:
            self._publish_credit()

    def ended(self, attempt: Attempt) -> None:
        """Forget an attempt whose last token has come."""
        if attempt.id not in self._uncovered:
            query = attempt.query
            self._ended_tokens.append(query.prompt_tokens + query.response_tokens)
            self._gateway.view.watch(self._name, self)
            self._publish_credit()
        self.forget(attempt)

    def pending(self) -> list[Attempt]:
        """Return the attempts that the site has accepted and, as far as the gateway knows, not started."""
        return list(self._pending.values())

    def release(self, release_id: str, attempt_ids: list[str]) -> None:
        self._network.release(self._gateway, self._name, release_id, attempt_ids)

    def reported(self, taken_s: float) -> None:
        """Learn that a report has come, which covers what had arrived at the site by `taken_s`."""
        if self._uncovered or self._ended_tokens:
            self._ended_tokens.clear()
            self._uncovered = {k: each for k, each in self._uncovered.items() if each.at_site_s > taken_s}
            self._publish_credit()
        else:
            self._mark_changed()

    def _publish_credit(self) -> None:
        """Sum up what reports do not cover."""
        credit = NO_CREDIT
        if self._uncovered:
            demands = [each.demand for each in self._uncovered.values()]
            prompt_tokens = sum(demand.prompt_tokens for demand in demands)
            credit = Credit(len(demands), prompt_tokens, sum(demand.response_tokens for demand in demands))
        self._gateway.view.assigned(self._gateway, self._name, credit, self._ended_tokens)
        self._mark_changed()

    def _mark_changed(self) -> None:
        """Note whether attempts wait here that a bid may take."""
        gateway, name = self._gateway, self._name
        if not (self._pending or self._uncovered or self._ended_tokens):
            gateway.view.unwatch(name, self)
        if not gateway.offload:
            return
        if self._pending and gateway.crowded(name):
            gateway.contested.add(name)
            gateway.view.contesting[gateway.number] = gateway
        elif name in gateway.contested:
            gateway.contested.remove(name)
            if not gateway.contested:
                del gateway.view.contesting[gateway.number]
        else:
            return
        gateway.offloading.mark_changed(name)
