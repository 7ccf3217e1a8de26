"""The whole on one virtual clock: queries come in, gateways decide, sites compute, the network takes time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gateway.domain import LoadReport
from gateway.routing.candidates import Policy
from mico.simulation.events import Clock
from mico.simulation.gateway import Attempt, Gateway
from mico.simulation.queries import Expected, Query, Record, expected_length
from mico.simulation.row import Row
from mico.simulation.site import SimulatedSite
from mico.simulation.specification import SiteSpec
from site_engine.core.request import Lane
from site_engine.core.request_queue import Score

NOTICED_AFTER_S = 3.0
"""Three heartbeats: until then a gateway goes on assigning to a site that is lost."""


LEAST_REPORT_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Outage:
    """A site that is gone with all it held, for at least as long as it takes to notice."""

    site: str
    from_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that a run depends on but the queries. `report_every_s`: sites report when something
    changed, at most so often, and `report_delay_s` longer than half a round trip under way. `window_s`: so
    long a gateway collects queries to assign them jointly, by `window_length`; None is as in production,
    where only what comes in a burst onto full sites is.
    """

    specs: tuple[SiteSpec, ...]
    policy: Policy
    score: Score
    starving_after_s: float
    offload: bool = True
    report_every_s: float = 0.05
    report_delay_s: float = 0.0
    gateways: int = 1
    window_s: float | None = None
    window_length: Callable[[Expected], float] = expected_length
    outages: tuple[Outage, ...] = ()


