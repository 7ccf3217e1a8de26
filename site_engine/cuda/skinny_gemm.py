"""Launch GEMMs for few rows, whose kernel prefetches weights while the kernel before it still runs.

A product may come in parts, which the next norm adds up; the gate is fused with its product. With more rows
than `MAX_ROWS` cuBLAS is as fast. Measured on an H200: docs/decisions/gpu-few-rows.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from site_engine.cuda.architecture import architecture
from site_engine.cuda.attention_launch import pdl_kwargs
from site_engine.cuda.kernels import adapter_kernels, skinny_gemm_kernels

MAX_ROWS = 64
FEW_ROWS = 16
PROGRAMS = 256  # of a product in parts; half of it with the most rows
NARROW_COLUMNS = 2048  # a product with fewer columns is cut finer, a gate with fewer than four times as many
PREFETCH_LINES = 2  # 128-byte lines of each weight row fetched while the kernel before still runs
LARGE_SHARED_MEMORY = (9, 10)  # generations of compute capability


class Tile(NamedTuple):
    """Columns per program, depth of a block, warps, pipeline stages."""

    columns: int
    depth: int
    warps: int
    stages: int


class Shrink(NamedTuple):
    """What adapters shrink rows by, for programs beside those of a product."""

    down: torch.Tensor  # [slots, groups * rank, depth]
    tiles: torch.Tensor  # [tiles, numbers]: as the kernels of adapters get them
    rank: int


def is_supported(device: torch.device) -> bool:
    """Return whether the device has the 160 KB of shared memory that tiles take: Hopper, B100, B200."""
    return device.type == "cpu" or architecture() // 10 in LARGE_SHARED_MEMORY


def whole(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, pdl: bool
) -> torch.Tensor:
    """Return hidden [rows, depth] times weight [columns, depth] transposed: [rows, columns]."""
    rows, depth = hidden.shape
    narrow = weight.shape[0] < NARROW_COLUMNS
    if not narrow and rows > FEW_ROWS:
        return torch.nn.functional.linear(hidden, weight, bias)
    out = hidden.new_empty(rows, weight.shape[0])
    tile = Tile(16, 128, 4, 4) if narrow else Tile(32, 128, 4, 6)
    _launch(hidden, weight, bias, out, tile, depth, pdl=pdl, prefetch=PREFETCH_LINES)
    return out


def parts(hidden: torch.Tensor, weight: torch.Tensor, *, pdl: bool) -> torch.Tensor:
    """Return the product as float32 sums over parts of the depth, [parts, rows, columns], to be added."""
    rows, depth = hidden.shape
    columns = weight.shape[0]
    tile = Tile(32, 128, 4, 4) if columns < NARROW_COLUMNS else Tile(64, 128, 4, 5)
    count, each = _split(rows, depth, columns, tile)
    out = hidden.new_empty(count, rows, columns, dtype=torch.float32)
    _launch(hidden, weight, None, out, tile, each * tile.depth, pdl=pdl, prefetch=0)
    return out


def _split(rows: int, depth: int, columns: int, tile: Tile) -> tuple[int, int]:
    """Return in how many parts the depth is cut, and the blocks of each."""
    programs = PROGRAMS if rows < MAX_ROWS else PROGRAMS // 2
    blocks = -(-depth // tile.depth)
    each = max(2, -(-blocks // max(1, programs // -(-columns // tile.columns))))
    return -(-blocks // each), each


def shrunk_whole(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shrink: Shrink, *, pdl: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product as `whole` does, and the rows shrunk: [1, rows, groups * rank] in float32."""
    rows, depth = hidden.shape
    narrow = weight.shape[0] < NARROW_COLUMNS
    wide = Tile(32, 128, 4, 6) if rows <= FEW_ROWS else Tile(64, 128, 4, 3)
    out = hidden.new_empty(rows, weight.shape[0])
    tile = Tile(16, 128, 4, 4) if narrow else wide
    return out, _launch_shrunk(
        hidden, weight, bias, out, shrink, tile, depth, pdl=pdl, prefetch=PREFETCH_LINES
    )


def shrunk_parts(
    hidden: torch.Tensor, weight: torch.Tensor, shrink: Shrink, *, pdl: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product in parts as `parts` does, and as many parts of the rows shrunk."""
    rows, depth = hidden.shape
    columns = weight.shape[0]
    # fewer stages than of `parts`: two programs fit on a multiprocessor, one of them may shrink
    tile = Tile(32 if columns < NARROW_COLUMNS else 64, 128, 4, 3)
    count, each = _split(rows, depth, columns, tile)
    out = hidden.new_empty(count, rows, columns, dtype=torch.float32)
    return out, _launch_shrunk(
        hidden, weight, None, out, shrink, tile, each * tile.depth, pdl=pdl, prefetch=0
    )


def gated(hidden: torch.Tensor, gate_up: torch.Tensor, *, pdl: bool) -> torch.Tensor:
    """Return silu(hidden gate) * (hidden up); `gate_up` has the gate's rows, then the up projection's."""
    rows, depth = hidden.shape
    columns = gate_up.shape[0] // 2
    out = hidden.new_empty(rows, columns)
    fine = rows <= FEW_ROWS and columns < 4 * NARROW_COLUMNS
    tile = Tile(32, 128, 4, 4) if fine else Tile(64, 128, 4, 3)
    _launch(hidden, gate_up, None, out, tile, depth, pdl=pdl, prefetch=PREFETCH_LINES)
    return out


def _launch(  # noqa: PLR0917 - the tensors of one call
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
    part_depth: int,
    *,
    pdl: bool,
    prefetch: int,
) -> None:
    rows, depth = hidden.shape
    columns = out.shape[-1]
    skinny_gemm_kernels.skinny_gemm_rows[(-(-columns // tile.columns), -(-depth // part_depth))](
        hidden, weight, weight if bias is None else bias, out, rows, columns, depth, part_depth,
        ROWS_PAD=max(16, 1 << (rows - 1).bit_length()), COLUMNS=tile.columns, DEPTH=tile.depth,
        GATED=weight.shape[0] != columns, BIAS=bias is not None, SPLIT=out.dim() == 3,
        EVEN=(depth | part_depth) % tile.depth == 0, PDL=pdl, PREFETCH=prefetch, **pdl_kwargs(pdl),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _launch_shrunk(  # noqa: PLR0917 - the tensors of one call
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    shrink: Shrink,
    tile: Tile,
    part_depth: int,
    *,
    pdl: bool,
    prefetch: int,
) -> torch.Tensor:
    (rows, depth), columns = hidden.shape, out.shape[-1]
    down, tiles, rank = shrink
    width, parts, count = down.shape[1], -(-depth // part_depth), len(tiles)
    shrunk = hidden.new_empty(parts, rows, width, dtype=torch.float32)
    grid = (-(-columns // tile.columns) + count * (width // rank), parts)
    adapter_kernels.skinny_gemm_shrink_rows[grid](
        hidden, weight, weight if bias is None else bias, out, down, tiles, shrunk,
        rows, columns, depth, part_depth, width, down.stride(0), count,
        ROWS_PAD=max(16, 1 << (rows - 1).bit_length()), COLUMNS=tile.columns, DEPTH=tile.depth, RANK=rank,
        BIAS=bias is not None, SPLIT=out.dim() == 3, EVEN=(depth | part_depth) % tile.depth == 0,
        PDL=pdl, PREFETCH=prefetch, **pdl_kwargs(pdl), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return shrunk
