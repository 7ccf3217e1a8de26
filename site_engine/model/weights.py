"""Read safetensors into a device's memory with several threads, each through pinned buffers.

transformers copies them one by one from pageable memory, which takes most of a large model's start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from site_engine.core.tensor_split import Part, part_shape
from site_engine.errors import ModelNotSupported

THREADS = 8
PIECE_BYTES = 8 << 20
MAX_HEADER_BYTES = 100_000_000  # as safetensors has it
SPARE_BYTES = 2 << 30
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

Weights = dict[str, torch.Tensor]


class _Piece(NamedTuple):
    """Rows of bytes of a file, one every `stride` from `offset` on, and where they go [rows, bytes]."""

    path: Path
    offset: int
    stride: int
    target: torch.Tensor


def reader(folder: Path, dtype: torch.dtype, device: torch.device) -> Callable[[], Weights | None] | None:
    """Return what reads a folder's weights; None if they are not plain tensors of `dtype`.

    What it returns raises OSError, and returns None if a GPU has not twice the memory that they take:
    transformers reserves as much again for a moment when it builds a model around them.
    """
    files = _files(folder)
    headers = [(path, *header(path)) for path in files]
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
                pieces += _pieces(path, begin + first, 0, data[None])
        _copy_all(pieces, device)
        return weights

    return read


def read_parts(folder: Path, parts: Mapping[str, Part], device: torch.device) -> Weights:
    """Read parts of a folder's tensors, in the types of its files; of no other tensor a byte is read.

    Raises ModelNotSupported for tensors that are no plain numbers, OSError.
    """
    weights: Weights = {}
    pieces: list[_Piece] = []
    for path in _files(folder):
        begin, entries = header(path)
        for name in entries.keys() & parts.keys():
            entry, part = entries[name], parts[name]
            if (dtype := DTYPES.get(entry["dtype"])) is None:
                raise ModelNotSupported(
                    f"{name} is {entry['dtype']}; tensors that are split are plain numbers"
                )
            shape = tuple(entry["shape"])
            weights[name] = made = torch.zeros(part_shape(part, shape), dtype=dtype, device=device)
            if part.zero:
                continue
            row_bytes = dtype.itemsize * prod(shape[1:])
            offset = begin + entry["data_offsets"][0] + part.rows[0] * row_bytes
            data = made.view(-1).view(torch.uint8)
            if part.columns is None:
                pieces += _pieces(path, offset, 0, data[None])
            else:
                offset += dtype.itemsize * part.columns[0]
                pieces += _pieces(path, offset, row_bytes, data.view(made.shape[0], -1))
    _copy_all(pieces, device)
    return weights


def _pieces(path: Path, offset: int, stride: int, target: torch.Tensor) -> Iterator[_Piece]:
    """Cut what goes to `target` [rows, bytes]: one long row, or many that are shorter than a piece."""
    rows, row_bytes = target.shape
    if rows == 1:
        for at in range(0, row_bytes, PIECE_BYTES):
            yield _Piece(path, offset + at, 0, target[:, at : at + PIECE_BYTES])
        return
    each = max(1, PIECE_BYTES // row_bytes)
    for at in range(0, rows, each):
        yield _Piece(path, offset + at * stride, stride, target[at : at + each])


def _copy_all(pieces: Sequence[_Piece], device: torch.device) -> None:
    with ThreadPoolExecutor(THREADS, "weights") as threads:
        copy = partial(_copy, device=device)
        list(threads.map(copy, [pieces[at::THREADS] for at in range(THREADS)]))


def _files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]  # whatever index is beside it, as transformers does
    if not (folder / INDEX).is_file():
        return []
    named = json.loads((folder / INDEX).read_text())["weight_map"].values()
    return [folder / name for name in sorted(set(named))]


def header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return where the data of a file begins, and what it says of each tensor. Raises OSError, ValueError."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(path.stat().st_size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"{path} is no safetensors file, or cut")
        head = file.read(length)
    try:
        entries = msgspec.json.decode(head, type=dict[str, Any])  # json keeps other threads from running
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error
    entries.pop("__metadata__", None)
    return 8 + length, entries


def _copy(pieces: Sequence[_Piece], device: torch.device) -> None:
    """Copy pieces in sequence: one is read from its file while the previous one is copied to the device."""
    on_gpu = device.type == "cuda"
    largest = max((piece.target.numel() for piece in pieces), default=0)
    buffers = [torch.empty(largest, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
    taken = [torch.cuda.Event() for _ in range(2)] if on_gpu else []
    with torch.cuda.stream(torch.cuda.Stream(device) if on_gpu else None):
        for number, (path, offset, stride, target) in enumerate(pieces):
            buffer = buffers[number % 2][: target.numel()].view(target.shape)
            if taken:
                taken[number % 2].synchronize()
            with path.open("rb", buffering=0) as file:
                for row, view in enumerate(buffer.numpy()):
                    read_into(file.fileno(), memoryview(view), offset + row * stride)
            target.copy_(buffer, non_blocking=True)
            if taken:
                taken[number % 2].record()
    for event in taken:
        event.synchronize()


def read_into(descriptor: int, view: memoryview, offset: int) -> None:
    """Fill a view from a file. Raises OSError if the file is too short."""
    at = 0
    while at < len(view):
        count = os.preadv(descriptor, [view[at:]], offset + at)
        if count == 0:
            raise OSError("a file of weights ends too early")
        at += count
