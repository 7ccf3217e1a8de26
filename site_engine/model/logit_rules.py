"""Change logits by the rules of requests: penalties, logit bias, grammars, minimum length.

Never waits for a device: numbers are copied to the device from pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from site_engine.core.request import Grammar, Guide, Request
from site_engine.model.host_copies import to_device

if TYPE_CHECKING:
    from site_engine.model.grammar_bitmask import GrammarBitmask

NEG_INF = float("-inf")


class Edits(NamedTuple):
    """Numbers to add to single logits of a row. Arrays, since they are copied to the device in each step."""

    tokens: np.ndarray[Any, np.dtype[np.int32]]  # token ids, without duplicates
    added: np.ndarray[Any, np.dtype[np.float32]]

    @classmethod
    def of(cls, biases: Mapping[int, float]) -> Edits:
        """Return the edits that add each token's bias to its logit."""
        count = len(biases)
        return cls(np.fromiter(biases, np.int32, count), np.fromiter(biases.values(), np.float32, count))


NO_EDITS = Edits.of({})


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a batch that have each kind of rule."""

    penalised: list[int]
    biased: dict[int, Edits]
    guided: list[int]  # rows that follow a grammar
    least: list[int]  # rows with a minimum length


class LogitRules:
    """Applies rules to batches of rows. Keeps only which rows of the last batch have rules."""

    def __init__(self, eos_token_ids: Iterable[int], device: torch.device) -> None:
        self._eos = tuple(eos_token_ids)
        self._device = device
        self._known: Sequence[Request] = []
        self._rows = _Rows([], {}, [], [])
        self.masks: GrammarBitmask | None = None  # created for the first request with a grammar

    def start(self, grammar: Grammar, slots: int, vocab_size: int) -> Guide:
        """Start at the grammar's beginning, even for a resumed request, whose tokens are then replayed."""
        if self.masks is None:
            from site_engine.model.grammar_bitmask import GrammarBitmask  # imported where grammars are used

            self.masks = GrammarBitmask(slots, vocab_size)
        return grammar.start()

    def apply(self, requests: Sequence[Request], logits: torch.Tensor) -> bool:
        """Change logits [rows, vocabulary] in place, one row per request; return whether any rule applied.

        Needs all tokens of the requests on the host.
        """
        rows = self._kinds(requests)
        if rows.penalised:
            self._penalise(rows.penalised, requests, logits)
        if rows.guided and self.masks is not None:
            self.masks.allow(requests, rows.guided, logits)
        edits = self.edits(
            requests, [len(request.tokens) for request in requests], [one.row for one in requests]
        )
        if edits:
            tokens, added = (np.concatenate(each) for each in zip(*edits.values(), strict=True))
            at = np.repeat(list(edits), [len(each.tokens) for each in edits.values()])
            where = self._sent(at, np.int64), self._sent(tokens, np.int64)
            logits.index_put_(where, self._sent(added, np.float32), accumulate=True)
        return bool(rows.penalised or rows.guided or edits)

    def allowed(
        self, requests: Sequence[Request], slots: Sequence[int]
    ) -> dict[int, np.ndarray[Any, np.dtype[np.int32]]]:
        """Return the bitmask of the allowed tokens by row, for rows that follow a grammar.

        `slots`: the requests' slots in the step that is sampled.
        """
        guided = self._kinds(requests).guided
        if not guided or self.masks is None:
            return {}
        lines = self.masks.allowed([requests[row] for row in guided], [slots[row] for row in guided])
        return dict(zip(guided, lines, strict=True))

    def edits(
        self, requests: Sequence[Request], ends: Sequence[int], slots: Sequence[int]
    ) -> dict[int, Edits]:
        """Return the edits of single logits by row.

        `ends`: the number of tokens of each request, prompt and response, before the token to sample. `slots`
        are as in `allowed`, which must have been called before.
        """
        rows = self._kinds(requests)
        found = dict(rows.biased)
        for row in rows.least:
            request = requests[row]
            if self._too_short(request, ends[row], slots[row]):
                forbidden = dict.fromkeys(self._ends(request), NEG_INF)
                found[row] = Edits.of({**request.sampling.logit_bias, **forbidden})
        return found

    def _kinds(self, requests: Sequence[Request]) -> _Rows:
        if requests != self._known:  # requests are equal when they are the same object
            self._rows, self._known = _rows(requests), list(requests)
        return self._rows

    def _penalise(self, rows: Sequence[int], requests: Sequence[Request], logits: torch.Tensor) -> None:
        """Apply penalties: repetition by prompt and response, frequency and presence by the response.

        A repeated token is written several times with the same number, so no set of unique tokens is needed.
        """
        for row in rows:
            request, one, its = requests[row], requests[row].sampling, logits[row]
            if one.repetition_penalty != 1.0:
                seen = self._sent(request.tokens[request.virtual_tokens :], np.int64)
                old = its[seen]
                its[seen] = torch.where(old > 0, old / one.repetition_penalty, old * one.repetition_penalty)
            output = self._sent(request.output, np.int64)
            if one.frequency_penalty:
                step = torch.full(output.shape, -one.frequency_penalty, dtype=its.dtype, device=its.device)
                its.index_add_(0, output, step)
            if one.presence_penalty:
                its[output] = its[output] - one.presence_penalty

    def _too_short(self, request: Request, end: int, slot: int) -> bool:
        """Return whether a row may not end yet; a row whose grammar allows only an end may."""
        if end - request.prompt_len >= request.sampling.min_tokens:
            return False
        ends = self._ends(request)
        return request.guide is None or self.masks is None or not self.masks.must_end(slot, ends)

    def _ends(self, request: Request) -> list[int]:
        eos = self._eos if request.variant is None else request.variant.eos_token_ids
        return [*eos, *request.sampling.stop_token_ids]

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
        or is_penalised(request)
    )


def is_penalised(request: Request) -> bool:
    one = request.sampling
    return bool(one.presence_penalty or one.frequency_penalty or one.repetition_penalty != 1.0)


def _rows(requests: Sequence[Request]) -> _Rows:
    rows = list(enumerate(requests))
    return _Rows(
        penalised=[row for row, request in rows if is_penalised(request)],
        biased={
            row: Edits.of(request.sampling.logit_bias) for row, request in rows if request.sampling.logit_bias
        },
        guided=[row for row, request in rows if request.guide is not None],
        least=[row for row, request in rows if request.sampling.min_tokens > 0],
    )
