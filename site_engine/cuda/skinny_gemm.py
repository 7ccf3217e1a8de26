"""Launch GEMMs for few rows, whose kernel prefetches weights while the previous kernel still runs.

A product may be returned in parts, which the next norm sums; the gate is fused with its product. With more
than `MAX_ROWS` rows, cuBLAS is faster. Measured on an H200: docs/decisions/gpu-few-rows.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from site_engine.cuda.architecture import architecture
from site_engine.cuda.attention_launch import pdl_kwargs
from site_engine.cuda.kernels import adapted_gemm_kernels, skinny_gemm_kernels

MAX_ROWS = 128
MAX_ADAPTED_ROWS = 64  # the limit in steps with adapters
FEW_ROWS, BLOCK_ROWS = 16, 64
PROGRAMS = 256  # target number of programs of a product in parts; halved with many rows or columns
SHORT_PROGRAMS, LONG = 192, 2  # target with adapters and few rows, unless depth > LONG * columns
WIDE_COLUMNS, WIDE_ROWS = 4096, 96  # limits for a whole product; with more rows cuBLAS is as fast
ENOUGH_PROGRAMS = 100  # minimum that occupies a device with one program per SM and as many stages as fit
NARROW_COLUMNS = 2048  # below this, a product has smaller tiles; a gate below four times this
RANKS, WIDE_RANKS = 128, 64  # ranks of several adapters per expanding dot; for wide ungated products
SHRUNK_PARTS = 4  # parts of the depth when rows are multiplied by `down`
GATED_SHRUNK_PARTS = 1  # the same for a gated product, which takes longer
FEW_REGISTERS = 128  # maximum per thread, for few rows with adapters, so that more programs fit
TOGETHER_RANKS = 64  # maximum total rank of groups that one program multiplies by `down`
PREFETCH_LINES = 2  # 128-byte lines of each weight row, fetched while the previous kernel still runs
LARGE_SHARED_MEMORY = (9, 10)  # major versions of compute capability
SHARED_BYTES = 220_000  # maximum shared memory of a tile's stages
MAX_STAGES = 8
WIDE_TILE = 64  # minimum columns for the weight as first factor, of which Hopper multiplies 64 rows at a time


class Tile(NamedTuple):
    """Columns per program, depth of a block, warps, pipeline stages."""

    columns: int
    depth: int
    warps: int
    stages: int


OWNED_ROWS, OWNED_TILE = 64, Tile(128, 64, 4, 3)
"""Rows and tile of a program for many rows with versions. Each block of rows reads the weights again."""


class AdapterRows(NamedTuple):
    """The adapter slots of a step's rows. Rows of the base model have -1."""

    tiles: torch.Tensor  # [tiles, TILE_NUMBERS]: in the layout of `AdapterArenas.fill`, every row in one tile
    slots: torch.Tensor  # [rows]
    used: torch.Tensor  # [tiles]: the distinct slots of the rows
    counts: torch.Tensor  # [2]: number of tiles with a slot, number of slots in `used`


class Versions(NamedTuple):
    """The version of a weight that each row uses."""

    own: torch.Tensor  # [slots], int64: offset of a slot's version from the base's, in units of 16 bytes
    slots: torch.Tensor  # [rows]: -1 for rows of the base


class Adapters(NamedTuple):
    """The adapters of one product: the factors of all slots, and the slots of the rows."""

    down: torch.Tensor  # [slots, groups * rank, depth]
    up: torch.Tensor  # [slots, columns, rank]
    scales: torch.Tensor  # [slots, groups], float32
    biases: torch.Tensor  # [slots, columns], without columns if the base has no bias
    ends: tuple[int, int]  # end columns of the first two groups, of at most three
    rows: AdapterRows
    own: torch.Tensor | None  # as in `Versions`; None: all rows use the base's weight
    arrived: torch.Tensor  # the first number, initially 0, counts the programs that finished with `down`


def is_supported(device: torch.device) -> bool:
    """Return whether the device has enough shared memory for the tiles: Hopper, B100, B200. True on a CPU."""
    return device.type == "cpu" or architecture() // 10 in LARGE_SHARED_MEMORY


