"""Lay out the numbers of a step in one int32 block, so that one copy takes them to the device.

Chooses shapes and buckets and fills the block. Does not touch the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from site_engine.core.request import Request
from site_engine.core.schedule_plan import SchedulePlan
from site_engine.cuda.adapters import TILE_NUMBERS
from site_engine.cuda.sampling import RULES, SlotRules

Numbers = np.ndarray[Any, np.dtype[np.int32]]

FINE_ROWS = 64  # row buckets are 8 apart up to here, then 16
MIXED_TOKENS = (*range(32, 545, 32), *range(576, 1025, 64))
"""Token buckets of mixed steps. A larger step runs eagerly: the host takes 20 to 50 ms to launch it."""
MIXED_MAX_CHUNKS = 64
FEW_ROWS = 32
ITEMS_OF_FEW = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
ITEMS_OF_MANY = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 8.0)
"""Work items per row that graphs are captured for; each unused item costs an empty program."""
ITEMS_OF_MIXED = (2.0, 4.0, 8.0)


class Shape(NamedTuple):
    """The sizes that a step is padded to. Steps of one shape share a graph."""

    tokens: int
    samples: int  # rows whose next token is sampled, decode rows first
    items: int  # programs of the decode kernel per KV head
    split: bool  # some row has more than one chunk
    blocks: int  # programs of the prefill kernel per KV head
    patches: int  # new entries of the page table
    graph: bool
    tiles: int = 0  # of rows with adapters; 0: the step is the base's alone
    owned: bool = False  # some rows have own versions of layers

    @property
    def kernels(self) -> Shape:
        """Return the part of the shape that decides which kernels run; `items` only change their programs."""
        return self._replace(items=0)

    @property
    def sections(self) -> tuple[int, ...]:
        t, s, p = self.tokens, self.samples, self.patches
        return (t, t, t, s, s, RULES * s, p, p, 4 * self.items, 4 * self.blocks, TILE_NUMBERS * self.tiles)

    @property
    def size(self) -> int:
        """Return the numbers in the block."""
        return sum(_aligned(size) for size in self.sections)


class Sections(NamedTuple):
    """Views of a step's block: numpy arrays on the host, tensors on the device."""

    source: Any  # [tokens]: an id, or -1 - slot for that slot's newest token
    position: Any  # [tokens]
    slot: Any  # [tokens]: cache slot; 0, in the null page, for decode rows, whose kernel writes them
    wanted: Any  # [samples]
    owner: Any  # [samples]
    rules: Any  # [RULES x samples]: sampling rules
    patch_at: Any  # [patches]
    patch_page: Any  # [patches]
    items: Any  # [4 x items], as the decode kernel takes them
    blocks: Any  # [4 x blocks]
    tiles: Any  # [TILE_NUMBERS x tiles], as the kernels of adapters take them


def views(block: Any, shape: Shape) -> Sections:
    """Split a block into its sections."""
    at, made = 0, []
    for size in shape.sections:
        made.append(block[at : at + size])
        at += _aligned(size)
    return Sections(*made)


