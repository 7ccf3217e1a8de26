"""Read safetensors into a device's memory with several threads, each through pinned buffers.

transformers copies them one by one from pageable memory, which takes most of a large model's start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

THREADS = 8
PIECE_BYTES = 8 << 20
SPARE_BYTES = 2 << 30
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

Weights = dict[str, torch.Tensor]


class _Piece(NamedTuple):
    """Bytes of a file, from `offset` on, and where on the device they go [bytes]."""

    path: Path
    offset: int
    target: torch.Tensor


def reader(folder: Path, dtype: torch.dtype, device: torch.device) -> Callable[[], Weights | None] | None:
    """Return what reads a folder's weights; None if they are not plain tensors of `dtype`.

    What it returns raises OSError, and returns None if a GPU has not twice the memory that they take:
    transformers reserves as much again for a moment when it builds a model around them.
    """
    files = _files(folder)
    headers = [(path, *_header(path)) for path in files]
    kinds = {DTYPES.get(entry["dtype"]) for _, _, entries in headers for entry in entries.values()}
    if kinds != {dtype}:
        return None

    def read() -> Weights | None:
        size_bytes = sum(path.stat().st_size for path in files)
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 2 * size_bytes + SPARE_BYTES:
            return None
        weights: Weights = {}
        pieces: list[_Piece] = []
        for path, begin, entries in headers:
            for name, entry in entries.items():
                first, end = entry["data_offsets"]
                data = torch.empty(end - first, dtype=torch.uint8, device=device)
                weights[name] = data.view(dtype).view(entry["shape"])
                pieces += [
                    _Piece(path, begin + first + at, data[at : at + PIECE_BYTES])
                    for at in range(0, end - first, PIECE_BYTES)
                ]
        with ThreadPoolExecutor(THREADS, "weights") as threads:
            copy = partial(_copy, device=device)
            list(threads.map(copy, [pieces[at::THREADS] for at in range(THREADS)]))
        return weights

    return read


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        named = json.loads((folder / INDEX).read_text())["weight_map"].values()
        return [folder / name for name in sorted(set(named))]
    return [folder / SINGLE] if (folder / SINGLE).is_file() else []


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return where the data of a file begins, and what it says of each tensor."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    return 8 + length, entries


def _copy(pieces: Sequence[_Piece], device: torch.device) -> None:
    """Copy pieces one after another: one is read from its file while the device takes the one before."""
    on_gpu = device.type == "cuda"
    buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
    taken = [torch.cuda.Event() for _ in range(2)] if on_gpu else []
    with torch.cuda.stream(torch.cuda.Stream(device) if on_gpu else None):
        for number, (path, offset, target) in enumerate(pieces):
            buffer = buffers[number % 2][: len(target)]
            if taken:
                taken[number % 2].synchronize()
            with path.open("rb", buffering=0) as file:
                _read(file.fileno(), memoryview(buffer.numpy()), offset)
            target.copy_(buffer, non_blocking=True)
            if taken:
                taken[number % 2].record()
    for event in taken:
        event.synchronize()


def _read(descriptor: int, view: memoryview, offset: int) -> None:
    """Fill a view from a file. Raises OSError if the file ends before."""
    at = 0
    while at < len(view):
        count = os.preadv(descriptor, [view[at:]], offset + at)
        if count == 0:
            raise OSError("a file of weights ends too early")
        at += count
