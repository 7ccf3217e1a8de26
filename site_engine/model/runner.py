"""Compute plans: the tokens of all rows in one packed sequence, through the unmodified model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from site_engine.core.page_pool import NULL_PAGE
from site_engine.core.request import Request
from site_engine.core.schedule_plan import ScheduledChunk, SchedulePlan
from site_engine.model import attention_context
from site_engine.model.host_copies import to_device
from site_engine.model.kv_cache import KVCache
from site_engine.model.logit_rules import LogitRules
from site_engine.model.sampler import Alternatives
from site_engine.model.tensor_group import TensorGroup
from site_engine.model.torch_attention import Chunk, ReferenceContext, Rows

MAX_PADDING_TOKENS = 4096  # with more padding, another attention call is cheaper
NOT_FINITE = "the model's output was not finite"

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(ids [1, tokens], positions [1, tokens], wanted [rows]) -> logits [rows, vocabulary]."""


UseVariants = Callable[[SchedulePlan, np.ndarray], AbstractContextManager[None]]
"""(plan, wanted tokens) -> a context in which the model computes each row of the plan with its variant."""


class Logits(NamedTuple):
    """`rows[i]` are the next-token logits of `sampled[i]`; `prompts` holds the logits of whole chunks."""

    sampled: list[Request]
    rows: torch.Tensor
    prompts: list[tuple[ScheduledChunk, torch.Tensor]]


class Runner(Protocol):
    """Runs plans through the model with its own KV cache.

    A failed plan may be run again: it writes the same keys and values.
    """

    @property
    def kv_cache(self) -> KVCache: ...

    def run(self, plan: SchedulePlan) -> Logits:
        """Run a plan whose input tokens are all known; return the logits that the sampler needs."""
        ...


class StepTokens(NamedTuple):
    """One token id per row of a step, errors of rows whose token is invalid, log probabilities by row."""

    token_ids: list[int]
    broken: Mapping[int, str]  # error messages by row
    alternatives: dict[int, Alternatives] | None = None


class PendingStep(Protocol):
    """A step launched on the device. `requests[i]` gets the i-th token."""

    plan: SchedulePlan
    requests: list[Request]

    def finish(self) -> None:
        """Queue the work that needs the previous step's tokens: sampling of rows with rules."""
        ...

    def wait(self) -> StepTokens:
        """Block until the step is computed and return its tokens."""
        ...


@runtime_checkable
class OverlappedRunner(Runner, Protocol):
    """A runner that samples on the device, so that a step can be launched before the previous one is read."""

    def launch(self, plan: SchedulePlan, rules: LogitRules | None = None) -> PendingStep:
        """Queue a plan and return at once. Unknown token ids are taken from the previous step on the device.

        `rules` are applied to the logits of requests that have any when `finish` is called. Before that, the
        caller may read the previous step and compute grammar masks. The next `launch` or `wait` also
        finishes the step.
        """
        ...


class PackedStep(NamedTuple):
    """A step of packed tokens as arrays: all that a follower rank needs to compute it."""

    ids: np.ndarray  # [tokens], as are `positions` and `slots`
    positions: np.ndarray
    wanted: np.ndarray  # [rows], packed tokens whose logits are needed
    slots: np.ndarray  # in the KV cache
    groups: list[tuple[int, int, np.ndarray, np.ndarray]]  # the fields of `Rows`
    chunks: list[tuple[int, int, np.ndarray, int]]  # the fields of `Chunk`


