"""AdamW over all factors of an adapter at once.

Factors, gradients and moments each lie side by side in one tensor: a step is a few launches, not several for
each of hundreds of factors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch

from site_engine.core.loader_turns import pause

MAX_GRADIENT_NORM = 1.0
ALIGNED_NUMBERS = 64
"""Kernels read factors by whole lines of memory."""
MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"


class Optimizer:
    """Moves `factors` into one tensor and updates them there; `gradients` are where their callers put those.

    All is allocated now, and not beside answers.
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
        """Make a step, of gradients no longer than MAX_GRADIENT_NORM; leave it out and return False if one is
        not finite.
        """
        finite = bool(torch.isfinite(torch.nn.utils.clip_grad_norm_([self._values], MAX_GRADIENT_NORM)))
        if finite:
            (group,) = self._adam.param_groups
            group["lr"] = rate
            self._adam.step()
        return finite

    def copies(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return copies of factors, moments and the number of steps, by the names of the factors."""
        found = dict(zip(names, self._parts(self._values.detach().clone()), strict=True))
        for moment in MOMENTS:
            copied = self._parts(self._state[moment].clone())
            found |= {f"{moment}.{name}": each for name, each in zip(names, copied, strict=True)}
        return found | dict.fromkeys((f"{STEP}.{name}" for name in names), self._state[STEP].clone())

    def restore(self, names: Sequence[str], copies: Mapping[str, torch.Tensor]) -> None:
        """Take what `copies` returned. Raises KeyError and RuntimeError for what is no such thing."""
        parts = {"": self._values.detach(), **{f"{each}.": self._state[each] for each in MOMENTS}}
        for prefix, of_all in parts.items():
            for name, place in zip(names, self._parts(of_all), strict=True):
                pause()
                place.copy_(copies[prefix + name])
        self._state[STEP].copy_(copies[f"{STEP}.{names[0]}"])
