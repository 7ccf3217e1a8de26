"""A decision on a site, and the estimates that it compared. Plain values, stored as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec


class PlacementLimits(NamedTuple):
    """The limits that a request sets to where it is served and what that may cost. None means any."""

    regions: frozenset[str] | None = None
    sites: frozenset[str] | None = None
    max_usd: float | None = None  # expected, by the forecast of the answer's length


class Estimate(msgspec.Struct, frozen=True):
    """A forecast on one site. Seconds from now as the client would see them."""

    site: str
    wait_s: float
    first_token_s: float
    finish_s: float
    price_usd: float
    kv_tokens: int
    load_age_s: float
    cached_tokens: float = 0.0  # of the prompt, which are expected in the site's cache
    cost: float | None = None  # compared by the policy, in its own unit: the least was taken


class Decision(msgspec.Struct, frozen=True):
    """Which site serves an attempt, and everything needed to explain or replay it.

    `began_s` and `decided_s` are seconds since the query was received.
    """

    query_id: str
    attempt_id: str
    site: str
    policy: str
    reason: str
    estimates: tuple[Estimate, ...]
    excluded: Mapping[str, str]
    decided_s: float
    began_s: float = 0.0
