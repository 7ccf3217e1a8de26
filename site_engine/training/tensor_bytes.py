"""Write and read tensors in the safetensors format, piece by piece.

safetensors' own functions hold the interpreter lock for the whole file, which has half a gigabyte for an
adapter of an 8B model with its moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, BinaryIO

import msgspec
import numpy as np
import torch

from site_engine.core.loader_turns import pause, released
from site_engine.model.weights import MAX_HEADER_BYTES
from site_engine.variants.tensor_files import FLOATS, entries_in_order

PIECE_BYTES = 1 << 20
PIECES_OF_A_TURN = 16
"""Number of pieces copied from a device while an engine step runs."""
ALIGNED_BYTES = 8
NAMES = {dtype: name for name, dtype in FLOATS.items()}
METADATA = "__metadata__"


def write_tensors(file: BinaryIO, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors to a file whose `write` writes all given bytes. Equal tensors make equal files."""
    in_order = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    head, end = dict[str, Any]({METADATA: {**metadata}}), 0
    for name, tensor in in_order:
        begin, end = end, end + tensor.nbytes
        head[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": [*tensor.shape],
            "data_offsets": [begin, end],
        }
        pause()
    text = msgspec.json.encode(head)
    text += b" " * (-len(text) % ALIGNED_BYTES)
    file.write(len(text).to_bytes(8, "little") + text)
    contents = [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in in_order]
    pieces, beside = _pieces(contents), _stream_beside(contents)
    while some := [*islice(pieces, PIECES_OF_A_TURN)]:
        for numbers in _on_host(some, beside):
            pause()
            file.write(memoryview(numbers))


def read_tensors(data: bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return copies of a file's tensors, and its metadata. Raises ValueError for invalid content."""
    begin = 8 + int.from_bytes(data[:8], "little")
    if not 8 < begin <= min(len(data), 8 + MAX_HEADER_BYTES):
        raise ValueError("it is cut, or no safetensors file")
    try:
        head = msgspec.json.decode(data[8:begin], type=dict[str, Any])
        metadata = msgspec.convert(head.pop(METADATA, {}), dict[str, str])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it is no safetensors file: {error}") from error
    found = {}
    for name, entry in entries_in_order(head, len(data) - begin).items():
        pause()
        if entry.dtype not in FLOATS:
            raise ValueError(f"{name} holds {entry.dtype}, not floating-point numbers")
        first, end = entry.data_offsets
        numbers = torch.empty(end - first, dtype=torch.uint8)
        numbers.numpy()[:] = np.frombuffer(data, np.uint8, end - first, begin + first)
        found[name] = numbers.view(FLOATS[entry.dtype]).view(entry.shape)
    return found, metadata


def _pieces(contents: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield lists of consecutive byte tensors [any] of at most PIECE_BYTES in all. Larger ones are split."""
    piece, size = list[torch.Tensor](), 0
    for content in contents:
        for part in content.split(PIECE_BYTES):
            if size + part.nbytes > PIECE_BYTES:
                yield piece
                piece, size = [], 0
            piece.append(part)
            size += part.nbytes
    if piece:
        yield piece


def _stream_beside(tensors: Iterable[torch.Tensor]) -> torch.cuda.Stream | None:
    """Return a stream that copies GPU tensors once they are computed, or None for CPU tensors."""
    device = next((each.device for each in tensors if each.is_cuda), None)
    if device is None:
        return None
    beside = torch.cuda.Stream(device)
    beside.wait_stream(torch.cuda.current_stream(device))
    return beside


def _on_host(pieces: Sequence[Sequence[torch.Tensor]], beside: torch.cuda.Stream | None) -> list[Any]:
    """Return pieces as arrays in host memory.

    A GPU copies them one by one: a large copy would block the driver for other threads.
    """
    with released(), torch.cuda.stream(beside):
        return [torch.cat([*piece]).cpu().numpy() for piece in pieces]
