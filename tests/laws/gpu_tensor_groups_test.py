"""A group of GPUs: fused layers, graphs' shapes and sampling on the device. Kernels run interpreted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import interpreted  # noqa: F401 - skips where there is no Triton

# isort: split

from site_engine.engine.build import packed_engine
from site_engine.engine.settings import EngineSettings
from site_engine.model.loader import load
from tests.support.engine_models import FAMILIES, Ticks, drain, greedy, greedy_answer
from tests.support.tensor_groups import grouped, saved

pytestmark = pytest.mark.slow


def test_tokens_are_those_of_the_whole_model_and_the_ranks_have_the_same(tmp_path: Path) -> None:
    """Some by rules that the leader alone knows, so that followers go on with its token, not with theirs."""
    plain = saved(tmp_path, FAMILIES["llama"]())
    (first,) = greedy_answer(plain, [3, 2, 1], 1)
    rules: dict[str, Any] = {"logit_bias": {first: -100.0}, "presence_penalty": 0.5, "logprobs": 1}
    alone = packed_engine(load(str(tmp_path)), EngineSettings(page_size=4, kv_tokens=64), Ticks())
    alone.submit(greedy("ruled", [3, 2, 1], 4, **rules))
    wanted = drain(alone)["ruled"].token_ids
    with grouped(tmp_path, fused=True, debug_poison=True, slots=2, kv_tokens=64) as group:
        runners = [group.engine.runner, *group.followed]
        group.engine.submit(greedy("one", [5, 6, 7, 8, 9], 4))
        group.engine.submit(greedy("ruled", [3, 2, 1], 4, **rules))
        got = drain(group.engine)
        group.engine.submit(greedy("echo", [3, 2, 1], 2, prompt_logprobs=True, logprobs=0))
        assert drain(group.engine)["echo"].token_ids == greedy_answer(plain, [3, 2, 1], 2)
    assert got["ruled"].token_ids == wanted
    assert got["one"].token_ids == greedy_answer(plain, [5, 6, 7, 8, 9], 4)
    assert torch.equal(*(each._device.table for each in runners))
