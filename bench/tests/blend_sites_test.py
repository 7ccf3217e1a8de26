"""Several sites together answer a batch as fast as they are many, and every line once whichever dies."""

from __future__ import annotations

import pytest

from bench.blend import Job
from bench.blend_sites import run


@pytest.mark.slow
def test_four_sites_are_nearly_four_times_as_fast_as_one_and_lose_no_line_when_one_dies() -> None:
    """`run` checks that every line is answered once."""
    job = Job("documents", "blend", 0.0, "peak", 15.0, 19_000, 64, 0, "")
    one, four = run(job, 1), run(job, 4)
    died = run(job, 4, four.seconds / 3)
    assert one.seconds >= 3.6 * four.seconds
    assert one.seconds >= 2.7 * died.seconds


def test_lines_with_a_short_beginning_in_common_run_at_every_site_beside_documents() -> None:
    job = Job("documents and stories", "blend", 0.0, "peak", 6.0, 20_000, 64, 0, "")
    assert run(job, 1).seconds >= 1.8 * run(job, 4).seconds


def test_long_answers_of_a_site_that_dies_go_on_elsewhere() -> None:
    job = Job("documents and stories", "blend", 0.0, "peak", 6.0, 20_000, 64, 0, "")
    four = run(job, 4)
    assert run(job, 4, four.seconds / 2).seconds <= 1.1 * four.seconds
