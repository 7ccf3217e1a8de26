"""What one step needs to know, as one block of int32 numbers: one copy to the device.

Does not touch the device: shapes, buckets and the filling of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from site_engine.core.request import Request
from site_engine.core.scheduler import SchedulePlan
from site_engine.cuda.sampling import RULES, SlotRules

Numbers = np.ndarray[Any, np.dtype[np.int32]]

FINE_ROWS = 64  # up to here row buckets are 8 apart, then 16
MIXED_TOKENS = (*range(32, 545, 32), *range(576, 1025, 64))
"""Sizes of mixed steps; larger ones run outside a graph: there the host is faster than the device."""
MIXED_MOST_CHUNKS = 64
FEW_ROWS = 32
ITEMS_OF_FEW = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
ITEMS_OF_MANY = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 8.0)
"""Work items per row that graphs are made for; each unused item costs its empty program a little."""
ITEMS_OF_MIXED = (1.5, 2.0, 2.5, 3.0, 4.0, 8.0)


class Shape(NamedTuple):
    """The sizes a step is padded to; steps of one shape share a graph."""

    tokens: int
    samples: int  # rows whose next token is chosen; the first of them decode
    items: int  # programs of the decode kernel per KV head
    split: bool  # some row has more than one chunk
    blocks: int  # programs of the prefill kernel per KV head
    patches: int  # new entries of the page table
    graph: bool

    @property
    def sections(self) -> tuple[int, ...]:
        t, s, p = self.tokens, self.samples, self.patches
        return (t, t, t, s, s, RULES * s, p, p, 4 * self.items, 4 * self.blocks)

    @property
    def room(self) -> int:
        """Numbers of the whole block."""
        return sum(_aligned(size) for size in self.sections)


class Sections(NamedTuple):
    """Views of a step's block; numpy arrays on the host, tensors on the device."""

    source: Any  # [tokens]: an id, or -1 - slot for that slot's newest token
    position: Any  # [tokens]
    slot: Any  # [tokens]: where key and value go; 0, in the trash page, where the decode kernel writes them
    wanted: Any  # [samples]
    owner: Any  # [samples]
    rules: Any  # [RULES x samples]: how each draws its token
    patch_at: Any  # [patches]
    patch_page: Any  # [patches]
    items: Any  # [4 x items], as the decode kernel takes them
    blocks: Any  # [4 x blocks]


def views(block: Any, shape: Shape) -> Sections:
    at, made = 0, []
    for size in shape.sections:
        made.append(block[at : at + size])
        at += _aligned(size)
    return Sections(*made)


