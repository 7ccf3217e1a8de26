"""Sample rows with rules and rank tokens, in CUDA graphs that serve the rows of any step.

Launching these kernels one by one would take the host longer than a step of a small model takes the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton

from site_engine.core.request import MAX_LOGPROBS
from site_engine.cuda.batch_layout import Numbers
from site_engine.cuda.host_buffers import StepBuffers
from site_engine.cuda.kernels import logprob_kernels, rule_kernels
from site_engine.cuda.sampling import RULES
from site_engine.cuda.sampling_launch import sample
from site_engine.model.logit_rules import NO_EDITS, Edits

ROWS = (4, 16, 64)
"""Rows per graph. More rows take several replays."""
MAX_EDITS = 4096
"""Maximum edits of a group of several rows. A row that is alone may have one per token of the vocabulary."""
EDIT_BLOCK, EDIT_PROGRAMS = 128, 8
SPAN = 2048
WORD_BITS = 32
IN_PROMPT = 1 << 14
"""The bit of a token's count that marks tokens of the prompt."""
PENALISED, COUNTING, MASKED = 1, 2, 4
"""The flags of a row."""
HEAD = 12
"""Size of the header in int32 numbers. Its fields have 64 bits: the addresses of a step's tensors, the number
of edits and the number of best tokens to rank.
"""
OF_ROWS = 6
"""Numbers per row before its RULES: sampled row, slot, flags, three penalties."""
OF_EDIT = 3
"""Numbers per edit: row of the graph, token, value added to its logit."""


class RuledRow(NamedTuple):
    """A sampled row of a step with its rules."""

    place: int  # index among the rows with rules
    row: int
    slot: int
    penalties: tuple[float, float, float] | None  # presence, frequency, repetition
    counting: bool  # whether the counts of the slot lack the last token
    allowed: Numbers | None  # [vocabulary / 32]: bits of the tokens that a grammar allows
    edits: Edits


class StepAddresses(NamedTuple):
    """The device addresses of the tensors of a launched step."""

    logits: int  # [samples, vocabulary]
    chosen: int  # [samples], int32
    ids: int  # [tokens], int64
    wanted: int  # [samples], int64: indices into `ids`


