"""Run a batch on several sites that are counted: fed by the gateway's own code, each at its own speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import NamedTuple

from bench.support.offline_orders import Waiting, is_heavy
from bench.support.offline_work import Line
from gateway.batches.capacity import QUEUED_SHARE, SiteCapacity
from gateway.batches.homes import Homes
from gateway.batches.values import Line as BatchLine
from gateway.batches.values import Order
from gateway.domain import LoadReport, Model, Site, SiteIdentity, SiteState
from site_engine.core.request import Request
from site_engine.core.request_queue import AdmissionQueue
from tests.support.counted_engine import CountedEngine


class Ended(NamedTuple):
    """`answers`: how often each line was answered. `cached`: prompt tokens that were not computed. `lost`:
    of each line that ran at the site that died, the tokens in memory there that no other line had.
    """

    seconds: float
    answers: Counter[int]
    cached: int
    lost: tuple[int, ...]


class CountedSites:
    """The sites of one model. A line is a site's until it ends or the site dies."""

    def __init__(
        self,
        forecasts: Sequence[Line],
        request: Callable[[int], Request],
        engine: Callable[[AdmissionQueue], CountedEngine],
        sites: int,
        slots: int,
    ) -> None:
        self._request, self._slots, self._most = request, slots, slots + int(QUEUED_SHARE * slots)
        self._engines = {f"site-{at}": engine(AdmissionQueue(starving_after_s=inf)) for at in range(sites)}
        self._sent: dict[str, dict[int, BatchLine]] = {name: {} for name in self._engines}
        self._homes, self._answers, self._cached = Homes(), Counter[int](), 0
        self._delivered: dict[int, list[int]] = {}  # tokens of lines whose site has died
        self._lost: tuple[int, ...] = ()
        self._waiting = Waiting(forecasts, Order.BLEND, sites * self._most)

    def run(self, kill_s: float = inf) -> Ended:
        """Run to the end. The first site dies at `kill_s`."""
        now_s = 0.0
        self._feed(now_s)
        while working := [name for name, engine in self._engines.items() if engine.scheduler.has_work]:
            name = min(working, key=lambda each: self._engines[each].counts.seconds)
            now_s = self._engines[name].counts.seconds
            if now_s >= kill_s:
                kill_s = inf
                self._kill("site-0")
                self._feed(now_s)
                continue
            ended = self._engines[name].step()
            for request in ended:
                self._waiting.ended(self._sent[name].pop(int(request.id)))
                self._answers[int(request.id)] += 1
                self._cached += request.cached_tokens
            if ended:
                self._feed(self._engines[name].counts.seconds)
        return Ended(now_s, self._answers, self._cached, self._lost)

    def _kill(self, name: str) -> None:
        """Put the lines of a site back, in their order; others go on after the tokens that it delivered."""
        scheduler = self._engines.pop(name).scheduler
        for request in (*scheduler.running, *scheduler.preempted):
            self._delivered[int(request.id)] = request.output
        lines = self._sent[name]
        shared = {lines[int(each.id)].group: lines[int(each.id)].shared_tokens for each in scheduler.running}
        own = [each.computed - lines[int(each.id)].shared_tokens for each in scheduler.running]
        self._lost = *shared.values(), *(max(0, tokens) for tokens in own)
        self._waiting.put_back(self._sent.pop(name).values())

    def _feed(self, now_s: float) -> None:
        capacities = [
            SiteCapacity(_site(name, self._slots, sent.values()), self._most - len(sent))
            for name, sent in self._sent.items()
            if len(sent) < self._most
        ]
        self._homes.begin(capacities, self._sent)
        waiting = sum(len(engine.scheduler.queue) for engine in self._engines.values())
        lines: list[BatchLine] = []
        while len(lines) < sum(free for _, free in capacities):
            line = self._homes.take(self._waiting.next_end(self._most * len(self._engines), waiting))
            if line is None:
                break
            self._waiting.started(line)
            lines.append(line)
        for line, name in zip(lines, self._homes.assign(lines, capacities), strict=True):
            self._send(line, name, now_s)

    def _send(self, line: BatchLine, name: str, now_s: float) -> None:
        engine = self._engines[name]
        if not engine.scheduler.has_work:
            engine.counts.seconds = max(engine.counts.seconds, now_s)
        self._sent[name][line.number] = line
        request = self._request(line.number)
        request.resumed = self._delivered.pop(line.number, [])
        request.tokens += request.resumed
        request.any_order, request.prefill_heavy = True, is_heavy(line)
        engine.scheduler.queue.push(request)


def _site(name: str, slots: int, lines: Iterable[BatchLine]) -> Site:
    models = {"m": Model("m", "r", 1 << 20, 0, "bench")}
    identity = SiteIdentity(name, "boot", "cloud", "region", models, slots, 1 << 20)
    load = LoadReport(1, 0.0, token_load=sum(line.response_tokens for line in lines))
    return Site(identity, SiteState.READY, load)
