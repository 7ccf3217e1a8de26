"""The settings that an engine derives, and those that it refuses."""

from __future__ import annotations

import pytest
import torch

from site_engine.cuda.batch_layout import MIXED_TOKENS
from site_engine.engine.build import packed_engine
from site_engine.engine.settings import EngineSettings
from tests.support.engine_models import Ticks, family

torch.set_num_threads(1)


@pytest.mark.parametrize(("given", "slots", "expected"), [(None, 4, 512), (None, 600, 1200), (64, 4, 64)])
def test_the_tokens_of_an_iteration_follow_the_device_unless_told(
    given: int | None, slots: int, expected: int
) -> None:
    settings = EngineSettings(slots=slots, token_budget=given, kv_tokens=1024)
    assert packed_engine(family("llama").served, settings, Ticks())._token_budget == expected


def test_an_iteration_on_a_gpu_is_one_that_has_a_graph() -> None:
    assert EngineSettings(slots=256).token_budget_on("cuda") == MIXED_TOKENS[-1]


def test_a_budget_below_one_token_per_slot_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"10.*64"):
        EngineSettings(slots=64, token_budget=10)
