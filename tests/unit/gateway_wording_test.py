"""Counts are written as a person would: in errors, decisions and the terminal."""

from __future__ import annotations

import pytest

from gateway.errors import BadRequest
from gateway.openai.fields import MAX_PROBLEMS, Fields, Problems
from gateway.wording import several
from mico.commands.federation import site_row


@pytest.mark.parametrize(
    ("number", "said"),
    [(0, "0 queries"), (0.6, "1 query"), (1, "1 query"), (1.6, "2 queries"), (1000, "1,000 queries")],
)
def test_one_is_one(number: float, said: str) -> None:
    assert several(number, "query", "queries") == said
    assert several(number, "slot") == said.replace("queries", "slots").replace("query", "slot")


def test_one_problem_that_is_not_shown_is_one() -> None:
    problems = Problems()
    for number in range(MAX_PROBLEMS + 1):
        Fields({}, problems).refuse(f"field_{number}", "is wrong")
    with pytest.raises(BadRequest, match=r" 1 more problem is not shown\.$"):
        problems.raise_any()


def test_a_site_of_one_slot_has_one_slot() -> None:
    site = {"name": "a", "cloud": "aws", "region": "us", "slots": 1, "state": "ready"}
    assert site_row(site) == ["a", "aws us, 1 slot", "ready"]
