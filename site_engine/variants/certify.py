"""Certify a variant before it is served: rows of it beside rows of the base give what each gives alone.

Alone means the unmodified model of transformers, with its own attention, and the adapter unmerged. It shares
the base's tensors, so that it needs no memory, and runs beside the engine's steps. It is copied once: to copy
modules is long work in Python, for which the engine's thread waits.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import chain as joined
from math import isfinite
from typing import Any

import numpy as np
import torch
import transformers

from site_engine.core.loader_turns import pause, released
from site_engine.errors import VariantRefused
from site_engine.model import certify
from site_engine.model.host_copies import to_device
from site_engine.model.loader import LoadedModel
from site_engine.variants import grouped
from site_engine.variants.changes import LoadedVariant
from site_engine.variants.grouped import GroupedForward

TIMES_ROUNDING = 2.0
"""Logits may differ by so many times as rounding otherwise moves those that the variant has alone."""


class Certifier:
    """Certifies variants of one base, for one thread at a time."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._prompts = certify.sample_prompts(model.vocab_size)

    @cached_property
    def _alone(self) -> Any:
        return plain_model(self._model.model)

    @cached_property
    def _base_logits(self) -> list[torch.Tensor]:
        return self._logits_alone()

    def ready(self) -> None:
        """Do what is needed once. Raises VariantRefused for a base that takes no variants."""
        assert self._base_logits

    def limit(self, variant: LoadedVariant, off: float) -> float:
        """Return by how much of the largest the logits of an engine may differ, where they differ by `off`.

        A fixed limit would refuse variants by chance: rounding moves the logits of a deep model in bfloat16
        by more than that, and how far depends on the variant. That is measured where the fixed one is passed.
        """
        tolerance = certify.limit(self._model.dtype, len(self._model.layers))
        if off <= tolerance:
            return tolerance
        rounded = self._logits_alone(variant, rounded=True)
        moved = relative(rounded, self._logits_alone(variant))
        return max(tolerance, TIMES_ROUNDING * moved) if isfinite(moved) else tolerance

    def certify(self, variant: LoadedVariant) -> None:
        """Raise VariantRefused unless the variant's logits in a mixed batch are those that it has alone."""
        self.ready()
        changed, model = self._logits_alone(variant), self._model
        with released():
            finite = all(bool(torch.isfinite(logits).all()) for logits in changed)
        if not finite:
            raise VariantRefused(f"{variant.chain.id} gives logits that are not finite")
        off = certify.largest_difference(
            model.forward,
            model.layers,
            [prompt for prompt in self._prompts for _ in range(2)],
            [logits for pair in zip(self._base_logits, changed, strict=True) for logits in pair],
            variants=[None, variant] * len(self._prompts),
            use_variants=grouped.rows_of(model.device),
        )
        if not off <= (limit := self.limit(variant, off)):
            raise VariantRefused(
                f"{variant.chain.id} computes other logits beside other rows than alone: they differ by "
                f"{off:.1e} of the largest (limit {limit:.1e})"
            )

    def _logits_alone(
        self, variant: LoadedVariant | None = None, *, rounded: bool = False
    ) -> list[torch.Tensor]:
        """Return logits [tokens, vocabulary] of each prompt. `rounded`: modules round outputs otherwise."""
        model, device = self._alone, self._model.device
        with ExitStack() as undo, torch.inference_mode():
            if variant is not None:
                change_modules(model, variant, undo)
            if rounded:
                round_otherwise(model, undo)
            return [
                model(
                    to_device(np.array([ids]), device), past_key_values=past(variant), use_cache=False
                ).logits[0]
                for ids in self._prompts
            ]


def past(variant: LoadedVariant | None) -> Any:
    """Return the virtual tokens of a variant as the cache of transformers has them, None without."""
    if variant is None or not variant.virtual:
        return None
    cache, layers = transformers.DynamicCache(), len(variant.virtual) // 2
    for layer, (key, value) in enumerate(
        zip(variant.virtual[:layers], variant.virtual[layers:], strict=True)
    ):
        cache.update(key.transpose(0, 1)[None], value.transpose(0, 1)[None], layer)
    return cache


def relative(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest difference of logits, relative to the largest logit of the prompt."""
    with released():
        return max(
            float((some.float() - other.float()).abs().max() / other.abs().max().clamp(min=1.0))
            for some, other in zip(found, expected, strict=True)
        )


def round_otherwise(model: Any, undo: ExitStack) -> None:
    """Let every module's output be off by up to half of its last bit, at random, until `undo` is closed."""
    draw = torch.Generator(model.device).manual_seed(0)

    def off_by_rounding(_: Any, __: Any, out: Any) -> Any:
        if not isinstance(out, torch.Tensor) or not out.is_floating_point():
            return out
        half = torch.finfo(out.dtype).eps / 2
        off = torch.empty_like(out, dtype=torch.float32).uniform_(-half, half, generator=draw)
        return (out * (1 + off)).to(out.dtype)

    for module in model.modules():
        if not any(module.children()):
            undo.callback(module.register_forward_hook(off_by_rounding).remove)


def plain_model(model: Any, variant: LoadedVariant | None = None) -> Any:
    """Return a model of transformers that computes the variant, or the base, for one prompt at a time.

    It shares all tensors with `model`, whose attention calls the engine answers; its own attention is
    PyTorch's. Raises VariantRefused for a model that has no other attention.
    """
    if not model._can_set_attn_implementation():
        raise VariantRefused(f"{type(model).__name__} takes no variants: its attention cannot be put back")
    tensors: Sequence[Any] = list(joined(model.parameters(), model.buffers()))
    copied: dict[int, Any] = {id(each): each for each in tensors}
    for layers in (each for each in model.modules() if isinstance(each, torch.nn.ModuleList)):
        for layer in layers:
            copy.deepcopy(layer, copied)
            pause()
    made = copy.deepcopy(model, copied)
    for module in made.modules():
        if isinstance(module.__dict__.get("forward"), GroupedForward):
            del module.__dict__["forward"]
    if variant is not None:
        change_modules(made, variant, ExitStack())
    made.set_attn_implementation("eager")
    return made


def change_modules(model: Any, variant: LoadedVariant, undo: ExitStack) -> None:
    """Let a model compute a variant of it until `undo` is closed."""
    for name, change in variant.changes.items():
        module = model.get_submodule(name)
        if change.own is not None:
            kept = {
                each: module.__dict__[each] for each in ("forward", "_parameters") if each in module.__dict__
            }
            undo.callback(module.__dict__.update, kept)
            module.__dict__.pop("forward", None)
            module._parameters = change.own._parameters
        if change.bias is not None:
            hook = module.register_forward_hook(
                lambda _, __, out, added=change.bias: out + added.to(out.device)
            )
            undo.callback(hook.remove)
        if change.low_rank is not None:
            hook = module.register_forward_hook(
                lambda _, given, out, product=change.low_rank: out + product(given[0])
            )
            undo.callback(hook.remove)
        undo.callback(pause)
        pause()
