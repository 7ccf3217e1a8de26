"""Change logits by the rules of requests: penalties, logit bias, grammars, minimum length.

Never waits for a device: numbers go to it from pinned memory, and a token that only the device knows yet is
taken from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from site_engine.core.request import Request

if TYPE_CHECKING:
    from site_engine.core.scheduler import SchedulePlan
    from site_engine.model.grammar_bitmask import GrammarBitmask

NEG_INF = float("-inf")


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a batch that have each kind of rule."""

    penalised: list[int]
    biased: list[tuple[int, int, float]]  # row, token, number
    guided: list[int]  # that follow a grammar
    least: list[int]  # with a minimum length


class LogitRules:
    """Applies rules to batches of rows; keeps only which rows of the last batch have any."""

    def __init__(self, eos_token_ids: Iterable[int], device: torch.device) -> None:
        self._eos = tuple(eos_token_ids)
        self._device = device
        self._known: Sequence[Request] = []
        self._rows = _Rows([], [], [], [])
        self.masks: GrammarBitmask | None = None  # created for the first request with a grammar

    def begin(self, plan: SchedulePlan) -> None:
        """Start computing, on a thread, which tokens grammars allow after this plan."""
        if self.masks is not None:
            self.masks.begin(chunk.request for chunk in plan.chunks if chunk.samples)

    def apply(
        self,
        requests: Sequence[Request],
        logits: torch.Tensor,
        ends: Sequence[int] | None = None,
        newest: torch.Tensor | None = None,
    ) -> bool:
        """Change logits [rows, vocabulary] in place, one row per request; return whether any rule applied.

        `ends` has the tokens of each request, prompt and response, before the one to sample; without it they
        are those that the request has. Of a request that has one token less, the last is the row's of
        `newest`, on the device; grammars need all tokens on the host.
        """
        if requests != self._known:  # requests are equal when they are the same object
            self._rows, self._known = _rows(requests), list(requests)
        rows = self._rows
        if rows.penalised:
            self._penalise(rows.penalised, requests, logits, ends, newest)
        if rows.biased:
            at, tokens, numbers = zip(*rows.biased, strict=True)
            where = self._sent(at, np.int64), self._sent(tokens, np.int64)
            logits.index_put_(where, self._sent(numbers, np.float32), accumulate=True)
        if rows.guided and self.masks is not None:
            self.masks.allow(requests, rows.guided, logits)
        short = [row for row in rows.least if self._too_short(requests[row], ends[row] if ends else None)]
        if short:
            self._forbid_ends(short, requests, logits)
        return bool(rows.penalised or rows.biased or rows.guided or short)

    def _penalise(
        self,
        rows: Sequence[int],
        requests: Sequence[Request],
        logits: torch.Tensor,
        ends: Sequence[int] | None,
        newest: torch.Tensor | None,
    ) -> None:
        """Apply penalties: repetition by prompt and response, frequency and presence by the response.

        A repeated token is written several times with the same number, so no set of unique tokens is needed.
        """
        repeated: list[tuple[int, list[int], float]] = []
        frequent: list[tuple[int, list[int], float]] = []
        present: list[tuple[int, list[int], float]] = []
        for row in rows:
            request, one = requests[row], requests[row].sampling
            unknown = ends is not None and ends[row] > len(request.tokens)
            tokens = [*request.tokens, -1] if unknown else request.tokens
            if one.repetition_penalty != 1.0:
                repeated.append((row, tokens, one.repetition_penalty))
            output = tokens[request.prompt_len :]
            if one.frequency_penalty:
                frequent.append((row, output, one.frequency_penalty))
            if one.presence_penalty:
                present.append((row, output, one.presence_penalty))
        if repeated:
            where, by = self._elements(repeated, newest)
            old = logits[where]
            logits[where] = torch.where(old > 0, old / by, old * by)
        if frequent:
            where, by = self._elements(frequent, newest)
            logits.index_put_(where, -by, accumulate=True)
        if present:
            where, by = self._elements(present, newest)
            logits[where] = logits[where] - by

    def _elements(
        self, parts: list[tuple[int, list[int], float]], newest: torch.Tensor | None
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return the places (rows, tokens) of the tokens of some rows, and the number of each place's row."""
        lengths = [len(tokens) for _, tokens, _ in parts]
        rows = self._sent(np.repeat([row for row, _, _ in parts], lengths), np.int64)
        tokens = self._sent(np.concatenate([np.array(own, dtype=np.int64) for _, own, _ in parts]), np.int64)
        numbers = self._sent(np.repeat([number for _, _, number in parts], lengths), np.float32)
        if newest is not None:
            tokens = torch.where(tokens < 0, newest[rows], tokens)
        return (rows, tokens), numbers

    def _too_short(self, request: Request, end: int | None) -> bool:
        """Return whether a row may not end yet; a row whose grammar allows only an end may."""
        generated = request.generated if end is None else end - request.prompt_len
        if generated >= request.sampling.min_tokens:
            return False
        ends = self._ends(request)
        return request.guide is None or self.masks is None or not self.masks.must_end(request, ends)

    def _forbid_ends(self, rows: Sequence[int], requests: Sequence[Request], logits: torch.Tensor) -> None:
        pairs = [(row, token_id) for row in rows for token_id in self._ends(requests[row])]
        if pairs:
            at, tokens = zip(*pairs, strict=True)
            logits[self._sent(at, np.int64), self._sent(tokens, np.int64)] = NEG_INF

    def _ends(self, request: Request) -> list[int]:
        return [*self._eos, *request.sampling.stop_token_ids]

    def _sent(self, numbers: Any, dtype: type) -> torch.Tensor:
        return to_device(np.array(numbers, dtype=dtype), self._device)


def has_rules(request: Request) -> bool:
    """Return whether a request needs more than the best or a drawn token of unchanged logits."""
    one = request.sampling
    return (
        request.grammar is not None
        or bool(one.logit_bias)
        or one.min_tokens > 0
        or one.logprobs is not None
        or _penalised(request)
    )


def to_device(numbers: np.ndarray[Any, np.dtype[Any]], device: torch.device) -> torch.Tensor:
    """Queue a copy of an array to a device; neither the host nor its other cores wait.

    The copy to pinned memory is numpy's: torch would wake a thread on every core for it.
    """
    if device.type == "cpu":
        return torch.from_numpy(numbers)
    pinned = torch.from_numpy(numbers[:0]).new_empty(numbers.shape, pin_memory=True)
    np.copyto(pinned.numpy(), numbers)
    return pinned.to(device, non_blocking=True)


def _penalised(request: Request) -> bool:
    one = request.sampling
    return bool(one.presence_penalty or one.frequency_penalty or one.repetition_penalty != 1.0)


def _rows(requests: Sequence[Request]) -> _Rows:
    rows = list(enumerate(requests))
    return _Rows(
        penalised=[row for row, request in rows if _penalised(request)],
        biased=[
            (row, token, bias) for row, request in rows for token, bias in request.sampling.logit_bias.items()
        ],
        guided=[row for row, request in rows if request.guide is not None],
        least=[row for row, request in rows if request.sampling.min_tokens > 0],
    )