def whole(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    adapters: Adapters | None = None,
    *,
    pdl: bool,
) -> torch.Tensor:
    """Return the product of hidden [rows, depth] and transposed weight [columns, depth]: [rows, columns]."""
    (rows, depth), columns = hidden.shape, weight.shape[0]
    if columns < NARROW_COLUMNS:
        tile = Tile(16, 128, 4, 4)
    elif adapters is not None:
        tile = Tile(32, 128, 4, 5) if rows <= FEW_ROWS else Tile(64, 64, 4, 6)
    elif columns >= WIDE_COLUMNS and rows <= WIDE_ROWS:
        tile = Tile(64, 128, 4, MAX_STAGES)
    elif rows <= FEW_ROWS:
        tile = Tile(32, 128, 4, 6)
    else:
        return torch.nn.functional.linear(hidden, weight, bias)
    out = hidden.new_empty(rows, columns)
    _launch(hidden, weight, bias, out, tile, depth, adapters, pdl=pdl, prefetch=PREFETCH_LINES)
    return out


def parts(
    hidden: torch.Tensor, weight: torch.Tensor, adapters: Adapters | None = None, *, pdl: bool
) -> torch.Tensor:
    """Return the product as float32 partial sums over parts of the depth, [parts, rows, columns]."""
    (rows, depth), columns = hidden.shape, weight.shape[0]
    tile = Tile(32, 128, 4, 4) if columns < NARROW_COLUMNS else Tile(64, 128, 4, 5)
    across = -(-columns // tile.columns)
    programs = PROGRAMS if rows < BLOCK_ROWS else PROGRAMS // 2
    enough = PROGRAMS // 2 // across * across >= ENOUGH_PROGRAMS
    if adapters is None and columns >= NARROW_COLUMNS and enough:
        tile, programs = tile._replace(stages=MAX_STAGES), PROGRAMS // 2
    elif adapters is not None and rows <= FEW_ROWS:  # leave room for the programs that multiply by `down`
        if depth > LONG * columns:
            tile = tile._replace(stages=3)
        else:
            programs = SHORT_PROGRAMS
    blocks = -(-depth // tile.depth)
    each = max(2, -(-blocks // max(1, programs // across)))
    out = hidden.new_empty(-(-blocks // each), rows, columns, dtype=torch.float32)
    _launch(hidden, weight, None, out, tile, each * tile.depth, adapters, pdl=pdl, prefetch=0)
    return out


def gated(
    hidden: torch.Tensor, gate_up: torch.Tensor, adapters: Adapters | None = None, *, pdl: bool
) -> torch.Tensor:
    """Return silu(hidden @ gate.T) * (hidden @ up.T). `gate_up` has the rows of gate, then those of up."""
    rows, depth = hidden.shape
    columns = gate_up.shape[0] // 2
    out = hidden.new_empty(rows, columns)
    narrow = columns < 4 * NARROW_COLUMNS
    if narrow and rows <= FEW_ROWS:
        tile = Tile(32, 128, 4, 4)
    elif adapters is not None:
        tile = Tile(64, 64, 4, 4) if rows > FEW_ROWS else Tile(64, 128, 4, 3)
    elif rows > BLOCK_ROWS:
        tile = Tile(64, 64, 4, 6) if narrow else Tile(128, 64, 8, 4)
    else:
        tile = Tile(64, 64, 4, 4) if rows > BLOCK_ROWS // 2 else Tile(64, 128, 4, 4)
    _launch(hidden, gate_up, None, out, tile, depth, adapters, pdl=pdl, prefetch=PREFETCH_LINES)
    return out


def _row_blocks(rows: int) -> tuple[int, int]:
    """Return the sizes, powers of two, of one or two blocks that hold `rows` rows. The second may be 0."""
    if rows <= BLOCK_ROWS:
        return _padded(rows), 0
    more = rows - BLOCK_ROWS
    return (BLOCK_ROWS, _padded(more)) if more <= BLOCK_ROWS // 2 else (_padded(rows), 0)


def _padded(rows: int) -> int:
    return max(16, 1 << (rows - 1).bit_length())


def owned(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, versions: Versions
) -> torch.Tensor:
    """Return the product of any number of rows, each with its own version of the weight."""
    (rows, depth), columns = hidden.shape, weight.shape[0]
    out = hidden.new_empty(rows, columns)
    tile = OWNED_TILE
    adapted_gemm_kernels.owned_gemm_rows[(-(-rows // OWNED_ROWS), -(-columns // tile.columns))](
        hidden, weight, weight if bias is None else bias, out, versions.own, versions.slots,
        rows, columns, depth, versions.own.stride(0), ROWS_PAD=OWNED_ROWS, COLUMNS=tile.columns,
        DEPTH=tile.depth, BIAS=bias is not None, EVEN=depth % tile.depth == 0,
        num_warps=tile.warps, num_stages=tile.stages if hidden.element_size() == 2 else 1,
    )  # fmt: skip
    return out


def _launch(  # noqa: PLR0917 - the tensors of one call
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
    part_depth: int,
    adapters: Adapters | None,
    *,
    pdl: bool,
    prefetch: int,
) -> None:
    rows, depth = hidden.shape
    columns = out.shape[-1]
    grid = (-(-columns // tile.columns), -(-depth // part_depth))
    given = (hidden, weight, weight if bias is None else bias, out)
    common = {
        "COLUMNS": tile.columns, "DEPTH": tile.depth,
        "GATED": weight.shape[0] != columns, "BIAS": bias is not None, "SPLIT": out.dim() == 3,
        "EVEN": (depth | part_depth) % tile.depth == 0, "PDL": pdl, "PREFETCH": prefetch, **pdl_kwargs(pdl),
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    if adapters is None:
        wide = tile.columns >= WIDE_TILE
        block, more = _row_blocks(rows) if wide else (_padded(rows), 0)
        stage = (block + more + tile.columns * weight.shape[0] // columns) * tile.depth
        common["num_stages"] = min(tile.stages, SHARED_BYTES // (stage * hidden.element_size()))
        skinny_gemm_kernels.skinny_gemm_rows[grid](
            *given, rows, columns, depth, part_depth, ROWS=block, MORE=more, WEIGHT_FIRST=wide, **common
        )
        return
    down, up, scales, biases, ends, which, own, arrived = adapters
    groups, rank, count, few = scales.shape[1], up.shape[2], len(which.tiles), rows <= FEW_ROWS
    together, width = side_by_side(groups, rank)
    ranks = RANKS if common["GATED"] or columns < NARROW_COLUMNS else WIDE_RANKS
    blocks = -(-depth // tile.depth)
    shrunk_depth = -(-blocks // (GATED_SHRUNK_PARTS if common["GATED"] else SHRUNK_PARTS)) * tile.depth
    shrunk_parts = -(-depth // shrunk_depth)
    shrunk = hidden.new_empty(shrunk_parts, rows, groups * rank, dtype=torch.float32)
    adapted_gemm_kernels.adapted_gemm_rows[(count * groups // together * shrunk_parts + grid[0] * grid[1],)](
        *given, down, up, scales, biases, *which, shrunk, arrived, arrived if own is None else own,
        rows, columns, depth, part_depth, shrunk_depth, grid[1], count, *ends,
        down.stride(0), up.stride(0), scales.stride(0), biases.stride(0),
        0 if own is None else own.stride(0), RANK=rank, RANKS=max(ranks, rank), GROUPS=groups,
        TOGETHER=together, WIDTH=width, SHRUNK_PARTS=shrunk_parts,
        PARTS_PAD=1 << (shrunk_parts - 1).bit_length(),
        EXPAND_STAGES=tile.stages, FEW=few, BIASED=biases.shape[1] > 0,
        OWN=own is not None, ROWS_PAD=_padded(rows), maxnreg=FEW_REGISTERS if few else None, **common,
    )  # fmt: skip


def side_by_side(groups: int, rank: int) -> tuple[int, int]:
    """Return the number of groups that one program multiplies by `down`, and their total rank, rounded up to
    a power of two.
    """
    together = groups if groups * rank <= TOGETHER_RANKS else 1
    return together, 1 << (together * rank - 1).bit_length()
