"""Compute which tokens each row's grammar allows next, as bits, on a thread beside the model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher

from site_engine.core.request import Request
from site_engine.model.logit_rules import to_device

WORD_BITS = 32
MAX_THREADS = 8


class GrammarBitmask:
    """One line of bits per row of the engine, kept between iterations."""

    def __init__(self, slots: int, vocab_size: int) -> None:
        words = -(-vocab_size // WORD_BITS)
        self._bits: np.ndarray[tuple[int, int], np.dtype[np.int32]] = np.zeros((slots, words), np.int32)
        self._vocab_size = vocab_size
        self._executor = LLExecutor(num_threads=min(MAX_THREADS, 1 + (os.cpu_count() or 1) // 4))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._coming: Future[None] | None = None

    def begin(self, requests: Iterable[Request]) -> None:
        """Start computing the lines of the requests that follow a grammar, for the token after their last.

        Those that have ended or given up their slot have none.
        """
        wanted = [
            (request.guide.matcher, request.row)
            for request in requests
            if request.guide is not None and request.row >= 0
        ]
        self._coming = self._thread.submit(self._fill, wanted) if wanted else None

    def allowed(self, slots: Sequence[int]) -> list[np.ndarray[tuple[int], np.dtype[np.int32]]]:
        """Return the lines of bits of slots, which hold until `begin` is called again."""
        self._wait()
        return [self._bits[slot] for slot in slots]

    def allow(self, requests: Sequence[Request], rows: Sequence[int], logits: torch.Tensor) -> None:
        """Set the logits [rows, vocabulary] of tokens that the rows' grammars forbid to -inf, in place."""
        self._wait()
        lines = [requests[row].row for row in rows]
        if logits.device.type == "cpu":
            self._mask_on_host(lines, rows, logits)
        else:
            self._mask_on_device(lines, rows, logits)

    def _wait(self) -> None:
        if self._coming is not None:
            self._coming.result()

    def must_end(self, slot: int, ends: Sequence[int]) -> bool:
        """Return whether the grammar of a slot allows only end tokens. Call `allow` or `allowed` first."""
        line = self._bits[slot].copy()
        for token_id in ends:
            line[token_id // WORD_BITS] &= np.int32(~np.uint32(1 << token_id % WORD_BITS).view(np.int32))
        return not line.any()

    def _fill(self, wanted: list[tuple[LLMatcher, int]]) -> None:
        slots, words = self._bits.shape
        self._executor.unsafe_compute_mask_ptr(wanted, self._bits.ctypes.data, 4 * words, slots)

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
