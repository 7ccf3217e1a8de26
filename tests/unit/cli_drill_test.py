"""The site that a drill takes when none is named."""

from __future__ import annotations

import pytest

from mico.commands.drill import busiest
from tests.support.command_line import run

SITES = [{"name": "a", "assigned": 0}, {"name": "b", "assigned": 3}, {"name": "c", "assigned": 9}]


def test_the_living_site_with_the_most_queries_is_taken() -> None:
    assert busiest(SITES, ["a", "b"]) == "b"  # c runs elsewhere
    assert busiest(SITES, ["a", "b", "c"]) == "c"


def test_without_queries_it_is_the_first_and_without_sites_none() -> None:
    assert busiest([{"name": "a", "assigned": 0}], ["a", "new"]) == "a"
    assert busiest(SITES, []) == ""


def test_a_site_is_not_stopped_for_a_time_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "drill", "stale", "--for", "soon")
    assert status == 2 and "such as 90s" in err
