"""Counts are written as a person would: in errors, decisions and the terminal."""

from __future__ import annotations

import pytest

from gateway.wording import several
from mico.commands.federation import site_row


@pytest.mark.parametrize(
    ("number", "said"),
    [(0, "0 queries"), (0.6, "1 query"), (1, "1 query"), (1.6, "2 queries"), (1000, "1,000 queries")],
)
def test_one_is_one(number: float, said: str) -> None:
    assert several(number, "query", "queries") == said
    assert several(number, "slot") == said.replace("queries", "slots").replace("query", "slot")


def test_a_site_of_one_slot_has_one_slot() -> None:
    site = {"name": "a", "cloud": "aws", "region": "us", "slots": 1, "state": "ready"}
    assert site_row(site) == ["a", "aws us, 1 slot", "ready"]
