"""Sample and rank rows as the sampling kernel does not, in CUDA graphs for the rows of any step.

Launching their kernels one by one takes the host longer than a step of a small model takes the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from site_engine.core.request import MAX_LOGPROBS
from site_engine.cuda.batch_layout import Numbers
from site_engine.cuda.kernels import rule_kernels
from site_engine.cuda.sampling import RULES
from site_engine.cuda.sampling_launch import sample
from site_engine.model.logit_rules import NO_EDITS, Edits, copy_to
from site_engine.model.sampler import to_host

ROWS = (4, 16, 64)
"""Of a graph; more rows take several."""
MAX_EDITS = 4096
"""Of several rows of a graph; a row alone may have one for every token."""
EDIT_BLOCK, EDIT_PROGRAMS = 128, 8
SPAN = 2048
WORD_BITS = 32
IN_PROMPT = 1 << 14
"""The bit of a token's count that says that the prompt has it."""
PENALISED, COUNTING, MASKED = 1, 2, 4
"""The flags of a row."""
HEAD = 12
"""Numbers before those of rows: addresses of a step's tensors, of 64 bits each, and how many edits follow."""
OF_ROWS = 6
"""Sampled row, slot, flags, three penalties; then its RULES."""
OF_EDIT = 3
"""Row of the graph, token, what is added to its logit."""


class RuledRow(NamedTuple):
    """A sampled row of a step, and its rules."""

    row: int
    slot: int
    penalties: tuple[float, float, float] | None  # presence, frequency, repetition
    counting: bool  # whether the counts of the slot lack the last token
    draw: Numbers  # [RULES], as of `SlotRules`
    allowed: Numbers | None  # [vocabulary / 32]: bits of the tokens that a grammar allows
    edits: Edits


class StepAddresses(NamedTuple):
    """Where the device has the tensors of a launched step."""

    logits: int  # [samples, vocabulary]
    chosen: int  # [samples], int32
    ids: int  # [tokens], int64
    wanted: int  # [samples], int64: places among `ids`


