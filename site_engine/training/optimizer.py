"""AdamW over all factors of an adapter at once.

Factors, gradients and moments are each stored contiguously in one tensor, so that a step takes a few kernel
launches instead of several for each of hundreds of factors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch

from site_engine.core.loader_turns import pause

MAX_GRADIENT_NORM = 1.0
ALIGNED_NUMBERS = 64
"""Alignment of factors in numbers: kernels read whole cache lines."""
MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"


class Optimizer:
    """Move `factors` into one tensor and update them in place. Callers write gradients into `gradients`.

    All memory is allocated in the constructor, not while requests are served.
    """

    def __init__(self, factors: Sequence[torch.Tensor]) -> None:
        self._shapes = [each.shape for each in factors]
        sizes = (-(-each.numel() // ALIGNED_NUMBERS) * ALIGNED_NUMBERS for each in factors)
        *self._begins, end = accumulate(sizes, initial=0)
        values = factors[0].detach().new_zeros(end)
        for factor, place in zip(factors, self._parts(values), strict=True):
            pause()
            factor.data = place.copy_(factor.detach())
        values.grad = torch.zeros_like(values)
        self.gradients = list(self._parts(values.grad))
        fused = values.is_cuda
        self._values = values.requires_grad_()
        self._adam = torch.optim.AdamW([values], betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, fused=fused)
        self._state = self._adam.state[values]
        self._state[STEP] = torch.zeros((), device=values.device if fused else None)
        for moment in MOMENTS:
            self._state[moment] = torch.zeros_like(values)

    def _parts(self, of_all: torch.Tensor) -> Iterator[torch.Tensor]:
        for shape, begin in zip(self._shapes, self._begins, strict=True):
            yield of_all[begin : begin + shape.numel()].view(shape)

    def step(self, rate: float) -> bool:
        """Clip the gradients to MAX_GRADIENT_NORM and run a step. If their norm is not finite, skip the step
        and return False.
        """
        finite = bool(torch.isfinite(torch.nn.utils.clip_grad_norm_([self._values], MAX_GRADIENT_NORM)))
        if finite:
            (group,) = self._adam.param_groups
            group["lr"] = rate
            self._adam.step()
        return finite

    def copies(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return copies of the factors, moments and step count, keyed by the factors' names."""
        found = dict(zip(names, self._parts(self._values.detach().clone()), strict=True))
        for moment in MOMENTS:
            copied = self._parts(self._state[moment].clone())
            found |= {f"{moment}.{name}": each for name, each in zip(names, copied, strict=True)}
        return found | dict.fromkeys((f"{STEP}.{name}" for name in names), self._state[STEP].clone())

    def restore(self, names: Sequence[str], copies: Mapping[str, torch.Tensor]) -> None:
        """Restore the result of `copies`. Raises KeyError and RuntimeError for missing or unfit tensors."""
        parts = {"": self._values.detach(), **{f"{each}.": self._state[each] for each in MOMENTS}}
        for prefix, of_all in parts.items():
            for name, place in zip(names, self._parts(of_all), strict=True):
                pause()
                place.copy_(copies[prefix + name])
        self._state[STEP].copy_(copies[f"{STEP}.{names[0]}"])
