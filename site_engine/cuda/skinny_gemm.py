"""Products of few rows by our own kernel, which starts on its weights while the kernel before it still runs.

A product comes in parts, which the next norm adds up, and the gate is computed with its product. With more
rows than `MOST_ROWS` the library's products are as fast. Measured on an H200: docs/decisions/gpu-few-rows.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from site_engine.cuda.attention_launch import launched
from site_engine.cuda.kernels import skinny_gemm_kernels

MOST_ROWS = 64
FEW_ROWS = 16
PROGRAMS = 256  # of a product in parts; half of it with the most rows
NARROW_COLUMNS = 2048  # a product with fewer columns is cut finer, a gate with fewer than four times as many
LINES_AHEAD = 2  # of each row of weights, fetched while the kernel before still runs
ROOMY = (9, 10)  # generations of compute capability


class Tile(NamedTuple):
    """Columns of a program, depth of a block, warps, blocks under way."""

    columns: int
    depth: int
    warps: int
    stages: int


def fits(device: torch.device) -> bool:
    """Tiles take up to 160 KB of shared memory, which Hopper and the data centre's Blackwell have."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in ROOMY


def whole(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, early: bool
) -> torch.Tensor:
    """hidden [rows, depth] times weight [columns, depth] transposed: [rows, columns]."""
    rows, depth = hidden.shape
    narrow = weight.shape[0] < NARROW_COLUMNS
    if not narrow and rows > FEW_ROWS:
        return torch.nn.functional.linear(hidden, weight, bias)
    out = hidden.new_empty(rows, weight.shape[0])
    tile = Tile(16, 128, 4, 4) if narrow else Tile(32, 128, 4, 6)
    _launch(hidden, weight, bias, out, tile, depth, early=early, ahead=LINES_AHEAD)
    return out


def parts(hidden: torch.Tensor, weight: torch.Tensor, *, early: bool) -> torch.Tensor:
    """The same product as float32 sums over parts of the depth: [parts, rows, columns], to be added up."""
    rows, depth = hidden.shape
    columns = weight.shape[0]
    tile = Tile(32, 128, 4, 4) if columns < NARROW_COLUMNS else Tile(64, 128, 4, 5)
    programs = PROGRAMS if rows < MOST_ROWS else PROGRAMS // 2
    blocks = -(-depth // tile.depth)
    each = max(2, -(-blocks // max(1, programs // -(-columns // tile.columns))))
    out = hidden.new_empty(-(-blocks // each), rows, columns, dtype=torch.float32)
    _launch(hidden, weight, None, out, tile, each * tile.depth, early=early, ahead=0)
    return out


def gated(hidden: torch.Tensor, gate_up: torch.Tensor, *, early: bool) -> torch.Tensor:
    """silu(hidden gate) * (hidden up); the weight has the gate's rows, then those of the up projection."""
    rows, depth = hidden.shape
    columns = gate_up.shape[0] // 2
    out = hidden.new_empty(rows, columns)
    fine = rows <= FEW_ROWS and columns < 4 * NARROW_COLUMNS
    tile = Tile(32, 128, 4, 4) if fine else Tile(64, 128, 4, 3)
    _launch(hidden, gate_up, None, out, tile, depth, early=early, ahead=LINES_AHEAD)
    return out


def _launch(  # noqa: PLR0917 - the tensors of one call
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
    part_depth: int,
    *,
    early: bool,
    ahead: int,
) -> None:
    rows, depth = hidden.shape
    columns = out.shape[-1]
    skinny_gemm_kernels.thin_product[(-(-columns // tile.columns), -(-depth // part_depth))](
        hidden, weight, weight if bias is None else bias, out, rows, columns, depth, part_depth,
        ROWS_PAD=max(16, 1 << (rows - 1).bit_length()), COLUMNS=tile.columns, DEPTH=tile.depth,
        GATED=weight.shape[0] != columns, BIAS=bias is not None, SPLIT=out.dim() == 3,
        EVEN=(depth | part_depth) % tile.depth == 0, EARLY=early, AHEAD=ahead, **launched(early),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
