"""A site as `mico sites list` tells it."""

from __future__ import annotations

from typing import Any

import pytest

from mico.commands.sites import table_row

SITE: dict[str, Any] = {
    "name": "alpha",
    "cloud": "aws",
    "region": "us",
    "state": "ready",
    "running": 1,
    "slots": 8,
    "pending": 0,
    "token_load": 12.0,
    "tokens_per_s": 50.0,
    "kv_capacity_tokens": 1000,
    "kv_free_tokens": 750,
    "load_age_s": 0.5,
}


@pytest.mark.parametrize(
    ("changed", "used"),
    [({}, "25%"), ({"kv_capacity_tokens": 0}, "-"), ({"state": "down", "kv_free_tokens": 0}, "-")],
)
def test_kv_in_use_is_told_of_sites_that_have_any(changed: dict[str, Any], used: str) -> None:
    assert table_row({**SITE, **changed})["KV used"] == used
