"""A short soak: whatever goes wrong around them, known answers stay right and nothing is left behind."""

from __future__ import annotations

import pytest
import torch

from tests.support.engine_models import assert_idle, family
from tests.support.soak import Sample, Soak, growth

pytestmark = pytest.mark.slow

torch.set_num_threads(1)


def test_faults_cancels_and_preemptions_leave_nothing_and_change_no_known_answer() -> None:
    soak = Soak(family("llama").served, seed=4)
    soak.faults.armed = True
    assert soak.capacity(steps=500) > 0
    count = soak.ledger.count
    assert count["wrong_answers"] == count["failed_without_reason"] == 0
    assert soak.faults.count.total() > 0
    for happened in ("known_answers", "preemptions", "ended_by_cancelled", "ended_by_failed"):
        assert count[happened] > 0, happened
    assert count["refused_context_length"] > 0
    assert set(soak.left().values()) == {0}
    assert_idle(soak.engine)


def test_growth_is_what_the_last_quarter_has_over_the_second() -> None:
    flat = [Sample(minute, 500.0 if minute else 300.0, 1) for minute in range(20)]
    assert growth(flat) == 0.0
    assert growth([Sample(minute, 500.0 + minute, 1) for minute in range(20)]) == 10.0
