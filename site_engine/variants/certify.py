"""Certify a variant before it is served: rows of it beside rows of the base give what each gives alone.

Alone means the unmodified model of transformers, with its own attention, and the adapter unmerged. It shares
the base's tensors, so that it needs no memory, and runs beside the engine's steps.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import chain as joined
from typing import Any

import torch

from site_engine.errors import VariantRefused
from site_engine.model import certify
from site_engine.model.loader import LoadedModel
from site_engine.variants import grouped
from site_engine.variants.changes import LoadedVariant
from site_engine.variants.grouped import GroupedForward


def certify_variant(model: LoadedModel, variant: LoadedVariant) -> None:
    """Raise VariantRefused unless the variant's logits in a mixed batch are those that it has alone."""
    prompts = [prompt for prompt in certify.sample_prompts(model.vocab_size) for _ in range(2)]
    owners = [None, variant] * (len(prompts) // 2)
    plain, changed = alone(model.model), alone(model.model, variant)
    with torch.inference_mode():
        expected = [
            (plain if owner is None else changed)(
                input_ids=torch.tensor([ids], device=model.device), use_cache=False
            ).logits[0]
            for ids, owner in zip(prompts, owners, strict=True)
        ]
    if not all(bool(torch.isfinite(logits).all()) for logits in expected):
        raise VariantRefused(f"{variant.chain.id} gives logits that are not finite")
    off = certify.largest_difference(
        model.forward,
        model.layers,
        prompts,
        expected,
        variants=owners,
        use_variants=grouped.rows_of(model.device),
    )
    limit = certify.TOLERANCE.get(model.dtype, 0.0)
    if not off <= limit:
        raise VariantRefused(
            f"{variant.chain.id} computes other logits beside other rows than alone: they differ by "
            f"{off:.1e} of the largest (limit {limit:.0e})"
        )


def alone(model: Any, variant: LoadedVariant | None = None) -> Any:
    """Return a model of transformers that computes the variant, or the base, for one prompt at a time.

    It shares all tensors with `model`, whose attention calls the engine answers; its own attention is
    PyTorch's. Raises VariantRefused for a model that has no other attention.
    """
    if not model._can_set_attn_implementation():
        raise VariantRefused(f"{type(model).__name__} takes no variants: its attention cannot be put back")
    tensors: Sequence[Any] = list(joined(model.parameters(), model.buffers()))
    made = copy.deepcopy(model, {id(each): each for each in tensors})
    for name, module in made.named_modules():
        if isinstance(module.__dict__.get("forward"), GroupedForward):
            del module.__dict__["forward"]
        change = None if variant is None else variant.changes.get(name)
        if change is None:
            continue
        if change.own is not None:
            module.__dict__.pop("forward", None)
            module._parameters = change.own._parameters
        if change.bias is not None:
            module.register_forward_hook(lambda _, __, out, added=change.bias: out + added)
        if change.low_rank is not None:
            module.register_forward_hook(
                lambda _, given, out, product=change.low_rank: out + product(given[0])
            )
    made.set_attn_implementation("eager")
    return made
