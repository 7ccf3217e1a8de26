"""Families with every peculiarity of attention are served exactly; `python -m bench.studies.families` tries
all."""

from __future__ import annotations

import pytest
import torch

from tests.support.model_families import Verdict, try_family

pytestmark = pytest.mark.slow
torch.set_num_threads(1)


@pytest.mark.parametrize(
    "model_type",
    [
        "gpt_neo",  # older than the attention interface, unscaled, local windows
        "gptj",
        "codegen",
        "qwen3",
        "gemma3_text",  # windows in some layers
        "gemma3",  # sees too
        "phi",  # part of a head rotates
        "opt",  # learned positions with an offset
        "gpt_neox",
        "olmo2",
        "mixtral",  # experts
        "gpt_oss",  # attention sinks
        "deepseek_v3",  # keys wider than values
    ],
)
def test_served_exactly(model_type: str) -> None:
    assert try_family(model_type) == Verdict("exact", "6 of 6")


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bert", "not causal"),
        ("mamba", "never calls"),
        ("bloom", "cannot be replaced"),
        ("falcon_mamba", "never calls"),
    ],
)
def test_refused_with_the_reason(model_type: str, reason: str) -> None:
    verdict = try_family(model_type)
    assert verdict.kind == "refused"
    assert reason in verdict.detail