class Federation:
    def __init__(self, setting: Setting, expected: Mapping[int, Expected]) -> None:
        self.clock = Clock()
        self._setting = setting
        self._expected = expected
        self.sites = {spec.name: self._site(spec) for spec in setting.specs}
        self.gateways = [
            Gateway(
                [spec.seen_by(number) for spec in setting.specs],
                setting.policy,
                self.clock,
                self,
                expected=expected,
                offload=setting.offload,
                window_s=setting.window_s,
                window_length=setting.window_length,
            )
            for number in range(setting.gateways)
        ]
        self._attempts: dict[str, tuple[Gateway, Attempt]] = {}
        self._down: set[str] = set()
        self._reported_s = dict.fromkeys(self.sites, -1e9)
        self._reporting: set[str] = set()
        self._seq = 1
        self._open = 0

    def run(self, queries: Sequence[Query]) -> list[Record]:
        """Every query's record, in the order of `queries`, when all have ended."""
        self._open = len(queries)
        self._come(iter(sorted(queries, key=lambda query: query.arrival_s)))
        for outage in self._setting.outages:
            self.clock.at(outage.from_s, self._lose, outage)
        for site in self.sites.values():
            self.clock.after(LEAST_REPORT_EVERY_S, self._heartbeat, site)
        self.clock.run()
        records = {number: record for each in self.gateways for number, record in each.records.items()}
        return [records[query.number] for query in queries]

    def _come(self, queries: Iterator[Query]) -> None:
        """The next one is put on the clock when the one before has come, so that the clock stays small."""
        query = next(queries, None)
        if query is not None:
            self.clock.at(query.arrival_s, self._arrive, query, queries)

    def _arrive(self, query: Query, others: Iterator[Query]) -> None:
        self._come(others)
        self.gateways[query.number % len(self.gateways)].arrive(query)

    def _site(self, spec: SiteSpec) -> SimulatedSite:
        return SimulatedSite(
            spec,
            self.clock,
            score=self._setting.score,
            starving_after_s=self._setting.starving_after_s,
            started=self._first_token,
            ended=self._last_token,
            changed=self._changed,
        )

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
        )
        self.sites[attempt.site].submit(row)

    def release(self, gateway: Gateway, site: str, release_id: str, attempt_ids: list[str]) -> None:
        self.clock.after(gateway.rtt_s(site) / 2, self._release, gateway, site, release_id, attempt_ids)

    def _release(self, gateway: Gateway, site: str, release_id: str, attempt_ids: list[str]) -> None:
        if site in self._down:
            return
        donor = self.sites[site]
        gone = [each for each in attempt_ids if donor.release(each)]
        for each in gone:
            del self._attempts[each]
        self.clock.after(gateway.rtt_s(site) / 2, gateway.released, site, release_id, gone)

    # ---- from a site to a gateway

    def _first_token(self, row: Row) -> None:
        gateway, attempt = self._attempts[row.id]
        self.clock.after(gateway.rtt_s(attempt.site) / 2, gateway.first_token, attempt)

    def _last_token(self, row: Row) -> None:
        gateway, attempt = self._attempts.pop(row.id)
        self.clock.after(gateway.rtt_s(attempt.site) / 2, gateway.last_token, attempt)

    def over(self) -> None:
        """One more query has ended, whichever way."""
        self._open -= 1
        if not self._open:
            self.clock.stop()

    def _changed(self, site: SimulatedSite) -> None:
        """A report is due; one is under way at most."""
        name = site.spec.name
        if name in self._reporting:
            return
        self._reporting.add(name)
        due_s = max(self.clock.now_s, self._reported_s[name] + self._setting.report_every_s)
        self.clock.at(due_s, self._report, site)

    def _heartbeat(self, site: SimulatedSite) -> None:
        due_s = self._reported_s[site.spec.name] + LEAST_REPORT_EVERY_S
        if due_s <= self.clock.now_s:
            self._changed(site)
            due_s = self.clock.now_s + LEAST_REPORT_EVERY_S
        self.clock.at(due_s, self._heartbeat, site)

    def _report(self, site: SimulatedSite) -> None:
        name = site.spec.name
        self._reporting.discard(name)
        if name in self._down:
            return
        self._reported_s[name] = self.clock.now_s
        self._seq += 1
        after_s = [gateway.rtt_s(name) / 2 + self._setting.report_delay_s for gateway in self.gateways]
        load = figures(site, self._seq, self.clock.now_s + after_s[0])
        for gateway, each_s in zip(self.gateways, after_s, strict=True):
            told = load if each_s == after_s[0] else replace(load, received_s=self.clock.now_s + each_s)
            self.clock.after(each_s, gateway.report, name, told, self.clock.now_s)

    # ---- outages

    def _lose(self, outage: Outage) -> None:
        self._down.add(outage.site)
        site = self.sites[outage.site]
        site.settle_rows()
        produced = {row.id: row.produced for row in site.running.values()}
        site.cancel_all()
        for gateway in self.gateways:
            self.clock.after(NOTICED_AFTER_S, self._noticed, gateway, outage.site, produced)
        noticed_s = outage.from_s + NOTICED_AFTER_S
        self.clock.at(max(outage.until_s, noticed_s), self._back, outage.site)

    def _noticed(self, gateway: Gateway, site: str, produced: dict[str, int]) -> None:
        for attempt in gateway.links[site].live.values():
            self._attempts.pop(attempt.id, None)
        gateway.lost(site, lambda attempt: produced.get(attempt.id, attempt.produced_before))

    def _back(self, site: str) -> None:
        self._down.discard(site)
        for gateway in self.gateways:
            gateway.joined(site)
        self._changed(self.sites[site])


def figures(site: SimulatedSite, seq: int, received_s: float) -> LoadReport:
    promised = site.settle_rows()
    remaining, weight = site.remaining()
    queue, unread = site.queue, site.unread_tokens
    return LoadReport(
        seq=seq,
        received_s=received_s,
        running=len(site.running),
        pending=site.pending,
        token_load=sum(remaining) * weight + unread + queue.prompt_tokens + queue.response_tokens,
        kv_free_tokens=max(0, site.spec.kv_tokens - site.kv_used),
        kv_reserved_tokens=promised,
        iteration=site.spec.cost,
        running_remaining=remaining,
        running_weight=weight,
        pending_prompt_tokens=queue.prompt_tokens,
        pending_response_tokens=queue.response_tokens,
        unread_tokens=unread,
    )


__all__ = ["Federation", "Outage", "Setting"]
