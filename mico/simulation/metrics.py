"""Metrics of a run, and the orders in which a site may serve its queue."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf

import numpy as np

from gateway.domain import Lane
from gateway.prices import MTOK
from mico.errors import CommandFailed, ExitCode
from mico.simulation.queries import Record
from mico.simulation.specification import PROMPT_PRICE
from site_engine.core.request import Request
from site_engine.core.request_queue import STARVING_AFTER_S, Score, least_work


def first_come(request: Request, _aged: float) -> float:
    """Score by arrival."""
    return request.arrived_s


def longest_possible(request: Request, _aged: float) -> float:
    """Score by the length that one answer in a thousand exceeds, longest first (Graham, 1969).

    Not by the mean: the last answer to end is one that was expected to be short.
    """
    last = request.remaining.points[-1]
    return -(last.generated + last.expected)


def shortest_forecast(request: Request, _aged: float) -> float:
    """Score by the expected response alone; a second of waiting counts as fifty tokens."""
    return request.expected_remaining() + 50.0 * request.arrived_s


ORDERS: dict[str, tuple[Score, float]] = {
    "work": (least_work, STARVING_AFTER_S),
    "shortest": (shortest_forecast, STARVING_AFTER_S),
    "fcfs": (first_come, inf),
    "longest": (longest_possible, inf),
}
"""By name: the score that orders a site's queue, and the wait after which the oldest request goes first.

The first is the engine's own.
"""


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """Metrics of a run.

    Latency is from arrival to the last token, as the client sees it; normalised, it is per response token.
    The lines of batches, for which nobody waits, count only for the makespan, the price and `completed`.
    """

    mean_normalized_latency: float
    p99_normalized_latency: float
    mean_ttft_s: float
    p50_ttft_s: float
    p99_ttft_s: float
    makespan_s: float
    jain: float  # over the mean normalised latencies of tenants
    offloads: int
    completed: int
    max_ttft_over_median: float
    max_ttft_over_median_latency: float  # the median is far below a second where most find a slot free
    preemptions: int
    usd_per_mtok: float
    usd: float  # of all answers, prompts included
    hit_rate: float  # cached tokens of all prompts

    def row(self) -> dict[str, object]:
        return asdict(self)


class Results:
    """The results of a run, in 24 bytes for each query. `usd_per_mtok`: of response tokens at each site."""

    def __init__(self, usd_per_mtok: Mapping[str, float] | None = None) -> None:
        self.queries = 0
        self._usd_per_mtok = usd_per_mtok or {}
        self._latencies = {lane: Latencies() for lane in Lane}
        self._makespan_s = 0.0
        self._offloads = 0
        self._prompt_tokens = self._cached_tokens = self._response_tokens = 0
        self._response_usd = self._prompt_usd = 0.0

    def add(self, record: Record) -> None:
        """Add the record of a query that has ended."""
        self.queries += 1
        self._offloads += record.moves
        if record.finish_s != record.finish_s:  # refused
            return
        query = record.query
        per_token_s = record.finish_s / query.response_tokens
        self._latencies[query.lane].add(record.first_token_s, record.finish_s, per_token_s, query.tenant)
        self._makespan_s = max(self._makespan_s, query.arrival_s + record.finish_s)
        self._prompt_tokens += query.prompt_tokens
        self._cached_tokens += record.cached_tokens
        self._response_tokens += query.response_tokens
        usd = self._usd_per_mtok.get(record.site, 0.0) / MTOK
        self._response_usd += query.response_tokens * usd
        self._prompt_usd += PROMPT_PRICE * query.prompt_tokens * usd

    def metrics(self, preemptions: int = 0) -> RunMetrics:
        """Return the metrics of all queries. Raises CommandFailed if none was completed."""
        completed = sum(len(each.finish_s) for each in self._latencies.values())
        if not completed:
            raise CommandFailed("no query was completed", tip="is every site out of order the whole time?")
        found = self._latencies[Lane.INTERACTIVE]
        if not found.finish_s:
            found = self._latencies[Lane.BATCH]
        per_token_s, ttft_s = np.frombuffer(found.per_token_s), np.frombuffer(found.first_token_s)
        median_s = float(np.median(ttft_s))
        return RunMetrics(
            mean_normalized_latency=float(per_token_s.mean()),
            p99_normalized_latency=float(np.quantile(per_token_s, 0.99)),
            mean_ttft_s=float(ttft_s.mean()),
            p50_ttft_s=median_s,
            p99_ttft_s=float(np.quantile(ttft_s, 0.99)),
            makespan_s=self._makespan_s,
            jain=jain([total / count for total, count in found.by_tenant.values()]),
            offloads=self._offloads,
            completed=completed,
            max_ttft_over_median=float(ttft_s.max() / median_s),
            max_ttft_over_median_latency=float(ttft_s.max() / np.median(np.frombuffer(found.finish_s))),
            preemptions=preemptions,
            usd_per_mtok=self._response_usd * MTOK / self._response_tokens,
            usd=self._response_usd + self._prompt_usd,
            hit_rate=self._cached_tokens / self._prompt_tokens,
        )


class Latencies:
    """Columns of the answered queries of one lane."""

    def __init__(self) -> None:
        self.first_token_s, self.finish_s, self.per_token_s = array("d"), array("d"), array("d")
        self.by_tenant: dict[str, tuple[float, int]] = {}  # the sum of `per_token_s`, and the queries

    def add(self, first_token_s: float, finish_s: float, per_token_s: float, tenant: str) -> None:
        self.first_token_s.append(first_token_s)
        self.finish_s.append(finish_s)
        self.per_token_s.append(per_token_s)
        total, count = self.by_tenant.get(tenant, (0.0, 0))
        self.by_tenant[tenant] = total + per_token_s, count + 1


def run_metrics(records: Iterable[Record], usd_per_mtok: Mapping[str, float] | None = None) -> RunMetrics:
    """Return the metrics of all records. Raises CommandFailed if no query was completed."""
    results = Results(usd_per_mtok)
    for record in records:
        results.add(record)
    return results.metrics()


def jain(values: Sequence[float]) -> float:
    """Return Jain's fairness index: 1 if all are equal."""
    of = np.array(values)
    return float(of.sum() ** 2 / (len(of) * (of**2).sum()))


def order_by_name(name: str) -> tuple[Score, float]:
    """Return an entry of ORDERS. Raises CommandFailed for an unknown name."""
    if name not in ORDERS:
        raise CommandFailed(
            f"there is no order {name!r}",
            tip=f"choose of {', '.join(ORDERS)}",
            exit_code=ExitCode.WRONG_USAGE,
        )
    return ORDERS[name]
