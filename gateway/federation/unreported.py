"""Track what a gateway assigned to a site since its last report, and what has ended. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gateway.domain import Credit, LoadReport
from gateway.routing.demand import Demand, credit_with


class UnreportedDemands:
    """`credit` is their sum: kept up to date with each of them, since a burst assigns thousands between two
    reports, and summed anew at each report, so that it does not drift.
    """

    def __init__(self) -> None:
        self._demands: dict[str, Demand] = {}
        self.credit = Credit()

    def add(self, attempt_id: str, demand: Demand) -> None:
        self._demands[attempt_id] = demand
        self.credit = credit_with(self.credit, demand)

    def remove(self, attempt_id: str) -> bool:
        """Remove the demand of an attempt; return False if there is none."""
        demand = self._demands.pop(attempt_id, None)
        if demand is None:
            return False
        before = self.credit
        self.credit = Credit(
            before.requests - demand.choices,
            before.prompt_tokens - demand.prompt_tokens,
            max(0.0, before.response_tokens - demand.response_tokens) if self._demands else 0.0,
        )
        return True

    def __contains__(self, attempt_id: str) -> bool:
        return attempt_id in self._demands

    def keep(self, is_kept: Callable[[str], bool]) -> None:
        """Remove the demands of all attempts but those for which `is_kept` returns true."""
        kept = {attempt_id: each for attempt_id, each in self._demands.items() if is_kept(attempt_id)}
        self._demands, self.credit = kept, Credit()
        for each in kept.values():
            self.credit = credit_with(self.credit, each)


def without_ended(load: LoadReport, kv_tokens: int) -> LoadReport:
    """Return a report without one of its running requests, which has ended and held so many tokens of KV.

    Which of the expected remaining lengths was its own is not known: the least is left out.
    """
    if not load.running:
        return load
    lengths = load.running_remaining[load.running_weight == 1 :]
    return replace(
        load,
        running=load.running - 1,
        running_remaining=lengths,
        kv_free_tokens=load.kv_free_tokens + kv_tokens,
    )
