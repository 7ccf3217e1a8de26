"""Launch the attention kernels: tile shapes, split sizes and arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from site_engine.cuda.kernels import attention_kernels as kernels
from site_engine.model.attention_context import Scoring

LOG2_E = 1.4426950408889634


class RotaryTable(NamedTuple):
    """The cosines and sines of the rotary embedding [positions, dim], computed by the model's own module."""

    cosines: torch.Tensor
    sines: torch.Tensor


class Tile(NamedTuple):
    """Keys per block, warps per program, pipeline stages."""

    block: int
    warps: int
    stages: int


DECODE = Tile(64, 2, 4)
DECODE_SHORT = Tile(32, 2, 5)  # for many rows with short contexts: wastes less of the last block
PREFILL = Tile(64, 8, 3)
PREFILL_ROWS = 128  # query tokens times heads per group, per program
CHUNKS = ((16, 64), (32, 128))  # (max rows, tokens): short chunks keep the whole GPU busy
CHUNK = 256
LONG_CHUNK = 512
ENOUGH_PROGRAMS = 1024  # rows times KV heads that keep the GPU busy with long chunks, which need fewer joins


def chunk_tokens(rows: int, kv_heads: int) -> int:
    """Return the number of context tokens per program of the decode kernel."""
    if rows * kv_heads >= ENOUGH_PROGRAMS:
        return LONG_CHUNK
    return next((tokens for most, tokens in CHUNKS if rows <= most), CHUNK)


def decode_tile(work: DecodeWork) -> Tile:
    return DECODE_SHORT if work.chunk == LONG_CHUNK and not work.split else DECODE


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Decode rows of one token each, which are the first packed tokens.

    `items` [work, 4], int32: row, chunk, number of tokens including the new one (0: padding, output zeros),
    row of the page table. The chunks of a row are adjacent and in order. An item of row -1 does nothing.
    """

    items: torch.Tensor
    arrived: torch.Tensor  # [at least rows x kv_heads], int32 zeros
    split: bool  # a row may have more than one chunk
    chunk: int


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Prefill chunks, split into blocks."""

    slots: torch.Tensor  # [tokens]: cache slot of every packed token; 0: not a prompt token
    positions: torch.Tensor  # [tokens]
    blocks: torch.Tensor  # [blocks, 4]


def pdl_kwargs(pdl: bool) -> dict[str, bool]:
    """Return the launch arguments of a kernel that overlaps the previous one and waits for it itself."""
    return {"launch_pdl": True} if pdl else {}


