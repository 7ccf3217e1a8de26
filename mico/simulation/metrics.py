"""Metrics of a run, and the orders in which a site may serve its queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    jain: float
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


def run_metrics(
    records: Sequence[Record], preemptions: int = 0, usd_per_mtok: Mapping[str, float] | None = None
) -> RunMetrics:
    """Return the metrics of all records. `usd_per_mtok`: price of a million response tokens at each site.

    Raises CommandFailed if no query was completed.
    """
    done = [record for record in records if record.finish_s == record.finish_s]
    if not done:
        raise CommandFailed("no query was completed", tip="is every site out of order the whole time?")
    interactive = [record for record in done if record.query.lane is Lane.INTERACTIVE] or done
    latency = np.array([record.finish_s / record.query.response_tokens for record in interactive])
    ttft = np.array([record.first_token_s for record in interactive])
    return RunMetrics(
        mean_normalized_latency=float(latency.mean()),
        p99_normalized_latency=float(np.quantile(latency, 0.99)),
        mean_ttft_s=float(ttft.mean()),
        p50_ttft_s=float(np.median(ttft)),
        p99_ttft_s=float(np.quantile(ttft, 0.99)),
        makespan_s=max(record.query.arrival_s + record.finish_s for record in done),
        jain=jain([record.query.tenant for record in interactive], latency.tolist()),
        offloads=sum(record.moves for record in records),
        completed=len(done),
        max_ttft_over_median=float(ttft.max() / np.median(ttft)),
        max_ttft_over_median_latency=float(
            ttft.max() / np.median([record.finish_s for record in interactive])
        ),
        preemptions=preemptions,
        usd_per_mtok=_mean_usd_per_mtok(done, usd_per_mtok or {}),
        usd=_usd(done, usd_per_mtok or {}),
        hit_rate=sum(record.cached_tokens for record in done)
        / sum(record.query.prompt_tokens for record in done),
    )


def _mean_usd_per_mtok(done: Sequence[Record], usd_per_mtok: Mapping[str, float]) -> float:
    """Return the mean price of a million response tokens; a moved answer has its last site's price."""
    tokens = [record.query.response_tokens for record in done]
    paid = [usd_per_mtok.get(record.site, 0.0) for record in done]
    return float(np.dot(tokens, paid) / sum(tokens))


def _usd(done: Sequence[Record], usd_per_mtok: Mapping[str, float]) -> float:
    """Return the price of all answers and their prompts, as a site of the simulation has prices."""
    tokens = [PROMPT_PRICE * each.query.prompt_tokens + each.query.response_tokens for each in done]
    paid = [usd_per_mtok.get(each.site, 0.0) for each in done]
    return float(np.dot(tokens, paid) / MTOK)


def jain(tenants: Sequence[str], latencies: Sequence[float]) -> float:
    """Return Jain's fairness index over the tenants' mean normalised latencies: 1 if all are equal."""
    sums: dict[str, list[float]] = {}
    for tenant, latency in zip(tenants, latencies, strict=True):
        sums.setdefault(tenant, []).append(latency)
    means = np.array([np.mean(values) for values in sums.values()])
    return float(means.sum() ** 2 / (len(means) * (means**2).sum()))


def order_by_name(name: str) -> tuple[Score, float]:
    """Return an entry of ORDERS. Raises CommandFailed for an unknown name."""
    if name not in ORDERS:
        raise CommandFailed(
            f"there is no order {name!r}",
            tip=f"choose of {', '.join(ORDERS)}",
            exit_code=ExitCode.WRONG_USAGE,
        )
    return ORDERS[name]
