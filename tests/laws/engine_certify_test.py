"""Certification of variants: what computes right is never refused for rounding, what does not always is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from site_engine.errors import VariantRefused
from site_engine.model import certify
from site_engine.model.loader import LoadedModel, from_model
from site_engine.variants.certify import Certifier
from site_engine.variants.store import VariantStore
from tests.support.engine_models import VOCAB
from tests.support.variants import lora, served


def deep(spread: float, dtype: torch.dtype = torch.bfloat16) -> tuple[LoadedModel, Any]:
    """Return a deep model, whose logits in bfloat16 move far by rounding alone."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=192,
        initializer_range=spread,
    )
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    plain = plain.eval().requires_grad_(False)
    return from_model(plain, eos_token_ids=()), plain


def test_rounding_refuses_no_adapter(tmp_path: Path) -> None:
    model, _ = deep(0.3)
    store = VariantStore(model)
    for seed in range(6):
        made = lora(tmp_path / str(seed), model.model, rank=16, seed=seed)
        store.load(made.variant)()
    assert len(store.served) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_that_is_not_computed_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """No module was told of the adapter's rows."""
    model, plain = deep(0.1, dtype)
    made = lora(tmp_path / "shop", plain, rank=4, seed=1)
    store = VariantStore(model)
    with pytest.raises(VariantRefused, match="computes other logits beside other rows than alone"):
        Certifier(model).certify(store._load(made.variant))


def test_the_base_is_copied_once_however_many_variants_come(tmp_path: Path) -> None:
    """A copy takes long in Python, for which the thread of the engine waits."""
    model, plain = served()
    store = VariantStore(model)
    store.load(lora(tmp_path / "first", plain, seed=1).variant)()
    second = lora(tmp_path / "second", plain, seed=2).variant
    called = set()
    sys.setprofile(lambda frame, event, _: called.add(frame.f_code.co_name) if event == "call" else None)
    try:
        store.load(second)()
    finally:
        sys.setprofile(None)
    assert "certify" in called or "certify_variant" in called
    assert "deepcopy" not in called


def test_deep_models_may_be_off_by_the_roundings_of_more_layers() -> None:
    assert certify.limit(torch.bfloat16, 2) == certify.limit(torch.bfloat16, 32) == 0.1
    assert certify.limit(torch.bfloat16, 128) == pytest.approx(0.2)
    assert certify.limit(torch.int8, 128) == 0.0
