"""Track the demands assigned to a site since its last report, and the requests that ended since. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gateway.domain import Credit, LoadReport
from gateway.routing.demand import Demand, credit_with


class UnreportedDemands:
    """The demands that no report covers yet, by attempt. `credit` is their sum: updated with each demand, as
    a burst assigns thousands between two reports, and recomputed at each report, against rounding errors.
    """

    def __init__(self) -> None:
        self._demands: dict[str, Demand] = {}
        self.credit = Credit()

    def add(self, attempt_id: str, demand: Demand) -> None:
        self._demands[attempt_id] = demand
        self.credit = credit_with(self.credit, demand)

    def remove(self, attempt_id: str) -> bool:
        """Remove the demand of an attempt. Return False if there is none."""
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
        """Keep only the demands of the attempts for which `is_kept` returns True."""
        kept = {attempt_id: each for attempt_id, each in self._demands.items() if is_kept(attempt_id)}
        self._demands, self.credit = kept, Credit()
        for each in kept.values():
            self.credit = credit_with(self.credit, each)


def without_ended(load: LoadReport, kv_tokens: int) -> LoadReport:
    """Return a report without one running request that has ended and freed `kv_tokens` of KV memory.

    The expected remaining length of that request is unknown, so the least one is removed.
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
