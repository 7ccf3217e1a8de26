"""What the device must know to draw tokens: every slot's rules, and each row's own random number.

Does not draw: the kernel does. Numbers depend on a request's seed and place alone, as in `sampler.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from site_engine.core.request import Request
from site_engine.model.sampler import seed_of, uniforms

RULES = 5  # temperature, top_k, top_p, min_p, number


class SlotRules:
    """The settings of whoever holds a slot, kept so that a step gathers and does not ask each request."""

    def __init__(self, slots: int) -> None:
        self._numbers = np.zeros((RULES - 1, slots), dtype=np.int32)
        self._seeds = np.zeros(slots, dtype=np.uint64)
        self._prompts = np.zeros(slots, dtype=np.int64)

    def set(self, request: Request) -> None:
        """Called when a request's prompt is computed: it has a slot now."""
        sampling, row = request.sampling, request.row
        if sampling.greedy:
            self._numbers[0, row] = 0
            return
        floats = self._numbers.view(np.float32)
        floats[0, row], floats[2, row], floats[3, row] = sampling.temperature, sampling.top_p, sampling.min_p
        self._numbers[1, row] = sampling.top_k
        self._seeds[row], self._prompts[row] = seed_of(request), request.prompt_len

    def fill(
        self,
        to: np.ndarray[Any, np.dtype[np.int32]],
        slots: np.ndarray[Any, np.dtype[np.int32]],
        ends: list[int],
    ) -> None:
        """to [RULES, rows]: of the rows that hold these slots, whose next tokens will be their `ends`-th."""
        count = len(slots)
        to[:, count:] = 0
        to[:-1, :count] = self._numbers[:, slots]
        if to[0, :count].any():
            places = (np.array(ends) - self._prompts[slots]).astype(np.uint64)
            numbers = uniforms(self._seeds[slots], places) * 2.0**32
            to[-1, :count] = numbers.astype(np.uint32).view(np.int32)