class RuleGraphs:
    """The buffers, the graphs and the counts of tokens by slot [slots + 1, vocabulary]."""

    def __init__(self, newest: torch.Tensor, logits: torch.Tensor) -> None:
        """Compile or capture all sizes. `newest` [slots + 1]: the last token of each slot, which sampling
        replaces; `logits` [any, vocabulary]: what those of steps are like.
        """
        where, vocabulary = logits.device, logits.shape[1]
        self._newest = newest
        self.counts = torch.zeros(len(newest), vocabulary, dtype=torch.int16, device=where)
        size = HEAD + (OF_ROWS + RULES) * ROWS[-1] + OF_EDIT * max(MAX_EDITS, vocabulary)
        self._numbers = torch.zeros(size, dtype=torch.int32, device=where)
        self._allowed = torch.zeros(ROWS[-1], -(-vocabulary // WORD_BITS), dtype=torch.int32, device=where)
        self._changed = torch.zeros(ROWS[-1], vocabulary, dtype=torch.float32, device=where)
        self._chosen = torch.zeros(ROWS[-1], dtype=torch.int32, device=where)
        self._like = logits.new_zeros(1)
        best = min(MAX_LOGPROBS, vocabulary)
        self._ranking = torch.zeros(ROWS[-1], 2, 1 + best, dtype=torch.float64, device=where)
        self._graphs: dict[tuple[Callable[[int], None], int], torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle() if where.type == "cuda" else None
        for rows in ROWS:
            self._copy(StepAddresses(0, 0, 0, 0), (), rows)
            for kernels in (self._sample, self._rank):
                kernels(rows)  # compiled before they are captured
                if where.type == "cuda":
                    graph = self._graphs[kernels, rows] = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
                        kernels(rows)

    def sample(self, step: StepAddresses, ruled: Sequence[RuledRow]) -> None:
        """Queue what replaces the tokens of some sampled rows.

        Those whose logits were not finite keep their mark.
        """
        for group in _groups(sorted(ruled, key=lambda each: each.allowed is None)):
            rows = next(size for size in ROWS if size >= len(group))
            if masks := [each.allowed for each in group if each.allowed is not None]:
                copy_to(self._allowed[: len(masks)], np.stack(masks))
            self._copy(step, group, rows)
            self._run(self._sample, rows)

    def rank(self, step: StepAddresses, rows: Sequence[int]) -> list[torch.Tensor]:
        """Queue the ranking of some sampled rows by their unchanged logits.

        Return tensors of the host, to be read when the device is past them, of all rows together [rows, 2, 1
        + MAX_LOGPROBS]: the token ids, chosen and best, and their log probabilities.
        """
        found = []
        for first in range(0, len(rows), ROWS[-1]):
            some = rows[first : first + ROWS[-1]]
            size = next(size for size in ROWS if size >= len(some))
            nothing = np.zeros(RULES, dtype=np.int32)
            slot = len(self._newest) - 1
            self._copy(
                step, [RuledRow(row, slot, None, False, nothing, None, NO_EDITS) for row in some], size
            )
            self._run(self._rank, size)
            found.append(to_host(self._ranking[: len(some)].clone()))
        return found

    def _run(self, kernels: Callable[[int], None], rows: int) -> None:
        if graph := self._graphs.get((kernels, rows)):
            graph.replay()
        else:
            kernels(rows)

    def _copy(self, step: StepAddresses, group: Sequence[RuledRow], rows: int) -> None:
        """Copy the numbers of a group, padded to `rows`, to the device."""
        counts = [len(each.edits.tokens) for each in group]
        end = HEAD + (OF_ROWS + RULES) * rows
        numbers = np.zeros(end + OF_EDIT * sum(counts), dtype=np.int32)
        numbers[: 2 * len(step)].view(np.int64)[:] = step
        numbers[2 * len(step)] = sum(counts)
        of_rows, of_edits = numbers[HEAD:end].reshape(-1, rows), numbers[end:].reshape(-1, OF_EDIT)
        of_rows[0], of_rows[1] = -1, len(self._newest) - 1
        if group:
            of_rows[:3, : len(group)] = np.array([(each.row, each.slot, _flags(each)) for each in group]).T
            penalties = [each.penalties or (0.0, 0.0, 1.0) for each in group]
            of_rows.view(np.float32)[3:OF_ROWS, : len(group)] = np.array(penalties).T
            of_rows[OF_ROWS:, : len(group)] = np.array([each.draw for each in group]).T
            of_edits[:, 0] = np.repeat(range(len(group)), counts)
            of_edits[:, 1] = np.concatenate([each.edits.tokens for each in group])
            of_edits.view(np.float32)[:, 2] = np.concatenate([each.edits.added for each in group])
        copy_to(self._numbers[: len(numbers)], numbers)

    def _sample(self, rows: int) -> None:
        """Change the logits of the first `rows` lines of the buffers, and sample them again."""
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
        addresses, of_rows, logits = self._read(rows)
        rule_kernels.chosen_rows[(1,)](addresses, of_rows, self._chosen, ROWS=rows)
        logprobs, to = torch.log_softmax(logits, dim=-1), self._ranking[:rows]
        best = logprobs.topk(to.shape[2] - 1, dim=-1)
        chosen = self._chosen[:rows, None].long()
        to[:, 0, :1], to[:, 0, 1:] = chosen, best.indices
        to[:, 1, :1], to[:, 1, 1:] = logprobs.gather(-1, chosen), best.values

    def _read(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Read and change the logits of the rows; return the addresses, the rows' numbers and the logits."""
        addresses, vocabulary = self._numbers[:HEAD].view(torch.int64), self._changed.shape[1]
        of_rows = self._numbers[HEAD : HEAD + (OF_ROWS + RULES) * rows].view(-1, rows)
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
    """Cut rows into groups of which a graph holds the rows and the edits."""
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
