"""The training abilities that a site announces. A pure value."""

from __future__ import annotations

from typing import NamedTuple


class Trains(NamedTuple):
    """`runs`: the number of concurrent runs. `max_rank`: the highest rank of an adapter. `usd_per_mtok`: the
    price of a million trained tokens.
    """

    runs: int
    max_rank: int
    usd_per_mtok: float = 0.0