class RuleGraphs:
    """The buffers and graphs, and the token counts by slot, `counts` [slots + 1, vocabulary]."""

    def __init__(self, newest: torch.Tensor, logits: torch.Tensor) -> None:
        """Compile the kernels and capture the graphs of all sizes. `newest` [slots + 1] has the last token of
        each slot, which sampling overwrites. `logits` [any, vocabulary] is an example of a step's logits.
        """
        where, vocabulary = logits.device, logits.shape[1]
        self._newest = newest
        self.counts = torch.zeros(len(newest), vocabulary, dtype=torch.int16, device=where)
        usual = HEAD + (OF_ROWS + RULES) * ROWS[-1] + OF_EDIT * MAX_EDITS
        most = usual + OF_EDIT * max(0, vocabulary - MAX_EDITS)
        self._numbers = torch.zeros(most, dtype=torch.int32, device=where)
        self._allowed = torch.zeros(ROWS[-1], -(-vocabulary // WORD_BITS), dtype=torch.int32, device=where)
        self._changed = torch.zeros(ROWS[-1], vocabulary, dtype=torch.float32, device=where)
        self._chosen = torch.zeros(ROWS[-1], dtype=torch.int32, device=where)
        self._like = logits.new_zeros(1)
        best, spans = min(MAX_LOGPROBS, vocabulary), triton.cdiv(vocabulary, SPAN)
        self._largest = torch.zeros(ROWS[-1], best, spans, dtype=torch.float32, device=where)
        self._tokens = torch.zeros(ROWS[-1], best, spans, dtype=torch.int32, device=where)
        self._sums = torch.zeros(ROWS[-1], 2, spans, dtype=torch.float32, device=where)
        self._ranking = torch.zeros(ROWS[-1], 2, 1 + best, dtype=torch.float64, device=where)
        pinned = where.type == "cuda"
        self._host_numbers = StepBuffers(usual, torch.int32, pinned=pinned)
        self._host_allowed = StepBuffers(self._allowed.numel(), torch.int32, pinned=pinned)
        self._host_ranking = StepBuffers(self._ranking.numel(), torch.float64, pinned=pinned)
        self._graphs: dict[tuple[Callable[[int], None], int], torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle() if where.type == "cuda" else None
        for rows in ROWS:
            self._copy(StepAddresses(0, 0, 0, 0), rows)
            for kernels in (self._sample, self._rank):
                kernels(rows)  # compile before capturing
                if where.type == "cuda":
                    graph = self._graphs[kernels, rows] = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
                        kernels(rows)

    def begin(self) -> None:
        """Begin a step. The device must have finished the previous step."""
        for each in (self._host_numbers, self._host_allowed, self._host_ranking):
            each.begin()

    def sample(self, step: StepAddresses, ruled: Sequence[RuledRow], draws: Numbers) -> None:
        """Queue kernels that replace the tokens of some sampled rows.

        `draws` [RULES, places] has the sampling parameters of each row, as in `SlotRules`. Rows with
        non-finite logits keep their negative token.
        """
        for group in _groups(sorted(ruled, key=lambda each: each.allowed is None)):
            rows = next(size for size in ROWS if size >= len(group))
            if masks := [each.allowed for each in group if each.allowed is not None]:
                lines = self._allowed[: len(masks)]
                from_host = self._host_allowed.take(lines.numel()).view_as(lines)
                for line, mask in zip(from_host.numpy(), masks, strict=True):
                    line[:] = mask
                lines.copy_(from_host, non_blocking=True)
            self._copy(step, rows, group, draws)
            self._run(self._sample, rows)

    def rank(self, step: StepAddresses, rows: Sequence[int], best: int) -> list[torch.Tensor]:
        """Queue the ranking of the `best` tokens of some sampled rows by their unchanged logits.

        Return host tensors, valid once the device has run the step, that hold [rows, 2, 1 + MAX_LOGPROBS] in
        all: token ids, the chosen one before the best, and log probabilities. Only `best` are ranked.
        """
        found, best = [], min(best, self._largest.shape[1])
        for first in range(0, len(rows), ROWS[-1]):
            some = rows[first : first + ROWS[-1]]
            size = next(size for size in ROWS if size >= len(some))
            slot = len(self._newest) - 1
            group = [RuledRow(0, row, slot, None, False, None, NO_EDITS) for row in some]
            self._copy(step, size, group, best=best)
            self._run(self._rank, size)
            ranked = self._ranking[: len(some)]
            to = self._host_ranking.take(ranked.numel()).view_as(ranked)
            found.append(ranked if ranked.is_meta else to.copy_(ranked, non_blocking=True))
        return found

    def _run(self, kernels: Callable[[int], None], rows: int) -> None:
        if graph := self._graphs.get((kernels, rows)):
            graph.replay()
        else:
            kernels(rows)

    def _copy(
        self,
        step: StepAddresses,
        rows: int,
        group: Sequence[RuledRow] = (),
        draws: Numbers | None = None,
        best: int = 0,
    ) -> None:
        """Copy the numbers of a group of rows, padded to `rows`, to the device."""
        counts = [len(each.edits.tokens) for each in group]
        end = HEAD + (OF_ROWS + RULES) * rows
        from_host = self._host_numbers.take(end + OF_EDIT * sum(counts))
        numbers = from_host.numpy()
        numbers[:HEAD].view(np.int64)[:] = *step, sum(counts), best
        of_rows, of_edits = numbers[HEAD:end].reshape(-1, rows), numbers[end:].reshape(-1, OF_EDIT)
        padding = rows - len(group)
        of_rows[0] = [each.row for each in group] + [-1] * padding
        of_rows[1] = [each.slot for each in group] + [len(self._newest) - 1] * padding
        of_rows[2] = [_flags(each) for each in group] + [0] * padding
        of_rows[3:] = 0
        if any(each.penalties for each in group):
            penalties = [each.penalties or (0.0, 0.0, 1.0) for each in group]
            of_rows.view(np.float32)[3:OF_ROWS, : len(group)] = np.array(penalties).T
        if draws is not None:
            of_rows[OF_ROWS:, : len(group)] = draws[:, [each.place for each in group]]
        if len(of_edits):
            of_edits[:, 0] = np.repeat(range(len(group)), counts)
            of_edits[:, 1] = np.concatenate([each.edits.tokens for each in group])
            of_edits.view(np.float32)[:, 2] = np.concatenate([each.edits.added for each in group])
        self._numbers[: len(numbers)].copy_(from_host, non_blocking=True)

    def _sample(self, rows: int) -> None:
        """Apply the rules to the logits of the first `rows` rows of the buffers and sample from them."""
        end, chosen = HEAD + (OF_ROWS + RULES) * rows, self._chosen[:rows]
        addresses, of_rows, changed = self._read(rows)
        rule_kernels.edit_logits[(EDIT_PROGRAMS,)](
            addresses,
            self._numbers[end:],
            changed,
            changed.shape[1],
            BLOCK=EDIT_BLOCK,
            PROGRAMS=EDIT_PROGRAMS,
        )
        sample(changed, of_rows[OF_ROWS:], of_rows[1], self._newest, chosen, pdl=False)
        rule_kernels.settle_rows[(1,)](addresses, of_rows, chosen, ROWS=rows)

    def _rank(self, rows: int) -> None:
        addresses, of_rows = self._of(rows)
        vocabulary, (_, best, spans) = self._changed.shape[1], self._largest.shape
        found = self._largest, self._tokens, self._sums
        logprob_kernels.best_of_spans[(rows, spans)](
            addresses, of_rows, self._like, *found, best, vocabulary, spans, SPAN=SPAN
        )
        logprob_kernels.best_of_rows[(rows,)](
            addresses, of_rows, self._like, *found, self._ranking, self._chosen, best, vocabulary, spans,
            SPANS=triton.next_power_of_2(spans), CANDIDATES=triton.next_power_of_2(best * spans),
        )  # fmt: skip

    def _of(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the header's addresses and the numbers of the first `rows` rows."""
        of_rows = self._numbers[HEAD : HEAD + (OF_ROWS + RULES) * rows].view(-1, rows)
        return self._numbers[:HEAD].view(torch.int64), of_rows

    def _read(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copy the rows' logits and apply penalties and masks. Return addresses, row numbers and logits."""
        (addresses, of_rows), vocabulary = self._of(rows), self._changed.shape[1]
        rule_kernels.rule_rows[(rows, -(-vocabulary // SPAN))](
            addresses, of_rows, self._like, self.counts, self._allowed, self._changed, vocabulary,
            self._allowed.shape[1], ROWS=rows, PENALISED=PENALISED, COUNTING=COUNTING, MASKED=MASKED,
            IN_PROMPT=IN_PROMPT, SPAN=SPAN,
        )  # fmt: skip
        return addresses, of_rows, self._changed[:rows]


def _flags(each: RuledRow) -> int:
    return (
        PENALISED * (each.penalties is not None)
        | COUNTING * each.counting
        | MASKED * (each.allowed is not None)
    )


def _groups(ruled: Sequence[RuledRow]) -> Iterator[list[RuledRow]]:
    """Split rows into groups whose rows and edits fit a graph."""
    group: list[RuledRow] = []
    edits = 0
    for each in ruled:
        if len(group) == ROWS[-1] or (group and edits + len(each.edits.tokens) > MAX_EDITS):
            yield group
            group, edits = [], 0
        group.append(each)
        edits += len(each.edits.tokens)
    if group:
        yield group
