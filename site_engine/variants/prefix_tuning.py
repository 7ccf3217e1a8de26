"""Read prefix tuning as peft writes it: keys and values of virtual tokens, which come before every prompt.

peft saves them as attention reads them, whatever network made them in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from site_engine.errors import VariantRefused
from site_engine.model.kv_cache import LayerShape
from site_engine.variants.projections import EMBEDDINGS, MAX_VIRTUAL_TOKENS

UNDERSTOOD = frozenset(
    (
        "auto_mapping",
        "base_model_name_or_path",
        "encoder_hidden_size",
        "inference_mode",
        "init_weights",
        "num_attention_heads",
        "num_layers",
        "num_transformer_submodules",
        "num_virtual_tokens",
        "peft_type",
        "peft_version",
        "prefix_projection",
        "revision",
        "task_type",
        "token_dim",
    )
)
"""Settings that say what the shapes say, or how training was done."""


def virtual_keys_values(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    settings: Mapping[str, Any],
    layers: Sequence[LayerShape],
) -> tuple[torch.Tensor, ...]:
    """Return the keys of all layers, then the values, each [tokens, kv_heads, dim]. Raises VariantRefused."""
    if list(tensors) != [EMBEDDINGS]:
        raise VariantRefused(f"{folder} holds {', '.join(tensors) or 'nothing'}, not {EMBEDDINGS} alone")
    found, shape = tensors[EMBEDDINGS], layers[0]
    if set(layers) != {shape} or shape.key_dim != shape.value_dim:
        raise VariantRefused(f"{folder}: prefix tuning is not served where layers differ in keys and values")
    sizes = 2 * len(layers), shape.kv_heads, shape.key_dim
    width = sizes[0] * sizes[1] * sizes[2]
    if found.dim() != 2 or found.shape[1] != width:
        raise VariantRefused(
            f"wrong base: {EMBEDDINGS} is {tuple(found.shape)}, and a token has {width} numbers in the base"
        )
    if settings.get("num_attention_heads") != shape.kv_heads:
        heads = settings.get("num_attention_heads")
        raise VariantRefused(f"wrong base: keys of {heads} heads, and of {shape.kv_heads} in the base")
    count = found.shape[0]
    if count != settings.get("num_virtual_tokens") or not 0 < count <= MAX_VIRTUAL_TOKENS:
        said = settings.get("num_virtual_tokens")
        raise VariantRefused(
            f"{folder} has {count} virtual tokens and says {said}; both must agree, at most "
            f"{MAX_VIRTUAL_TOKENS}"
        )
    parts = found.view(count, *sizes)
    return tuple(each.contiguous() for kind in (0, 1) for each in parts[:, kind::2].unbind(1))
