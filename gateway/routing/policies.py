"""How to pick among candidates. One signature: production, benchmarks and the simulator run the same code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from gateway.routing.demand import Candidate, Choice, Demand, Policy

STALE_PENALTY = 1.0
"""Seconds added per second of a report's age: of two equal sites the one that spoke last is the surer."""
USD_PER_SECOND = 0.001
"""One second of waiting is worth this much: turns a difference in price into seconds."""


def mico(demand: Demand, candidates: Sequence[Candidate], turn: int) -> Choice:
    """Least expected completion, with price and the age of the figures as terms in seconds."""

    def seconds(candidate: Candidate) -> float:
        e = candidate.estimate
        return (
            e.finish_s + STALE_PENALTY * e.load_age_s + e.price_usd / USD_PER_SECOND
        ) / candidate.site.weight

    chosen = _least(candidates, turn, seconds)
    best = chosen.estimate
    waits = f"waits {best.wait_s:.2f} s, " if best.wait_s > 0 else ""
    promise = f"first token in {best.first_token_s:.2f} s, done in {best.finish_s:.2f} s"
    return Choice(chosen, f"earliest finish: {waits}{promise}")


def round_robin(demand: Demand, candidates: Sequence[Candidate], turn: int) -> Choice:
    return Choice(candidates[turn % len(candidates)], "next in turn")


def least_requests(demand: Demand, candidates: Sequence[Candidate], turn: int) -> Choice:
    chosen = _least(candidates, turn, _requests_per_slot)
    return Choice(chosen, f"fewest requests per slot: {_requests_per_slot(chosen):.2f}")


def power_of_two(demand: Demand, candidates: Sequence[Candidate], turn: int) -> Choice:
    """The less loaded of two sites drawn by `turn` (Mitzenmacher 2001)."""
    first = _scramble(turn) % len(candidates)
    second = (first + 1 + _scramble(turn + 1) % max(1, len(candidates) - 1)) % len(candidates)
    drawn = (candidates[first], candidates[second])
    chosen = min(drawn, key=_requests_per_slot)
    return Choice(chosen, f"the less loaded of {drawn[0].site.name} and {drawn[1].site.name}")


def _least(candidates: Sequence[Candidate], turn: int, cost: Callable[[Candidate], float]) -> Candidate:
    """The cheapest; ties go round, so that equal sites share equally."""
    size = len(candidates)
    return candidates[min(range(size), key=lambda i: (cost(candidates[i]), (i - turn) % size))]


def _requests_per_slot(candidate: Candidate) -> float:
    site = candidate.site
    held = site.load.running + site.load.pending + site.credit.requests
    return held / (max(1, site.identity.slots) * site.weight)


def _scramble(turn: int) -> int:
    """A fixed hash of a counter (Knuth's multiplier): reproducible draws without state."""
    return (turn * 2654435761 & 0xFFFFFFFF) >> 7


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"mico": mico, "round_robin": round_robin, "least_requests": least_requests, "power_of_two": power_of_two}
)
