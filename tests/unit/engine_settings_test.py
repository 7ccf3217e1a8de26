"""The settings that an engine derives, and those that it refuses."""

from __future__ import annotations

import pytest
import torch

from site_engine.engine.build import packed_engine
from site_engine.engine.settings import TOKEN_BUDGETS, EngineSettings
from tests.support.engine_models import Ticks, family

torch.set_num_threads(1)


@pytest.mark.parametrize(("given", "slots", "expected"), [(None, 4, 512), (None, 600, 600), (64, 4, 64)])
def test_the_tokens_of_an_iteration_follow_the_device_unless_told(
    given: int | None, slots: int, expected: int
) -> None:
    settings = EngineSettings(slots=slots, token_budget=given, kv_tokens=1024)
    assert packed_engine(family("llama").served, settings, Ticks())._token_budget == expected
    assert TOKEN_BUDGETS["cuda"] > TOKEN_BUDGETS["cpu"]


def test_a_budget_below_one_token_per_slot_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"10.*64"):
        EngineSettings(slots=64, token_budget=10)
