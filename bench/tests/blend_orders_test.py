"""The orders that `bench.blend` compares run every line, and none is faster than what it says is possible."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bench.blend import Job, as_requests, lines_of, run
from bench.blend_chats import Beside, chats
from bench.support.dual_scanner import parts_of, sampled, split_over
from bench.support.offline_orders import ORDERS
from bench.support.offline_work import H200
from gateway.batches.values import Order

JOB = Job("documents and stories", "", 0.0, "peak", 2.0, 16_000, 64, 0, "")


@pytest.mark.parametrize("order", ORDERS)
def test_no_order_is_faster_than_the_bound(order: str) -> None:
    found = run(JOB._replace(order=order))
    assert found["bound_s"] <= found["took_s"] <= 4 * found["bound_s"]


def test_questions_with_answers_of_two_tokens_take_no_less_than_the_bound() -> None:
    """The head is computed for the last token of a prompt alone, and the last token of an answer is not."""
    found = run(JOB._replace(workload="random 29", order="blend", kv_tokens=40_000, rows=256))
    assert found["bound_s"] <= found["took_s"] <= 1.1 * found["bound_s"]


def test_wrong_forecasts_are_right_on_the_average() -> None:
    lines = lines_of(JOB._replace(seconds=30.0))
    expected, _ = as_requests(JOB._replace(wrong_by=0.6), lines)
    for source in ("documents", "stories"):
        tokens = [line.response_tokens for line in lines if line.source == source]
        known = [line.response_tokens for line in expected if line.source == source]
        assert sum(known) == pytest.approx(sum(tokens), rel=0.1)


def test_wrong_forecasts_are_the_same_in_every_process() -> None:
    draw = "from bench.tests.blend_orders_test import JOB; from bench.blend import forecasts, lines_of; "
    draw += "print(forecasts(lines_of(JOB), 0.6, 0)[:9])"
    printed = {
        subprocess.run(
            [sys.executable, "-c", draw],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(printed) == 1


def test_the_dual_scanners_lists_have_every_line_once_and_equal_work() -> None:
    lines = lines_of(JOB._replace(seconds=20.0))
    parts = parts_of(lines, range(len(lines)))
    assert [part.density for part in parts] == sorted((part.density for part in parts), reverse=True)
    given = split_over(parts, 4)
    assert sorted(at for its in given for at in its) == list(range(len(lines)))
    for seconds in zip(*(H200.least([lines[at] for at in its]) for its in given), strict=True):
        assert max(seconds) < 1.1 * min(seconds)


def test_the_dual_scanner_knows_lengths_from_a_hundredth_of_the_lines() -> None:
    lines = lines_of(JOB._replace(workload="chats", seconds=20.0))
    first, known = sampled(lines)
    assert len(first) == round(0.01 * len(lines))
    assert all(known[at] == lines[at] for at in first)
    assert len({line.response_tokens for at, line in enumerate(known) if at not in first}) == 1


def test_chats_beside_a_batch_wait_for_an_iteration_or_two_with_a_piece_of_its_prompts() -> None:
    """All prompts at once would take 0.18 s an iteration."""
    job = JOB._replace(workload="documents", seconds=4.0, kv_tokens=30_000)
    (_, first), *others = chats(8.0, 60.0, 0)
    arrivals = [(0.0, first), *others]
    longest, blend = (Beside(job, how, arrivals).run() for how in (Order.LONGEST, Order.BLEND))
    assert max(longest["p99_s"], blend["p99_s"]) <= 0.06
    assert blend["took_s"] < longest["took_s"]