class PackedRunner:
    """Runs packed tokens through PyTorch attention, on any device.

    Keeps the page table of every row between iterations, so that a decode step copies no lists.
    """

    def __init__(
        self,
        forward: Forward,
        kv_cache: KVCache,
        *,
        slots: int,
        pages_per_row: int,
        use_variants: UseVariants | None = None,
        group: TensorGroup | None = None,
    ) -> None:
        """Create a runner. Without `use_variants` it serves only the base.

        `group`: the ranks over which the model's layers are split.
        """
        self._forward = forward
        self._use_variants = use_variants
        self._group = group
        self.kv_cache = kv_cache
        self._device = kv_cache.device
        self._tables = np.full((slots, pages_per_row), NULL_PAGE, dtype=np.int64)
        self._lists: list[list[int]] = [[] for _ in range(slots)]  # the page list shown in each row's table
        self._shown = [0] * slots

    def run(self, plan: SchedulePlan) -> Logits:
        """Run a plan and return its logits."""
        plan.sort_decodes()  # rows of similar length are neighbours then
        self._update_tables(plan)
        step = self._numbers(plan)
        variants = nullcontext() if self._use_variants is None else self._use_variants(plan, step.wanted)
        with variants:
            rows = self.play(step)
        return split_logits(plan, rows)

    def play(self, step: PackedStep) -> torch.Tensor:
        """Run a packed step, without its requests, and return the logits of its wanted tokens."""
        groups = [Rows(begin, end, *map(self._tensor, arrays)) for begin, end, *arrays in step.groups]
        chunks = [Chunk(begin, end, self._tensor(pages), kv_len) for begin, end, pages, kv_len in step.chunks]
        context = ReferenceContext(self.kv_cache, self._tensor(step.slots), groups, chunks)
        ids, positions = self._tensor(step.ids)[None], self._tensor(step.positions)[None]
        together = nullcontext() if self._group is None else self._group.step(step)
        with together, torch.inference_mode(), attention_context.use(context):
            rows = self._forward(ids, positions, self._tensor(step.wanted))
            if context.layer != len(self.kv_cache.keys):
                raise RuntimeError(f"{context.layer} attention calls in a model of {len(self.kv_cache.keys)}")
        return rows

    def _update_tables(self, plan: SchedulePlan) -> None:
        """Write new pages into the rows' tables. Entries beyond a row's pages are the null page."""
        lists, shown = self._lists, self._shown
        for request in plan.requests:
            row, pages = request.row, request.pages
            if lists[row] is not pages:
                self._tables[row] = NULL_PAGE
                lists[row], shown[row] = pages, 0
            if shown[row] < len(pages):
                self._tables[row, shown[row] : len(pages)] = pages[shown[row] :]
                shown[row] = len(pages)

    def _numbers(self, plan: SchedulePlan) -> PackedStep:
        page_size = self.kv_cache.page_size
        begins, wanted = self._layout(plan)
        ids = [request.tokens[start] for request, start in zip(plan.decoding, plan.starts, strict=True)]
        at = [np.array(plan.starts, dtype=np.int64)]
        for request, start, length, _ in plan.prefills:
            ids += request.tokens[start : start + length]
            at.append(np.arange(start, start + length))
        positions = np.concatenate(at)
        rows = np.array([request.row for request in plan.decoding], dtype=np.int64)
        owners = [rows, *(np.full(chunk.length, chunk.request.row) for chunk in plan.prefills)]
        pages = self._tables[np.concatenate(owners), positions // page_size]
        slots = pages * page_size + positions % page_size
        groups = [
            (begin, end, self._tables[rows[begin:end], :width], lens)
            for begin, end, width, lens in _groups(positions[: len(rows)] + 1, page_size)
        ]
        chunks = []
        for (request, start, length, _), begin in zip(plan.prefills, begins, strict=True):
            own = self._tables[request.row, : -(-(start + length) // page_size)]
            chunks.append((begin, begin + length, own.copy(), start + length))
        return PackedStep(np.array(ids, dtype=np.int64), positions, wanted, slots, groups, chunks)

    def _layout(self, plan: SchedulePlan) -> tuple[list[int], np.ndarray]:
        """Return the first packed token of each prefill chunk, and the tokens whose logits are wanted."""
        at = len(plan.decoding)
        wanted, begins = list(range(at)), []
        for chunk in plan.prefills:
            begins.append(at)
            if wants_prompt_logprobs(chunk):
                wanted += range(at, at + chunk.length)
            elif chunk.samples:
                wanted.append(at + chunk.length - 1)
            at += chunk.length
        return begins, np.array(wanted or [0], dtype=np.int64)

    def _tensor(self, numbers: np.ndarray) -> torch.Tensor:
        return to_device(numbers, self._device)


def _groups(kv_lens: np.ndarray, page_size: int) -> list[tuple[int, int, int, np.ndarray]]:
    """Group rows of ascending length so that padding to a group's longest costs less than another call.

    Returns (begin, end, pages of the longest, lengths) for each group.
    """
    widths = -(-kv_lens // page_size)
    groups: list[tuple[int, int, int, np.ndarray]] = []
    end = len(widths)
    while end:
        width = int(widths[end - 1])
        begin = int(np.searchsorted(widths, width // 2, side="right"))
        if begin * (width - width // 2) * page_size < MAX_PADDING_TOKENS:
            begin = 0
        groups.insert(0, (begin, end, width, kv_lens[begin:end]))
        end = begin
    return groups


def split_logits(plan: SchedulePlan, rows: torch.Tensor) -> Logits:
    """Split logits [wanted, vocabulary] into rows to sample and whole chunks of prompts."""
    sampled = list(plan.decoding)
    picked = list(range(len(sampled)))
    prompts: list[tuple[ScheduledChunk, torch.Tensor]] = []
    at = len(sampled)
    for chunk in plan.prefills:
        begin = at
        if wants_prompt_logprobs(chunk):
            at += chunk.length
            prompts.append((chunk, rows[begin:at]))
        elif chunk.samples:
            at += 1
        if chunk.samples:
            sampled.append(chunk.request)
            picked.append(at - 1)
    return Logits(sampled, rows if len(picked) == rows.shape[0] else rows[picked], prompts)


def wants_prompt_logprobs(chunk: ScheduledChunk) -> bool:
    """Return whether prompt log probabilities need the logits of the whole chunk."""
    request = chunk.request
    return request.sampling.prompt_logprobs and chunk.start < request.prompt_len - 1