def block_tokens(heads: int, kv_heads: int) -> int:
    """Return the number of query tokens in a prefill block."""
    return max(1, PREFILL_ROWS // (heads // kv_heads))


def _pad(dim: int) -> int:
    return int(max(16, 2 ** math.ceil(math.log2(dim))))


def _whole_pages(page: int, block: int) -> bool:
    return page <= block and block % page == 0 and page & (page - 1) == 0


def _stages(dtype: torch.dtype, stages: int) -> int:
    """Return `stages`, or 1 for float32, whose tiles take twice the shared memory and need not be fast."""
    return stages if dtype.itemsize == 2 else 1


def _scoring(scoring: Scoring, query: torch.Tensor) -> dict[str, Any]:
    return {
        "sinks": query if scoring.sinks is None else scoring.sinks,
        "scale2": scoring.scale * LOG2_E,
        "softcap": scoring.softcap or 1.0,
        "WINDOW": scoring.window or 0,
        "SOFTCAP": scoring.softcap is not None,
        "SINKS": scoring.sinks is not None,
    }


def write(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write key and value [kv_heads, tokens, dim] into pages `[pages, page, kv_heads, dim]` by slot."""
    kv_heads, tokens, key_dim = key.shape
    value_dim = value.shape[2]
    kernels.write_kv[(tokens,)](
        key, value, keys, values, slots,
        key.stride(1), key.stride(0), value.stride(1), value.stride(0),
        KV_HEADS=kv_heads, KV_HEADS_PAD=2 ** math.ceil(math.log2(kv_heads)),
        KEY_DIM=key_dim, KEY_PAD=_pad(key_dim), VALUE_DIM=value_dim, VALUE_PAD=_pad(value_dim),
        num_warps=4,
    )  # fmt: skip


def rotate_in_place(query: torch.Tensor, key: torch.Tensor, work: PrefillWork, rotary: RotaryTable) -> None:
    """Rotate the queries and keys of prompt tokens in place. They must be adjacent in one tensor."""
    heads, tokens, dim = query.shape
    heads += key.shape[0]
    kernels.rotate_heads[(tokens,)](
        query, work.positions, work.slots, rotary.cosines, rotary.sines, query.stride(1),
        HEADS=heads, HEADS_PAD=2 ** math.ceil(math.log2(heads)), DIM=dim, HALF_PAD=_pad(dim) // 2,
        num_warps=4,
    )  # fmt: skip


def decode(  # noqa: PLR0917 - the tensors of one call
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    work: DecodeWork,
    out: torch.Tensor,
    scoring: Scoring,
    rotary: RotaryTable | None = None,
    tile: Tile | None = None,
    *,
    pdl: bool = False,
) -> None:
    """Attend decode rows: query [heads, tokens, dim], key and value [kv_heads, tokens, dim].

    Writes the rows' keys and values into their pages and the result into out [tokens, heads, value dim].
    """
    tile = tile or decode_tile(work)
    heads, _, key_dim = query.shape
    kv_heads, value_dim = value.shape[0], value.shape[2]
    page = keys.shape[1]
    group = heads // kv_heads
    ends = -(-work.items.shape[0] * heads // 4) * 4  # Triton recompiles for unaligned addresses
    parts = torch.empty(ends * (value_dim + 2) if work.split else 1, dtype=torch.float32, device=query.device)
    tops = parts[ends * value_dim :] if work.split else parts
    sums = tops[ends:] if work.split else parts
    kernels.decode_rows[(work.items.shape[0] * kv_heads,)](
        query, key, value, keys, values, table, work.items, out,
        parts, tops, sums, work.arrived,
        cosines=query if rotary is None else rotary.cosines, sines=query if rotary is None else rotary.sines,
        query_token=query.stride(1), query_head=query.stride(0),
        key_token=key.stride(1), key_head=key.stride(0),
        value_token=value.stride(1), value_head=value.stride(0), table_row=table.stride(0),
        KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=_pad(group),
        KEY_DIM=key_dim, KEY_PAD=_pad(key_dim), VALUE_DIM=value_dim, VALUE_PAD=_pad(value_dim),
        PAGE=page, WHOLE_PAGES=_whole_pages(page, tile.block), BLOCK=tile.block, CHUNK=work.chunk,
        SPLIT=work.split, ROTARY=rotary is not None, PDL=pdl, **_scoring(scoring, query), **pdl_kwargs(pdl),
        num_warps=tile.warps, num_stages=_stages(query.dtype, tile.stages),
    )  # fmt: skip


def prefill(  # noqa: PLR0917 - the tensors of one call
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    blocks: torch.Tensor,
    out: torch.Tensor,
    scoring: Scoring,
    tile: Tile = PREFILL,
) -> None:
    """Attend prefill chunks, block by block. Their keys and values must already be in the pages."""
    heads, _, key_dim = query.shape
    page, kv_heads, value_dim = values.shape[1:]
    kernels.prefill_blocks[(blocks.shape[0], kv_heads)](
        query, keys, values, table, blocks, out,
        query_token=query.stride(1), query_head=query.stride(0), table_row=table.stride(0),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads,
        KEY_DIM=key_dim, KEY_PAD=_pad(key_dim), VALUE_DIM=value_dim, VALUE_PAD=_pad(value_dim),
        PAGE=page, WHOLE_PAGES=_whole_pages(page, tile.block),
        ROWS=PREFILL_ROWS, BLOCK=tile.block, **_scoring(scoring, query),
        num_warps=tile.warps, num_stages=_stages(query.dtype, tile.stages),
    )  # fmt: skip
