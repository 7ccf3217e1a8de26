"""Compute which tokens each row's grammar allows next, as bits."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher

from site_engine.core.request import Request, State
from site_engine.model.host_copies import to_device

WORD_BITS = 32
MAX_THREADS = 8
FEW = 8
"""Lines that the caller's thread computes itself, in 10 microseconds each; more are worth other threads."""


class GrammarBitmask:
    """One line of bits per row of the engine, kept between iterations."""

    def __init__(self, slots: int, vocab_size: int) -> None:
        words = -(-vocab_size // WORD_BITS)
        self._bits: np.ndarray[tuple[int, int], np.dtype[np.int32]] = np.zeros((slots, words), np.int32)
        self._vocab_size = vocab_size
        self._executor = LLExecutor(num_threads=min(MAX_THREADS, 1 + (os.cpu_count() or 1) // 4))

    def allowed(
        self, requests: Sequence[Request], slots: Sequence[int]
    ) -> list[np.ndarray[tuple[int], np.dtype[np.int32]]]:
        """Return the bits of the tokens that each request's grammar allows after its last token.

        They lie in the lines of `slots`; those of a request that has ended mean nothing.
        """
        self._fill(
            [
                (request.guide.matcher, slot)
                for request, slot in zip(requests, slots, strict=True)
                if request.guide is not None and request.state is not State.FINISHED
            ]
        )
        return [self._bits[slot] for slot in slots]

    def allow(self, requests: Sequence[Request], rows: Sequence[int], logits: torch.Tensor) -> None:
        """Set the logits [rows, vocabulary] of tokens that the rows' grammars forbid to -inf, in place."""
        guided = [requests[row] for row in rows]
        lines = [request.row for request in guided]
        self.allowed(guided, lines)
        if logits.device.type == "cpu":
            self._mask_on_host(lines, rows, logits)
        else:
            self._mask_on_device(lines, rows, logits)

    def must_end(self, slot: int, ends: Sequence[int]) -> bool:
        """Return whether the grammar of a slot allows only end tokens. Call `allow` or `allowed` first."""
        line = self._bits[slot].copy()
        for token_id in ends:
            line[token_id // WORD_BITS] &= np.int32(~np.uint32(1 << token_id % WORD_BITS).view(np.int32))
        return not line.any()

    def _fill(self, wanted: list[tuple[LLMatcher, int]]) -> None:
        lines, words = self._bits.shape
        first, line_bytes = self._bits.ctypes.data, self._bits.itemsize * words
        if len(wanted) > FEW:
            self._executor.unsafe_compute_mask_ptr(wanted, first, line_bytes, lines)
            return
        for matcher, slot in wanted:
            matcher.unsafe_compute_mask_ptr(first + line_bytes * slot, line_bytes)

    def _mask_on_host(self, lines: list[int], rows: Sequence[int], logits: torch.Tensor) -> None:
        numbers = logits.numpy()
        for line, row in zip(lines, rows, strict=True):
            allowed = np.unpackbits(
                self._bits[line].view(np.uint8), count=self._vocab_size, bitorder="little"
            )
            np.copyto(numbers[row], -np.inf, where=allowed == 0)

    def _mask_on_device(self, lines: list[int], rows: Sequence[int], logits: torch.Tensor) -> None:
        bits = to_device(self._bits[lines], logits.device)
        places = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
        allowed = ((bits[:, :, None] >> places) & 1).flatten(1)[:, : self._vocab_size].bool()
        at = to_device(np.array(rows), logits.device)
        logits[at] = logits[at].masked_fill(~allowed, float("-inf"))
