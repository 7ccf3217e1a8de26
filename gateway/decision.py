"""A decision on a site, and the estimates that it compared. Plain values, which are stored unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec


class PlacementLimits(NamedTuple):
    """The limits that a request sets on the site and the cost of its answer. None means no limit."""

    regions: frozenset[str] | None = None
    sites: frozenset[str] | None = None
    max_usd: float | None = None  # expected cost, by the forecast of the answer's length


class Estimate(msgspec.Struct, frozen=True):
    """A forecast on one site. Times are seconds from now, as the client would see them."""

    site: str
    wait_s: float
    first_token_s: float
    finish_s: float
    price_usd: float
    kv_tokens: int
    load_age_s: float
    cached_tokens: float = 0.0  # prompt tokens expected in the site's cache
    cost: float | None = None  # the value that the policy minimized, in its own unit


class Decision(msgspec.Struct, frozen=True):
    """The site that serves an attempt, and everything needed to explain or replay the decision.

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
