"""Describe what a site can train, as it announces it. A pure value."""

from __future__ import annotations

from typing import NamedTuple


class Trains(NamedTuple):
    """`runs` at once, the highest rank of an adapter, and the price of a million trained tokens."""

    runs: int
    max_rank: int
    usd_per_mtok: float = 0.0