def _aligned(size: int) -> int:
    """Round up to 16 bytes: Triton compiles a kernel again for addresses that are not aligned."""
    return -(-size // 4) * 4


class PageTables:
    """The host's copy of the device's page table, and the patches that bring the device up to date."""

    def __init__(self, slots: int, pages_per_row: int, page_size: int) -> None:
        self.pages_per_row = pages_per_row
        self.table: Numbers = np.zeros((slots, pages_per_row), dtype=np.int32)
        self._page_size = page_size
        self._lists: list[list[int]] = [[] for _ in range(slots)]
        self._shown = [0] * slots

    def patches(self, plan: SchedulePlan) -> tuple[list[int], list[int]]:
        """Return indices into the flat table and their new pages.

        A decode row has a new page when its token is the page's first; any other change of its pages goes
        through a prefill. The patches of a failed plan are returned again, until `applied` is called.
        """
        at: list[int] = []
        pages: list[int] = []
        size = self._page_size
        for request, start, _, _ in [scheduled for scheduled in plan.decodes if scheduled.start % size == 0]:
            at.append(request.row * self.pages_per_row + start // size)
            pages.append(request.pages[start // size])
        for scheduled in plan.prefills:
            request, row = scheduled.request, scheduled.request.row
            shown = self._shown[row] if self._lists[row] is request.pages else 0
            first = row * self.pages_per_row
            at += range(first + shown, first + len(request.pages))
            pages += request.pages[shown:]
        self.table.reshape(-1)[at] = pages
        return at, pages

    def applied(self, plan: SchedulePlan) -> None:
        """Record that the patches of a plan are on the device."""
        for request, _, _, _ in plan.prefills:
            self._lists[request.row], self._shown[request.row] = request.pages, len(request.pages)


class Packer:
    """Chooses the shape of a plan and fills its block. The row after the last slot is padding."""

    def __init__(
        self,
        tables: PageTables,
        *,
        slots: int,
        page_size: int,
        block_tokens: int,
        chunk_tokens: Callable[[int], int],
    ) -> None:
        self._tables = tables
        self._slots = slots
        self._page_size = page_size
        self._block_tokens = block_tokens
        self._chunk_tokens = chunk_tokens
        self.rules = SlotRules(slots)

    def shape(self, plan: SchedulePlan, patches: int) -> Shape:
        """Return the shape of a plan: padded for a graph if it decodes or is small, else exact.

        A step with prompts takes the kernels of split rows, whether or not a row is split: those that graphs
        of such steps have, so that none is compiled under traffic.
        """
        rows, tokens = len(plan.decodes), plan.tokens
        if not plan.prefills:
            bucket = row_bucket(rows, self._slots)
            items = self._items_of(plan, bucket) + bucket - rows
            return decode_shape(bucket, items)
        samples = rows + sum(scheduled.samples for scheduled in plan.prefills)
        if tokens > MIXED_TOKENS[-1] or len(plan.prefills) > MIXED_MAX_CHUNKS:
            items = self._items_of(plan, max(samples, 1))
            blocks = sum(-(-scheduled.length // self._block_tokens) for scheduled in plan.prefills)
            return Shape(tokens, max(samples, 1), items, True, blocks, patches, False)
        bucket = next(size for size in MIXED_TOKENS if size >= tokens)
        return self.mixed_shape(bucket, self._items_of(plan, self._mixed_samples(bucket)))

    def mixed_shape(self, tokens: int, items: int) -> Shape:
        """Return the graph shape of a mixed step; `tokens` is a bucket."""
        samples = self._mixed_samples(tokens)
        blocks = tokens // self._block_tokens + MIXED_MAX_CHUNKS + 1
        size = _item_bucket(items, samples, ITEMS_OF_MIXED)
        return Shape(tokens, samples, size, True, blocks, samples + tokens, True)

    def mixed_shapes(self, tokens: int, longest: int) -> list[Shape]:
        """Return the shapes of mixed steps with `tokens`, a bucket, and contexts up to `longest` tokens."""
        samples = self._mixed_samples(tokens)
        most = samples * -(-longest // self._chunk_tokens(samples))
        shapes = (self.mixed_shape(tokens, int(samples * many)) for many in ITEMS_OF_MIXED)
        return [shape for number, shape in enumerate(shapes) if number == 0 or shape.items <= most]

    def _mixed_samples(self, tokens: int) -> int:
        return min(tokens, row_bucket(self._slots, self._slots))

    def _items_of(self, plan: SchedulePlan, samples: int) -> int:
        return int(self._chunks(_starts(plan), samples).sum())

    def _chunks(self, starts: Numbers, samples: int) -> Numbers:
        """Return the chunks that decode rows with so many tokens before them are cut into."""
        chunks: Numbers = np.maximum(1, -(-starts // self._chunk_tokens(samples)))
        return chunks

    def fill(self, to: Sections, shape: Shape, plan: SchedulePlan) -> list[Request]:
        """Fill everything but the patches; return the requests that the sampled rows belong to, in order."""
        rows = len(plan.decodes)
        starts, sampled = _starts(plan), [scheduled.request for scheduled in plan.decodes]
        slots = np.array([request.row for request in sampled], dtype=np.int32)
        np.subtract(-1, slots, out=to.source[:rows])
        known = [row for row, (request, at, _, _) in enumerate(plan.decodes) if at < len(request.tokens)]
        to.source[known] = [sampled[row].tokens[plan.decodes[row].start] for row in known]
        to.position[:rows] = starts
        to.slot[:rows] = 0
        to.wanted[:rows] = np.arange(rows)
        to.owner[:rows] = slots
        self._fill_items(to.items.reshape(-1, 4), shape, starts, slots)
        self._fill_prefills(to, plan, sampled)
        to.wanted[len(sampled) :] = 0
        to.owner[len(sampled) :] = self._slots
        for scheduled in plan.prefills:
            self.rules.set(scheduled.request)
        ends = sampled_ends(plan)
        self.rules.fill(to.rules.reshape(RULES, -1), to.owner[: len(sampled)], ends)
        return sampled

    def _fill_items(self, items: Numbers, shape: Shape, starts: Numbers, slots: Numbers) -> None:
        """Write one item per chunk of a row; without prefill, padding rows have one item and become zeros."""
        rows = len(starts)
        chunks = self._chunks(starts, shape.samples)
        total = int(chunks.sum())
        owner = np.repeat(np.arange(rows), chunks)
        items[:total, 0] = owner
        items[:total, 1] = np.arange(total) - np.repeat(np.cumsum(chunks) - chunks, chunks)
        items[:total, 2] = starts[owner] + 1
        items[:total, 3] = slots[owner]
        padding = shape.samples - rows if shape.blocks == 0 else 0
        items[total:] = (-1, 0, 0, self._slots)
        items[total : total + padding, 0] = np.arange(rows, rows + padding)

    def _fill_prefills(self, to: Sections, plan: SchedulePlan, sampled: list[Request]) -> None:
        begin = at = len(plan.decodes)
        ids: list[int] = []
        blocks: list[tuple[int, int, int, int]] = []
        for request, start, length, samples in plan.prefills:
            ids += request.tokens[start : start + length]
            blocks += self._blocks(at, request.row, start, length)
            at += length
            if samples:
                to.wanted[len(sampled)] = at - 1
                to.owner[len(sampled)] = request.row
                sampled.append(request)
        to.source[begin:at], to.source[at:] = ids, 0
        to.position[at:], to.slot[at:] = 0, 0
        self._fill_positions(to.position[begin:at], to.slot[begin:at], plan)
        if len(to.blocks):
            padding = len(to.source) - at
            blocks += self._blocks(at, self._slots, -padding, padding) if padding else []
            to.blocks[: 4 * len(blocks)] = np.array(blocks, dtype=np.int32).reshape(-1)
            to.blocks[4 * len(blocks) :] = 0

    def _fill_positions(self, position: Numbers, slot: Numbers, plan: SchedulePlan) -> None:
        """Write the positions and cache slots of prompt tokens, chunk after chunk."""
        if not plan.prefills:
            return
        lengths = [scheduled.length for scheduled in plan.prefills]
        ends = np.cumsum(lengths)
        before = np.array([scheduled.start for scheduled in plan.prefills]) - (ends - lengths)
        position[:] = np.arange(ends[-1]) + np.repeat(before, lengths)
        rows = np.repeat([scheduled.request.row for scheduled in plan.prefills], lengths)
        slot[:] = self._tables.table[rows, position // self._page_size] * self._page_size
        slot += position % self._page_size

    def _blocks(self, at: int, row: int, position: int, length: int) -> list[tuple[int, int, int, int]]:
        """Cut a chunk into blocks. Padding has positions below 0, so that its blocks attend to nothing."""
        step = self._block_tokens
        if position < 0:
            return [
                (at + i, row, -min(step, length - i), min(step, length - i)) for i in range(0, length, step)
            ]
        return [(at + i, row, position + i, min(step, length - i)) for i in range(0, length, step)]


def _starts(plan: SchedulePlan) -> Numbers:
    return np.array([scheduled.start for scheduled in plan.decodes], dtype=np.int32)


def sampled_ends(plan: SchedulePlan) -> list[int]:
    """Return the tokens of each sampled request before its next one, in the order of the sampled rows."""
    return [start + length for _, start, length, samples in plan.chunks if samples]


def decode_shape(rows: int, items: int) -> Shape:
    """Return the graph shape of a decode step; `rows` is a bucket, padding rows have an item too."""
    size = _item_bucket(items, rows, ITEMS_OF_FEW if rows <= FEW_ROWS else ITEMS_OF_MANY)
    return Shape(rows, rows, size, size > rows, 0, rows, True)


def decode_shapes(rows: int, max_chunks: int) -> list[Shape]:
    """Return the likely shapes of a bucket: with many rows, the mean context is under half the longest."""
    likely = ITEMS_OF_FEW if rows <= FEW_ROWS else [2 * many for many in ITEMS_OF_MANY]
    count = sum(many <= max(3, max_chunks + 1) for many in likely)
    steps = ITEMS_OF_FEW if rows <= FEW_ROWS else ITEMS_OF_MANY
    return [decode_shape(rows, int(rows * many)) for many in steps[:count]]


def row_bucket(rows: int, slots: int) -> int:
    """Round rows up to 2, 4, steps of 8, then of 16. One row runs as two: torch.compile specializes on 1."""
    for small in (2, 4):
        if rows <= small:
            return small
    step = 8 if rows <= FINE_ROWS else 16
    return min(-(-rows // step) * step, max(8, -(-slots // 8) * 8))


def row_buckets(slots: int) -> list[int]:
    return sorted({row_bucket(rows, slots) for rows in range(1, slots + 1)})


def _item_bucket(items: int, rows: int, steps: Sequence[float]) -> int:
    for step in steps:
        if items <= rows * step:
            return int(rows * step)
    return int(rows * 2 ** np.ceil(np.log2(items / rows)))
