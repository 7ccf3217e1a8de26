"""Run plans on a GPU: one CUDA graph per shape, one copy of a step's inputs in, only token ids out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from site_engine.core.request import Request, Sampling
from site_engine.core.schedule_plan import SchedulePlan
from site_engine.cuda.adapters import TILE_NUMBERS, AdapterArenas
from site_engine.cuda.attention_launch import block_tokens
from site_engine.cuda.batch_layout import (
    MIXED_TOKENS,
    Numbers,
    Packer,
    PageTables,
    Sections,
    Shape,
    decode_shapes,
    row_buckets,
    sampled_ends,
    views,
)
from site_engine.cuda.cuda_graph import Device, Step
from site_engine.cuda.host_buffers import HostBuffers
from site_engine.cuda.ruled_rows import Ranked, Ruled, RuledRows
from site_engine.cuda.sampling import RULES
from site_engine.model.host_copies import to_device
from site_engine.model.logit_rules import LogitRules
from site_engine.model.runner import NOT_FINITE, Forward, Logits, PackedRunner, StepTokens
from site_engine.model.tensor_group import TensorGroup

log = logging.getLogger(__name__)

USUAL_NUMBERS = 1 << 16
"""Size of the reused host buffers for step blocks. A step with many prompts has a larger block."""


class StepNumbers(NamedTuple):
    """All data that a follower rank needs to run a step."""

    shape: Shape
    block: Numbers


class Patches(NamedTuple):
    """Indices into the flat page table and their new pages, for steps whose block has too little room."""

    at: list[int]
    pages: list[int]


class Unsampled(NamedTuple):
    """Rows of a launched step that are sampled by rules, and the function that queues their sampling."""

    rows: Sequence[int]
    sample: Callable[[], Ranked | None]


class DeviceStep:
    """A launched step. `finish` queues the copy of its tokens to `ids` on the host."""

    def __init__(
        self,
        plan: SchedulePlan,
        requests: list[Request],
        chosen: torch.Tensor,
        ids: torch.Tensor,
        unsampled: Unsampled | None = None,
    ) -> None:
        self.plan = plan
        self.requests = requests
        self._chosen, self._ids = chosen, ids
        self._unsampled = unsampled
        self._ranked: Ranked | None = None
        self._failed: dict[int, str] = {}  # error messages of rows whose rules failed
        self._finished = False
        self._done = torch.cuda.Event() if chosen.device.type == "cuda" else None
        if unsampled is None:
            self.finish()

    def finish(self) -> None:
        """Queue the rest of the step. Must be called before another step is queued."""
        if self._finished:
            return
        self._finished = True
        if self._unsampled is not None:
            try:
                self._ranked = self._unsampled.sample()
            except Exception as error:
                log.exception("rows of a step could not be sampled by their rules")
                self._failed = dict.fromkeys(self._unsampled.rows, f"{type(error).__name__}: {error}")
        self._ids.copy_(self._chosen, non_blocking=True)
        if self._done is not None:
            self._done.record()

    def wait(self) -> StepTokens:
        """Block until the step has run and return its tokens."""
        self.finish()
        if self._done is not None:
            self._done.synchronize()
        numbers: list[int] = self._ids.numpy()[: len(self.requests)].tolist()
        alternatives = self._ranked.read() if self._ranked is not None else None
        if min(numbers, default=0) >= 0:
            return StepTokens(numbers, self._failed, alternatives)
        broken = {row: NOT_FINITE for row, number in enumerate(numbers) if number < 0} | self._failed
        return StepTokens(
            [number if number >= 0 else -1 - number for number in numbers], broken, alternatives
        )


class DeviceRunner:
    """Run steps as CUDA graphs. `reference` computes prompt log probabilities, which graphs do not."""

    def __init__(
        self,
        forward: Forward,
        reference: PackedRunner,
        *,
        slots: int,
        pages_per_row: int,
        heads_per_kv_head: int,
        arenas: AdapterArenas | None = None,
        group: TensorGroup | None = None,
    ) -> None:
        """Create a runner. Without `arenas`, all requests use the base model.

        `group` is the tensor group over which the layers of `forward` and `reference` are split.
        """
        self.kv_cache = kv_cache = reference.kv_cache
        self._group = group
        self._forward = forward
        self._reference = reference
        self._slots = slots
        self._arenas = arenas
        self.slots_bytes = 0 if arenas is None else arenas.bytes
        self._device = Device(kv_cache, slots, pages_per_row, group)
        self._tables = PageTables(slots, pages_per_row, kv_cache.page_size)
        self._packer = Packer(
            self._tables,
            slots=slots,
            page_size=kv_cache.page_size,
            block_tokens=block_tokens(heads_per_kv_head, 1),
            chunk_tokens=self._device.chunk_tokens,
        )
        self._ruled = RuledRows(self._device.newest)
        self._unfinished: DeviceStep | None = None
        self._cuda = self._device.where.type == "cuda"
        self._blocks = HostBuffers(USUAL_NUMBERS, pinned=self._cuda)
        self._ids = HostBuffers(MIXED_TOKENS[-1], pinned=self._cuda)
        self._steps: dict[Shape, Step] = {}
        self._compiled: set[Shape] = set()  # shapes reduced to `kernels`
        if self._cuda:
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()

    def launch(self, plan: SchedulePlan, rules: LogitRules | None = None) -> DeviceStep:
        """Queue a plan without blocking. Tokens not yet known are read from the previous step on the device.

        Rows with rules are sampled in `finish`, after the host has read the previous step, which grammars
        depend on. Without `rules`, no request of the plan may have rules.
        """
        step, requests, to = self._start(plan)
        rows = self._packer.rules.ruled(requests) if rules is not None else []
        ids = self._ids.take(len(step.chosen))
        if not rows or rules is None:
            return DeviceStep(plan, requests, step.chosen, ids)
        ends, ruled_requests = sampled_ends(plan), [requests[row] for row in rows]
        draws = to.rules.reshape(RULES, -1)[:, rows]
        slots = [request.row for request in ruled_requests]
        ruled = Ruled(rows, ruled_requests, slots, [ends[row] for row in rows], draws)
        unsampled = Unsampled(rows, partial(self._ruled.sample, step, ruled, rules))
        self._unfinished = DeviceStep(plan, requests, step.chosen, ids, unsampled)
        return self._unfinished

    def run(self, plan: SchedulePlan) -> Logits:
        """Run a plan whose tokens are all known and return its logits.

        If the plan samples no rows, the caller reads no logits. The call then waits for the device, since the
        pinned memory of the plan's block is reused.
        """
        if any(scheduled.request.sampling.prompt_logprobs for scheduled in plan.prefills):
            self.patch(Patches(*self._tables.patches(plan)))
            self._tables.applied(plan)
            for scheduled in plan.prefills:
                self._packer.rules.set(scheduled.request)
            return self._reference.run(plan)
        step, requests, _ = self._start(plan)
        if not requests:
            self._wait()
        assert step.logits is not None
        return Logits(requests, step.logits[: len(requests)], [])

    def _wait(self) -> None:
        """Wait until the device has finished all queued work."""
        if self._cuda:
            torch.cuda.current_stream(self._device.where).synchronize()

    def warm(self, longest: int) -> int:
        """Capture the graphs of decode steps and small mixed steps for contexts up to `longest` tokens.

        Returns the number of graphs.
        """
        for rows in reversed(row_buckets(self._slots)):
            for shape in decode_shapes(rows, -(-longest // self._device.chunk_tokens(rows))):
                self.warm_shape(shape)
        for tokens in reversed(MIXED_TOKENS):
            for shape in self._packer.mixed_shapes(tokens, longest):
                self.warm_shape(shape)
        self._warm_rules()
        self.patch(Patches([0], [0]))
        return len(self._steps)

    def rehearse(self) -> None:
        """Run every captured step once, on padding instead of requests."""
        for shape in list(self._steps):
            self.play(shape, self._padding(shape))

    def warm_shape(self, shape: Shape) -> None:
        """Capture the graphs of a shape. All ranks of a group capture in the same order."""
        with self._together(shape):
            self._step(shape)
            if self._arenas is None:
                return
            adapted = shape._replace(tiles=self._arenas.tiles(shape.tokens))
            self._step(adapted)
            if self._arenas.own is not None and not shape.blocks:
                self._step(adapted._replace(owned=True))

    def _warm_rules(self) -> None:
        """Compile the kernels that sample rows with rules, on a step of padding."""
        shape = decode_shapes(2, 1)[0]
        step = self.play(shape, self._padding(shape))
        assert step.logits is not None
        self._ruled.prepare(step.logits)
        rules = LogitRules((0,), self._device.where)
        sampling = Sampling(presence_penalty=0.1, min_tokens=2, logit_bias={0: 1.0}, logprobs=1)
        requests = [Request(f"warm-up-{row}", (0, 0), sampling, resumed=(0,)) for row in range(2)]
        for rows in (1, 2):
            draws = np.zeros((RULES, rows), dtype=np.int32)
            slots = [self._slots] * rows
            self._ruled.sample(step, Ruled(range(rows), requests[:rows], slots, [3] * rows, draws), rules)

    def _start(self, plan: SchedulePlan) -> tuple[Step, list[Request], Sections]:
        """Queue a plan. Return its step, the requests of its sampled rows and the sections of its block."""
        rows = self._packer.decode_rows(plan)
        at, pages = self._tables.patches(plan)
        shape = self._packer.shape(plan, rows, len(at))
        arenas = self._arenas
        answered = [] if arenas is None else [each for each in plan.requests if each.variant is not None]
        if arenas is not None and any(request.has_adapter for request in answered):
            owned = arenas.own is not None and any(request.variant in arenas.own for request in answered)
            # with own layers, steps with prompts run eagerly: their graphs would rarely be used
            graph = shape.graph and not (owned and shape.blocks)
            shape = shape._replace(tiles=arenas.tiles(shape.tokens), owned=owned, graph=graph)
        if len(at) > shape.patches:
            self.patch(Patches(at, pages))
            at, pages = [], []
        block = self._blocks.take(shape.size)
        to = views(block.numpy(), shape)
        requests = self._packer.fill(to, shape, plan, rows)
        if arenas is not None and shape.tiles:
            arenas.fill(to.tiles.reshape(-1, TILE_NUMBERS), plan, shape.tokens)
        to.patch_at[: len(at)], to.patch_at[len(at) :] = at, -1
        to.patch_page[: len(at)] = pages
        if self._unfinished is not None:
            self._unfinished.finish()  # before its logits are overwritten
            self._unfinished = None
        step = self.play(shape, block)
        self._tables.applied(plan)
        return step, requests, to

    def play(self, shape: Shape, block: torch.Tensor) -> Step:
        """Queue a step from its shape and block of numbers."""
        with self._together(StepNumbers(shape, block.numpy())):
            step = self._step(shape)
            step.load(block)
            step.run()
        return step

    def obey(self, message: StepNumbers | Patches | Shape) -> None:
        """Execute a message from the leader of the group."""
        if isinstance(message, Patches):
            self.patch(message)
        elif isinstance(message, Shape):
            self.warm_shape(message)
        else:
            block = self._blocks.take(message.shape.size)
            block.copy_(torch.from_numpy(message.block))
            self.play(message.shape, block)

    def patch(self, patches: Patches) -> None:
        """Write entries of the device's page table."""
        where = self._device.where
        with self._together(patches):
            index = to_device(np.array(patches.at, dtype=np.int64), where)
            self._device.table.view(-1)[index] = to_device(np.array(patches.pages, dtype=np.int32), where)

    def _together(self, message: Any) -> AbstractContextManager[None]:
        return nullcontext() if self._group is None else self._group.step(message)

    def _step(self, shape: Shape) -> Step:
        if not shape.graph:
            return Step(self._device, self._forward, shape, self._arenas)
        step = self._steps.get(shape)
        if step is None:
            step = self._steps[shape] = Step(self._device, self._forward, shape, self._arenas)
            if self._cuda:
                began_s = time.monotonic()
                step.load(self._padding(shape))
                try:
                    step.capture(self._stream, self._pool, compiled=shape.kernels in self._compiled)
                except RuntimeError:
                    if self._group is not None:
                        raise  # the other ranks may have captured the graph
                    log.exception("no graph could be captured, steps of its shape run eagerly: %s", shape)
                    return step
                self._compiled.add(shape.kernels)
                log.debug("captured a graph in %.0f ms: %s", 1000 * (time.monotonic() - began_s), shape)
        return step

    def _padding(self, shape: Shape) -> torch.Tensor:
        block = torch.zeros(shape.size, dtype=torch.int32)
        to = views(block.numpy(), shape)
        to.owner[:], to.patch_at[:] = self._slots, -1
        if self._arenas is not None and shape.tiles:
            self._arenas.fill(to.tiles.reshape(-1, TILE_NUMBERS), SchedulePlan(), shape.tokens)
        items = to.items.reshape(-1, 4)
        items[:] = (-1, 0, 0, self._slots)
        if not shape.blocks:
            items[: shape.samples, 0] = range(shape.samples)
        return block
