"""Prepare the inputs of the sampling kernel: the rules of every slot and a random number per row.

Does not sample. A random number depends only on the request's seed and position, as in `sampler.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from site_engine.core.request import Request
from site_engine.model.logit_rules import has_rules
from site_engine.model.sampler import seed_of, uniforms

RULES = 5  # temperature, top_k, top_p, min_p, random number


class SlotRules:
    """The sampling rules of every slot, stored in arrays so that a step gathers them at once."""

    def __init__(self, slots: int) -> None:
        self._numbers = np.zeros((RULES - 1, slots), dtype=np.int32)
        self._seeds = np.zeros(slots, dtype=np.uint64)
        self._prompts = np.zeros(slots, dtype=np.int64)
        self._ruled: set[int] = set()

    def set(self, request: Request) -> None:
        """Store a request's rules in its slot. Called when its prompt is computed."""
        sampling, row = request.sampling, request.row
        (self._ruled.add if has_rules(request) else self._ruled.discard)(row)
        if sampling.greedy:
            self._numbers[0, row] = 0
            return
        floats = self._numbers.view(np.float32)
        floats[0, row], floats[2, row], floats[3, row] = sampling.temperature, sampling.top_p, sampling.min_p
        self._numbers[1, row] = sampling.top_k
        self._seeds[row], self._prompts[row] = seed_of(request), request.prompt_len

    def ruled(self, requests: Sequence[Request]) -> list[int]:
        """Return the rows whose logits are changed or ranked before sampling."""
        ruled = self._ruled
        return [row for row, request in enumerate(requests) if request.row in ruled] if ruled else []

    def fill(
        self,
        to: np.ndarray[Any, np.dtype[np.int32]],
        slots: np.ndarray[Any, np.dtype[np.int32]],
        ends: list[int],
    ) -> None:
        """Write the rules of `slots` to `to` [RULES, rows]. `ends` has each row's token count so far."""
        count = len(slots)
        to[:, count:] = 0
        to[:-1, :count] = self._numbers[:, slots]
        if to[0, :count].any():
            positions = (np.array(ends) - self._prompts[slots]).astype(np.uint64)
            numbers = uniforms(self._seeds[slots], positions) * 2.0**32
            to[-1, :count] = numbers.astype(np.uint32).view(np.int32)
