"""Lay out the inputs of a step in one int32 block, so that one copy transfers them to the device.

Chooses shapes and buckets and fills the block. Does not access the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
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
    """The sizes to which a step is padded. Steps of equal shape share a graph."""

    tokens: int
    samples: int  # rows whose next token is sampled, decode rows first
    items: int  # programs of the decode kernel per KV head
    split: bool  # some row has more than one chunk
    blocks: int  # programs of the prefill kernel per KV head
    patches: int  # new entries of the page table
    graph: bool
    tiles: int = 0  # tiles of rows by adapter; 0: all rows use the base model
    owned: bool = False  # some rows use a variant's own layers

    @property
    def kernels(self) -> Shape:
        """Return the part of the shape that selects the kernels. `items` affects only their program count."""
        return self._replace(items=0)

    @property
    def sections(self) -> tuple[int, ...]:
        t, s, p = self.tokens, self.samples, self.patches
        return (t, t, t, s, s, RULES * s, p, p, 4 * self.items, 4 * self.blocks, TILE_NUMBERS * self.tiles)

    @property
    def size(self) -> int:
        """Return the size of the block in numbers."""
        return _begins(self)[-1]


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
    items: Any  # [4 x items], in the layout of `DecodeWork.items`
    blocks: Any  # [4 x blocks]
    tiles: Any  # [TILE_NUMBERS x tiles], in the layout of `AdapterArenas.fill`


def views(block: Any, shape: Shape) -> Sections:
    """Split a block into its sections."""
    return Sections(*[block[at : at + size] for at, size in zip(_begins(shape), shape.sections)])  # noqa: B905


@lru_cache(maxsize=1024)
def _begins(shape: Shape) -> list[int]:
    """Return the offset of each section and the size of the block. Offsets are multiples of 16 bytes, since
    Triton recompiles a kernel for unaligned addresses.
    """
    return list(accumulate((-(-size // 4) * 4 for size in shape.sections), initial=0))


class DecodeRows(NamedTuple):
    """The decode rows of a plan, as arrays."""

    starts: Numbers  # [rows]: number of tokens before the row's input token
    slots: Numbers  # [rows]
    chunks: Numbers  # [rows]: chunks of the row's context, one item each


class PageTables:
    """The host's copy of the device's page table, and the patches that update the device."""

    def __init__(self, slots: int, pages_per_row: int, page_size: int) -> None:
        self.pages_per_row = pages_per_row
        self.table: Numbers = np.zeros((slots, pages_per_row), dtype=np.int32)
        self._page_size = page_size
        self._lists: list[list[int]] = [[] for _ in range(slots)]
        self._shown = [0] * slots

    def patches(self, plan: SchedulePlan) -> tuple[list[int], list[int]]:
        """Return indices into the flat table and their new pages.

        A decode row has a new page if its token is the first of the page; all other changes of a request's
        pages come with a prefill. The patches of a failed plan are returned again, until `applied` is called.
        """
        at: list[int] = []
        pages: list[int] = []
        size = self._page_size
        for row in [row for row, start in enumerate(plan.starts) if start % size == 0]:
            request, page = plan.decoding[row], plan.starts[row] // size
            at.append(request.row * self.pages_per_row + page)
            pages.append(request.pages[page])
        for scheduled in plan.prefills:
            request, row = scheduled.request, scheduled.request.row
            shown = self._shown[row] if self._lists[row] is request.pages else 0
            first = row * self.pages_per_row
            at += range(first + shown, first + len(request.pages))
            pages += request.pages[shown:]
        if at:
            self.table.reshape(-1)[at] = pages
        return at, pages

    def applied(self, plan: SchedulePlan) -> None:
        """Record that the patches of a plan have been applied on the device."""
        for request, _, _, _ in plan.prefills:
            self._lists[request.row], self._shown[request.row] = request.pages, len(request.pages)


class Packer:
    """Choose the shape of a plan and fill its block. Padding uses the page table row after the last slot."""

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
        self._numbered = np.arange(slots + 8, dtype=np.int32)  # buckets of rows may have more than `slots`
        self._items = np.repeat(self._numbered[:, None], 4, axis=1)
        self._no_item = np.array([-1, 0, 0, slots], dtype=np.int32)
        self.rules = SlotRules(slots)

    def decode_rows(self, plan: SchedulePlan) -> DecodeRows:
        starts = np.array(plan.starts, dtype=np.int32)
        slots = np.array([request.row for request in plan.decoding], dtype=np.int32)
        return DecodeRows(starts, slots, np.maximum(1, -(-starts // self._chunk_tokens(self._samples(plan)))))

    def _samples(self, plan: SchedulePlan) -> int:
        """Return the number of sampled rows in the step of a plan, including padding."""
        if not plan.prefills:
            return row_bucket(len(plan.starts), self._slots)
        bucket = _mixed_bucket(plan)
        return max(plan.samples, 1) if bucket is None else self._mixed_samples(bucket)

    def shape(self, plan: SchedulePlan, rows: DecodeRows, patches: int) -> Shape:
        """Return the shape of a plan: padded for a graph if it only decodes or is small, else exact.

        A step with prompts always uses the kernels for split rows, which the graphs of such steps use as
        well, so that no kernel is compiled while requests are served.
        """
        samples, items = self._samples(plan), int(rows.chunks.sum())
        if not plan.prefills:
            return decode_shape(samples, items + samples - len(rows.starts))
        if (bucket := _mixed_bucket(plan)) is not None:
            return self.mixed_shape(bucket, items)
        blocks = sum(-(-scheduled.length // self._block_tokens) for scheduled in plan.prefills)
        return Shape(plan.tokens, samples, items, True, blocks, patches, False)

    def mixed_shape(self, tokens: int, items: int) -> Shape:
        """Return the graph shape of a mixed step; `tokens` is a bucket."""
        samples = self._mixed_samples(tokens)
        blocks = tokens // self._block_tokens + MIXED_MAX_CHUNKS + 1
        size = _item_bucket(items, samples, ITEMS_OF_MIXED)
        return Shape(tokens, samples, size, True, blocks, samples + tokens, True)

    def mixed_shapes(self, tokens: int, longest: int) -> list[Shape]:
        """Return the shapes of mixed steps of bucket `tokens`, for contexts of up to `longest` tokens."""
        samples = self._mixed_samples(tokens)
        most = samples * -(-longest // self._chunk_tokens(samples))
        shapes = (self.mixed_shape(tokens, int(samples * many)) for many in ITEMS_OF_MIXED)
        return [shape for number, shape in enumerate(shapes) if number == 0 or shape.items <= most]

    def _mixed_samples(self, tokens: int) -> int:
        return min(tokens, row_bucket(self._slots, self._slots))

    def fill(self, to: Sections, shape: Shape, plan: SchedulePlan, rows: DecodeRows) -> list[Request]:
        """Fill all sections except patches and tiles. Return the requests of the sampled rows, in order."""
        starts, slots, _ = rows
        count, sampled = len(starts), plan.sampled
        np.subtract(-1, slots, out=to.source[:count])
        pairs = enumerate(zip(plan.decoding, plan.starts, strict=True))
        if known := [row for row, (request, start) in pairs if start < len(request.tokens)]:
            to.source[known] = [sampled[row].tokens[plan.starts[row]] for row in known]
        to.position[:count] = starts
        to.slot[:count] = 0
        to.wanted[:count] = self._numbered[:count]
        to.owner[:count] = slots
        self._fill_items(to.items.reshape(-1, 4), shape, rows)
        if plan.prefills:
            self._fill_prefills(to, plan)
        else:
            to.source[count:], to.position[count:], to.slot[count:] = 0, 0, 0
        to.wanted[len(sampled) :] = 0
        to.owner[len(sampled) :] = self._slots
        self.rules.fill(to.rules.reshape(RULES, -1), to.owner[: len(sampled)], sampled_ends(plan))
        return sampled

    def _fill_items(self, items: Numbers, shape: Shape, rows: DecodeRows) -> None:
        """Write one item per chunk of a row. Without prefill, padding rows have one item, yielding zeros."""
        (starts, slots, chunks), count = rows, len(rows.starts)
        ends = chunks.cumsum()
        total = int(ends[-1]) if count else 0
        of_rows = self._items[:count]  # column 0 has the row numbers
        of_rows[:, 1], of_rows[:, 2], of_rows[:, 3] = ends - chunks, starts + 1, slots
        items[:total] = of_rows.repeat(chunks, axis=0)
        np.subtract(np.arange(total, dtype=np.int32), items[:total, 1], out=items[:total, 1])
        items[total:] = self._no_item
        if shape.blocks == 0:
            padding = shape.samples - count
            items[total : total + padding, 0] = self._numbered[count : count + padding]

    def _fill_prefills(self, to: Sections, plan: SchedulePlan) -> None:
        begin = at = sampled = len(plan.starts)
        ids: list[int] = []
        blocks: list[tuple[int, int, int, int]] = []
        for request, start, length, samples in plan.prefills:
            ids += request.tokens[start : start + length]
            blocks += self._blocks(at, request.row, start, length)
            at += length
            self.rules.set(request)
            if samples:
                to.wanted[sampled], to.owner[sampled] = at - 1, request.row
                sampled += 1
        to.source[begin:at], to.source[at:] = ids, 0
        to.position[at:], to.slot[at:] = 0, 0
        self._fill_positions(to.position[begin:at], to.slot[begin:at], plan)
        if len(to.blocks):
            padding = len(to.source) - at
            blocks += self._blocks(at, self._slots, -padding, padding) if padding else []
            to.blocks[: 4 * len(blocks)] = np.array(blocks, dtype=np.int32).reshape(-1)
            to.blocks[4 * len(blocks) :] = 0

    def _fill_positions(self, position: Numbers, slot: Numbers, plan: SchedulePlan) -> None:
        """Write the positions and cache slots of prompt tokens, chunk by chunk."""
        lengths = [scheduled.length for scheduled in plan.prefills]
        ends = np.cumsum(lengths)
        before = np.array([scheduled.start for scheduled in plan.prefills]) - (ends - lengths)
        position[:] = np.arange(ends[-1]) + np.repeat(before, lengths)
        rows = np.repeat([scheduled.request.row for scheduled in plan.prefills], lengths)
        slot[:] = self._tables.table[rows, position // self._page_size] * self._page_size
        slot += position % self._page_size

    def _blocks(self, at: int, row: int, position: int, length: int) -> list[tuple[int, int, int, int]]:
        """Split a chunk into blocks. Padding has negative positions, so that its blocks attend to nothing."""
        step = self._block_tokens
        if position < 0:
            return [
                (at + i, row, -min(step, length - i), min(step, length - i)) for i in range(0, length, step)
            ]
        return [(at + i, row, position + i, min(step, length - i)) for i in range(0, length, step)]


def _mixed_bucket(plan: SchedulePlan) -> int | None:
    """Return the token bucket of a plan with prompts, or None if no graph can run it."""
    tokens = plan.tokens
    if tokens > MIXED_TOKENS[-1] or len(plan.prefills) > MIXED_MAX_CHUNKS:
        return None
    bucket: int = next(size for size in MIXED_TOKENS if size >= tokens)
    return bucket


def sampled_ends(plan: SchedulePlan) -> list[int]:
    """Return the number of tokens before the sampled one, for each sampled row."""
    prompts = [start + length for _, start, length, samples in plan.prefills if samples]
    return [start + 1 for start in plan.starts] + prompts


def decode_shape(rows: int, items: int) -> Shape:
    """Return the graph shape of a decode step. `rows` is a bucket; `items` includes one per padding row."""
    size = _item_bucket(items, rows, ITEMS_OF_FEW if rows <= FEW_ROWS else ITEMS_OF_MANY)
    return Shape(rows, rows, size, size > rows, 0, rows, True)


def decode_shapes(rows: int, max_chunks: int) -> list[Shape]:
    """Return the likely shapes of a bucket. With many rows, the mean context is under half the longest."""
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
