"""Simulate gateways that get frequent reports from a share of the sites only, and rare ones from the others.

    python -m bench.studies.report_shares --sites 200 --gateways 4 --queries 24000 --ways today draw:2 share:2

Each gateway has a view of its own, and each site keeps with each gateway the pace of production's
`ReportPace`. `today`: every gateway gets a report when one of them must, and compares a draw of all sites.
In the other ways each site is in the share of K gateways, by rendezvous hashing of the names, and gives the
rest rare reports. A gateway then compares a draw of all sites as today (`draw:K`), or its share (`share:K`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from math import inf
from random import Random
from time import process_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.simulator import PROMPT_TOKENS, RESPONSE_TOKENS, SLOWER, arrivals, expected
from gateway.routing import decide
from gateway.routing.candidates import Candidates
from gateway.routing.demand import Demand
from gateway.routing.fleet import Fleet
from gateway.routing.policies import POLICIES
from mico.simulation import federation as simulated
from mico.simulation.federation import Federation, Outage, Setting, load_report
from mico.simulation.gateway import Attempt, Gateway
from mico.simulation.metrics import ORDERS, Results, jain
from mico.simulation.queries import Expected, Query, Record
from mico.simulation.row import Row
from mico.simulation.site import SimulatedSite
from mico.simulation.specification import SiteSpec, capacity_qps, sites_of
from mico.simulation.view import View
from site_engine.federation.report_pace import SECONDS, SHARE, LoadSummary

Bools = NDArray[np.bool_]
BID_INTERVAL_S = 1.0
DRAW = decide._drawn


def in_share(site: str, gateways: int, keep: int) -> Bools:
    """Return which of the gateways have a site in their share: those with the highest hashes with it."""
    heights = [blake2b(f"{site} g{each}".encode(), digest_size=8).digest() for each in range(gateways)]
    found = np.zeros(gateways, dtype=bool)
    found[sorted(range(gateways), key=heights.__getitem__)[gateways - keep :]] = True
    return found


class SitePace:
    """The reports that each gateway has of one site. `often`: which of the gateways get frequent ones."""

    def __init__(self, spec: SiteSpec, often: Bools, options: argparse.Namespace, together: bool) -> None:
        count = len(often)
        self._spec, self._often, self._together = spec, often, together
        self._times = np.where(often, options.times_off, options.rare_times_off)
        self.every_s = np.where(often, options.every_s, options.rare_every_s)
        self._told, self._told_s = np.zeros((6, count)), np.full(count, -np.inf)
        self.admitted, self.ended = np.zeros(count), np.zeros(count)
        self._has_bid, self._bid_s = np.zeros(count, dtype=bool), np.full(count, -np.inf)

    def forget(self) -> None:
        self._told_s[:] = -np.inf

    def due(self, load: Any, now_s: float) -> Bools:
        """Return which gateways must get a report now, and note that they do."""
        slots, kv = self._spec.slots, self._spec.kv_tokens
        seen = LoadSummary.of(load, slots, kv)
        share, told = self._times * SHARE, self._told
        new = np.array(seen)[:, None]
        off = np.abs(new - told)
        due: Bools = now_s - self._told_s >= self.every_s
        own = np.maximum(self.admitted, self.ended)
        if self._together:
            own = np.maximum(self.admitted.sum(), self.ended.sum())
        due |= own > share * slots
        due |= (off[0] > share * slots) | (off[1] > share * slots) | (off[2] > share * kv)
        due |= off[3] > share * told[3]
        due |= off[4] > self._times * np.maximum(SECONDS, SHARE * told[4])
        due |= off[5] > self._times * np.maximum(SECONDS, SHARE * told[5])
        if seen.requests == 0:
            due |= (told[1] > 0) & self._often
        if seen.running < slots and not load.pending:
            bidding = ~self._has_bid & (now_s - self._bid_s >= BID_INTERVAL_S) & self._often
            due |= bidding
            self._has_bid |= bidding
            self._bid_s[bidding] = now_s
        else:
            self._has_bid[:] = False
        if self._together and due.any():
            due[:] = True
        told[:, due] = new
        self._told_s[due] = now_s
        self.admitted[due] = self.ended[due] = 0
        return due


class Shares(Federation):
    """A federation with a view and a pace of its own for each gateway."""

    def __init__(self, setting: Setting, way: str, options: argparse.Namespace) -> None:
        super().__init__(setting)
        kind, _, keep = way.partition(":")
        gateways = setting.gateways
        self.reports = 0
        self._uneven = options.uneven
        often = {name: in_share(name, gateways, min(gateways, int(keep or gateways))) for name in self.sites}
        paced = {spec.name: spec for spec in setting.specs}
        self._paces = {
            name: SitePace(paced[name], each, options, kind == "today") for name, each in often.items()
        }
        for number, view in enumerate(self._views):
            view._fleet.share = np.array([often[site.name][number] for site in view.directory.fleet.sites])  # type: ignore[attr-defined]
        decide._drawn = share_alone if kind == "share" else DRAW

    def _arrive(self, query: Query, expected: Expected, rest: Iterator[tuple[Query, Expected]]) -> None:
        self._expected[query.number] = expected
        self._schedule_next_arrival(rest)
        self.last_s = query.arrival_s
        first = self._uneven and query.number % 2
        self.gateways[0 if first else query.number // 2 % len(self.gateways)].arrive(query)

    def _submit(self, gateway: Gateway, attempt: Attempt) -> None:
        self._paces[attempt.site].admitted[gateway.number] += 1
        super()._submit(gateway, attempt)

    def _last_token(self, row: Row) -> None:
        gateway, attempt = self._attempts[row.id]
        self._paces[attempt.site].ended[gateway.number] += 1
        super()._last_token(row)

    def _detect_loss(self, site: str, produced: dict[str, int]) -> None:
        super()._detect_loss(site, produced)
        for gateway in self.gateways:  # nothing of it is left to be added to its last report
            gateway.links[site].reported(inf)

    def bring_up(self, name: str) -> None:
        self._paces[name].forget()
        super().bring_up(name)

    def _report(self, site: SimulatedSite) -> None:
        name = site.spec.name
        self._reporting.discard(name)
        if name in self._down:
            return
        now_s = self._reported_s[name] = self.clock.now_s
        self._seq += 1
        load, pace = load_report(site, self._seq, now_s), self._paces[name]
        for number in pace.due(load, now_s).nonzero()[0].tolist():
            self.reports += not self._last_came
            view = self._views[number]
            after_s = view.rtt_s[name] / 2 + self._setting.report_delay_s
            quiet_s = float(pace.every_s[number]) - 1.0
            told = replace(load, received_s=now_s + after_s, quiet_s=quiet_s)
            self.clock.after(after_s, view.report, name, told, now_s)


def share_alone(demand: Demand, candidates: Candidates, fleet: Fleet, gateways: int, turn: int) -> Candidates:
    drawn = candidates.allowed & fleet.share  # type: ignore[attr-defined]
    if np.count_nonzero(drawn) < min(decide.MIN_DRAWN, len(candidates.places)):
        return candidates
    return candidates.narrowed(drawn)


def own_views(specs: Sequence[SiteSpec], gateways: int, clock: Callable[[], float]) -> list[View]:
    return [View([spec.seen_by(number) for spec in specs], clock) for number in range(gateways)]


def drawn(options: argparse.Namespace) -> tuple[Setting, Iterator[tuple[Query, Expected]]]:
    """Return the setting and the queries of a run."""
    sites, outages = options.sites, tuple[Outage, ...]()
    if options.burst:
        each = ",".join(f"{-(-sites // len(SLOWER))}x{options.slots}@{slower}" for slower in SLOWER)
        specs, random = tuple(sites_of(each)), Random(options.seed)
        lengths = [random.randint(150, 250) for _ in range(5 * len(specs))]
        queries = iter(
            [(Query(n, 2.0, 96, tokens), expected(96, float(tokens))) for n, tokens in enumerate(lengths)]
        )
    else:
        specs = tuple(sites_of(str(sites)))
        per_second = options.load * capacity_qps(list(specs), PROMPT_TOKENS, RESPONSE_TOKENS)
        queries = arrivals(options.queries, per_second, options.seed)
        if options.loss:
            from_s = min(10.0, 0.3 * options.queries / per_second)
            outages = tuple(Outage(spec.name, from_s, from_s + 6.0) for spec in specs[::3])
    setting = Setting(
        specs,
        POLICIES["mico"],
        *ORDERS["work"],
        gateways=options.gateways,
        outages=outages,
        report_delay_s=1.0 if options.burst else 0.0,
    )
    return setting, queries


def measure(way: str, options: argparse.Namespace) -> dict[str, Any]:
    setting, queries = drawn(options)
    specs = setting.specs
    simulated.views_of = own_views  # type: ignore[attr-defined]
    federation = Shares(setting, way, options)
    results, began_s = Results(), process_time()
    tokens, failed, lost = dict.fromkeys((spec.name for spec in specs), 0), dict[int, int](), 0

    def ended(record: Record) -> None:
        nonlocal lost
        results.add(record)
        lost += record.finish_s != record.finish_s
        tokens[record.site] += record.query.response_tokens
        tries = record.attempts - record.moves
        failed[tries] = failed.get(tries, 0) + 1

    federation.stream(queries, ended)
    found = results.metrics()
    seconds = federation.last_s * len(specs) * options.gateways
    out = {
        "way": way,
        "reports_of_a_site_each_gateway_s": round(federation.reports / seconds, 3),
        "s_per_token": [round(found.mean_normalized_latency, 5), round(found.p99_normalized_latency, 4)],
        "ttft_s": [round(found.mean_ttft_s, 4), round(found.p99_ttft_s, 3)],
        "moved": found.offloads,
        "lost": lost,
        "arrivals_s": round(federation.last_s, 1),
        "cpu_s": round(process_time() - began_s, 1),
    }
    if options.burst:
        out["jain"] = round(jain([tokens[spec.name] * spec.cost.base_s for spec in specs]), 4)
    if options.loss:
        out["by_tries"] = dict(sorted(failed.items()))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=200)
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--queries", type=int, default=24_000)
    parser.add_argument("--load", type=float, default=0.85)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slots", type=int, default=16, help="of a site in a burst")
    parser.add_argument("--times-off", type=int, default=2, help="times the bound, of frequent reports")
    parser.add_argument("--every-s", type=float, default=4.0)
    parser.add_argument("--rare-times-off", type=int, default=16)
    parser.add_argument("--rare-every-s", type=float, default=4.0)
    parser.add_argument(
        "--uneven", action="store_true", help="the first gateway has half of the queries more"
    )
    parser.add_argument(
        "--burst", action="store_true", help="five queries a site at once, as bench.simulator"
    )
    parser.add_argument("--loss", action="store_true", help="of each third site, for six seconds")
    parser.add_argument("--ways", nargs="+", default=["today", "draw:2", "share:2"])
    options = parser.parse_args()
    for way in options.ways:
        print(json.dumps(measure(way, options)), flush=True)


if __name__ == "__main__":
    main()