def _aligned(size: int) -> int:
    """Sections begin at multiples of 16 bytes: a kernel is compiled anew for addresses that are none."""
    return -(-size // 4) * 4


class PageTables:
    """The page of every slot and place, as the device's table shows it once it is patched."""

    def __init__(self, slots: int, pages_per_row: int, page_size: int) -> None:
        self.pages_per_row = pages_per_row
        self.table: Numbers = np.zeros((slots, pages_per_row), dtype=np.int32)
        self._page_size = page_size
        self._lists: list[list[int]] = [[] for _ in range(slots)]
        self._shown = [0] * slots

    def patches(self, plan: SchedulePlan) -> tuple[list[int], list[int]]:
        """Places in the flat table and the pages that belong there now. A decode row is new to a page where
        its token is the page's first; whatever else happened to its pages, it was a prefill since.

        Those of a plan that fails are given again: `applied` tells that they are on the device.
        """
        at: list[int] = []
        pages: list[int] = []
        size = self._page_size
        for request, start, _, _ in [entry for entry in plan.decodes if entry.start % size == 0]:
            at.append(request.row * self.pages_per_row + start // size)
            pages.append(request.pages[start // size])
        for entry in plan.prefills:
            self._show(entry.request, at, pages)
        self.table.reshape(-1)[at] = pages
        return at, pages

    def applied(self, plan: SchedulePlan) -> None:
        for request, _, _, _ in plan.prefills:
            self._lists[request.row], self._shown[request.row] = request.pages, len(request.pages)

    def _show(self, request: Request, at: list[int], pages: list[int]) -> None:
        row = request.row
        shown = self._shown[row] if self._lists[row] is request.pages else 0
        first = row * self.pages_per_row
        at += range(first + shown, first + len(request.pages))
        pages += request.pages[shown:]


class Packer:
    """From a plan to a shape and its filled block. The row after the last slot's belongs to nobody."""

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
        self._rules = SlotRules(slots)

    def shape(self, plan: SchedulePlan, patches: int) -> Shape:
        """Decode steps and small mixed ones are padded to a shape with a graph, others are as they are."""
        rows, tokens = len(plan.decodes), plan.tokens
        if not plan.prefills:
            bucket = row_bucket(rows, self._slots)
            items = self._items_of(plan, bucket) + bucket - rows
            return decode_shape(bucket, items)
        samples = rows + sum(entry.samples for entry in plan.prefills)
        if tokens > MIXED_TOKENS[-1] or len(plan.prefills) > MIXED_MOST_CHUNKS:
            items = self._items_of(plan, max(samples, 1))
            blocks = sum(-(-entry.length // self._block_tokens) for entry in plan.prefills)
            return Shape(tokens, max(samples, 1), items, items > rows, blocks, patches, False)
        bucket = next(size for size in MIXED_TOKENS if size >= tokens)
        return self.mixed_shape(bucket, self._items_of(plan, self._mixed_samples(bucket)))

    def mixed_shape(self, tokens: int, items: int) -> Shape:
        samples = self._mixed_samples(tokens)
        blocks = tokens // self._block_tokens + MIXED_MOST_CHUNKS + 1
        size = _item_bucket(items, samples, ITEMS_OF_MIXED)
        return Shape(tokens, samples, size, True, blocks, samples + tokens, True)

    def _mixed_samples(self, tokens: int) -> int:
        return min(tokens, row_bucket(self._slots, self._slots))

    def _items_of(self, plan: SchedulePlan, samples: int) -> int:
        chunk = self._chunk_tokens(samples)
        return sum([max(1, -(-entry.start // chunk)) for entry in plan.decodes])

    def fill(self, to: Sections, shape: Shape, plan: SchedulePlan) -> list[Request]:
        """Everything but the patches; whose next tokens the rows are, in order."""
        rows = len(plan.decodes)
        to.source[:rows] = [
            request.tokens[start] if start < len(request.tokens) else -1 - request.row
            for request, start, _, _ in plan.decodes
        ]
        starts = np.array([entry.start for entry in plan.decodes], dtype=np.int32)
        to.position[:rows] = starts
        to.slot[:rows] = 0
        slots = np.array([entry.request.row for entry in plan.decodes], dtype=np.int32)
        to.wanted[:rows] = np.arange(rows)
        to.owner[:rows] = slots
        self._fill_items(to.items.reshape(-1, 4), shape, starts, slots)
        sampled = [entry.request for entry in plan.decodes]
        self._fill_prefills(to, plan, sampled)
        to.wanted[len(sampled) :] = 0
        to.owner[len(sampled) :] = self._slots
        self._fill_rules(to.rules.reshape(RULES, -1), plan, to.owner[: len(sampled)])
        return sampled

    def _fill_rules(self, rules: Numbers, plan: SchedulePlan, slots: Numbers) -> None:
        for entry in plan.prefills:
            self._rules.set(entry.request)
        ends = [start + length for _, start, length, samples in plan.chunks if samples]
        self._rules.fill(rules, slots, ends)

    def _fill_items(self, items: Numbers, shape: Shape, starts: Numbers, slots: Numbers) -> None:
        """One item per chunk of a row; where no prompt follows, padding rows have one and become zeros."""
        rows = len(starts)
        chunk = self._chunk_tokens(shape.samples)
        chunks = np.maximum(1, -(-starts // chunk))
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
        self._fill_places(to.position[begin:at], to.slot[begin:at], plan)
        if len(to.blocks):
            padding = len(to.source) - at
            blocks += self._blocks(at, self._slots, -padding, padding) if padding else []
            to.blocks[: 4 * len(blocks)] = np.array(blocks, dtype=np.int32).reshape(-1)
            to.blocks[4 * len(blocks) :] = 0

    def _fill_places(self, position: Numbers, slot: Numbers, plan: SchedulePlan) -> None:
        """Of the prompts' tokens, one chunk after the other."""
        if not plan.prefills:
            return
        lengths = [entry.length for entry in plan.prefills]
        ends = np.cumsum(lengths)
        before = np.array([entry.start for entry in plan.prefills]) - (ends - lengths)
        position[:] = np.arange(ends[-1]) + np.repeat(before, lengths)
        rows = np.repeat([entry.request.row for entry in plan.prefills], lengths)
        slot[:] = self._tables.table[rows, position // self._page_size] * self._page_size
        slot += position % self._page_size

    def _blocks(self, at: int, row: int, place: int, length: int) -> list[tuple[int, int, int, int]]:
        """Padding has places before 0: its blocks end before they begin, and see nothing."""
        step = self._block_tokens
        if place < 0:
            return [
                (at + i, row, -min(step, length - i), min(step, length - i)) for i in range(0, length, step)
            ]
        return [(at + i, row, place + i, min(step, length - i)) for i in range(0, length, step)]


def decode_shape(rows: int, items: int) -> Shape:
    """`rows` is a bucket; padding rows have an item too."""
    size = _item_bucket(items, rows, ITEMS_OF_FEW if rows <= FEW_ROWS else ITEMS_OF_MANY)
    return Shape(rows, rows, size, size > rows, 0, rows, True)


def decode_shapes(rows: int, most_chunks: int) -> list[Shape]:
    """Those a bucket is likely to meet: with many rows, the mean context is under half of the longest."""
    likely = ITEMS_OF_FEW if rows <= FEW_ROWS else [2 * many for many in ITEMS_OF_MANY]
    count = sum(many <= max(3, most_chunks) for many in likely)
    steps = ITEMS_OF_FEW if rows <= FEW_ROWS else ITEMS_OF_MANY
    return [decode_shape(rows, int(rows * many)) for many in steps[:count]]


def row_bucket(rows: int, slots: int) -> int:
    """2, 4, then steps of 8, then of 16. One row runs as two: compiled code treats 1 as a special case."""
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
