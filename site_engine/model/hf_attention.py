"""Answer a transformers model's attention calls from the current attention context.

The model itself is unmodified. Attention is registered under a name of its own through AttentionInterface;
families older than that interface get their `_attn` methods replaced.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface

from site_engine.errors import ModelNotSupported
from site_engine.model import attention_context, attention_op
from site_engine.model.kv_cache import LayerShape

ATTENTION = "mico"  # unknown to the mask registry, so that no [tokens, tokens] mask is ever built
LEGACY = ("GPTNeoForCausalLM", "GPTJForCausalLM", "CodeGenForCausalLM")


def _attention(  # noqa: PLR0917 - transformers' own signature
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """Map query, key, value [1, heads, tokens, dim] to [1, tokens, heads, value dim]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.compiler.is_compiling():
        return attention_op.attend(query, key, value, scale, sliding_window, softcap, s_aux), None
    running = attention_context.current()
    if isinstance(running, _Probe):
        running.inspect(module, attention_mask, other)
    scoring = attention_context.Scoring(scale, sliding_window, softcap, s_aux)
    out = running.attend(query[0], key[0], value[0], scoring)
    return out[None], None


def install_hook(model: Any) -> None:
    """Route every attention call of `model` to the current context. Raises ModelNotSupported."""
    AttentionInterface.register(ATTENTION, _attention)
    if model._can_set_attn_implementation():
        model.set_attn_implementation(ATTENTION)
    elif type(model).__name__ in LEGACY:
        for module in model.modules():
            if hasattr(module, "_attn"):
                module._attn = partial(_legacy_attention, module)
        model.config._attn_implementation_internal = ATTENTION  # so that no mask is built
    else:
        raise ModelNotSupported("its attention cannot be replaced")


def _legacy_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, None]:
    """Stand in for `_attn` of GPT-Neo, GPT-J and CodeGen; return [1, heads, tokens, dim].

    GPT-Neo does not scale, and its local layers have a window.
    """
    scale = 1.0 / float(getattr(module, "scale_attn", 1.0))
    local = getattr(module, "attention_type", "global") == "local"
    window = module.config.window_size if local else None
    query, key = query.to(value.dtype), key.to(value.dtype)
    out, _none = _attention(module, query, key, value, None, scaling=scale, sliding_window=window)
    return out.transpose(1, 2), None


class _Probe:
    """An attention context that records the shape of every call and refuses unsupported arguments."""

    HARMLESS = frozenset({"position_ids", "cache_position", "position_embeddings", "input_ids"})

    def __init__(self) -> None:
        self.layers: list[LayerShape] = []

    def inspect(self, module: torch.nn.Module, mask: torch.Tensor | None, other: dict[str, Any]) -> None:
        tensors = [name for name, thing in other.items() if isinstance(thing, torch.Tensor)]
        unknown = sorted(set(tensors) - self.HARMLESS)
        if unknown:
            raise ModelNotSupported(
                f"its attention takes {', '.join(unknown)}, which this engine does not know"
            )
        if mask is not None:
            raise ModelNotSupported("it builds its own attention mask")
        if not other.get("is_causal", True) or not getattr(module, "is_causal", True):
            raise ModelNotSupported("its attention is not causal")

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: attention_context.Scoring
    ) -> torch.Tensor:
        self.layers.append(LayerShape(key.shape[0], key.shape[2], value.shape[2]))
        return value.new_zeros(query.shape[1], query.shape[0], value.shape[2])


def probe_layers(model: Any) -> tuple[LayerShape, ...]:
    """Run three tokens and return the KV shape of each attention call. Raises ModelNotSupported."""
    probe = _Probe()
    device = next(model.parameters()).device
    ids = torch.zeros(1, 3, dtype=torch.long, device=device)
    with torch.inference_mode(), attention_context.use(probe):
        model(input_ids=ids, position_ids=torch.arange(3, device=device)[None], use_cache=False)
    if not probe.layers:
        raise ModelNotSupported("it never calls the attention interface")
    return tuple(probe.layers)
