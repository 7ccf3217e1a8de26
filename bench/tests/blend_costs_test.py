"""Counted seconds beside those of an H200, bench/results/blend.md: runs to which no cost was fitted."""

from __future__ import annotations

import pytest

from bench.blend import Job, counted, lines_of

MEASURED = [
    ("documents", "arrival", "peak", 0.0, 40.92),
    ("documents", "longest", "peak", 0.0, 40.24),
    ("documents", "prefix", "peak", 0.0, 17.16),
    ("documents", "blend", "peak", 0.0, 16.22),
    ("chats", "prefix", "p90", 0.6, 15.93),
    ("chats", "prefix", "peak", 0.6, 12.63),
]


@pytest.mark.parametrize(("workload", "order", "reserve", "wrong_by", "took_s"), MEASURED)
def test_counted_seconds_are_those_of_the_gpu(
    workload: str, order: str, reserve: str, wrong_by: float, took_s: float
) -> None:
    job = Job(workload, order, wrong_by, reserve, 16.0, 75_000, 256, 0, "")
    assert counted(job, lines_of(job)).seconds == pytest.approx(took_s, rel=0.06)
