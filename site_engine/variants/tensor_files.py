"""Read tensors of safetensors files, never more than there is room for. Pickles are never read."""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import msgspec
import torch

from site_engine.core.loader_turns import pause, released
from site_engine.errors import VariantRefused
from site_engine.model.weights import DTYPES, header, read_into

FLOATS = {
    **DTYPES,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Data types of numbers by their names in safetensors files."""


def read_json(path: Path, max_bytes: int = 1_000_000) -> Any:
    """Read settings. Raises VariantRefused for a file that is cut or too large, and for pipes and folders."""
    if path.exists() and not path.is_file():
        raise VariantRefused(f"{path} is no file")
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise VariantRefused(f"{path} has {size:,} bytes, and at most {max_bytes:,} are read")
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise VariantRefused(f"{path} cannot be read: {error}") from error


LARGE_BYTES = 1 << 20
"""Of a tensor whose hash takes longer than a turn beside an engine."""
MAX_NUMBERS = (1 << 63) - 1
"""The most numbers of a tensor."""

Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBERS)]


class Entry(msgspec.Struct):
    """What a header says of a tensor."""

    dtype: str
    shape: Annotated[list[Size], msgspec.Meta(max_length=64)]
    data_offsets: tuple[Size, Size]  # bytes, from where the data begins


class TensorFile:
    """One file, open for reading. Raises VariantRefused for a file that is cut, and for one without room.

    Files are read into memory, not mapped as `get_tensor` of safetensors does: a page fault there keeps the
    interpreter from other threads.
    """

    def __init__(self, path: Path, *, room_bytes: int | None = None) -> None:
        if path.exists() and not path.is_file():
            raise VariantRefused(f"{path} is no file")
        try:
            size = path.stat().st_size
            if room_bytes is not None and size > room_bytes:
                raise VariantRefused(f"{path} has {size:,} bytes, and there is room for {room_bytes:,}")
            self._begin, found = header(path)
            self._entries = entries_in_order(found, size - self._begin)
            self._file = path.open("rb", buffering=0)
        except (OSError, ValueError) as error:
            raise VariantRefused(f"{path} cannot be read: {error}") from error
        self._path = path
        self.names = [*self._entries]

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name].shape)

    def read(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Read a tensor with the data type of `like`, on its device."""
        return self._read([name]).to(like.device, like.dtype).view(self.shape(name))

    def read_all(self, like: torch.Tensor) -> dict[str, torch.Tensor]:
        """Read every tensor with the data type of `like`, on its device, and refuse numbers not finite.

        Neighbours of one data type are read, checked and converted as one: hundreds of small operations would
        take the interpreter from other threads as often. They share their memory.
        """
        found: dict[str, torch.Tensor] = {}
        for _, run in groupby(self.names, key=lambda name: self._entries[name].dtype):
            names = list(run)
            with released():
                numbers = self._read(names).to(like.device, like.dtype)
                finite = _are_finite(numbers)
            pieces = numbers.split([math.prod(self.shape(name)) for name in names])
            for name, each in zip(names, pieces, strict=True):
                found[name] = each.view(self.shape(name))
            if not finite:
                for name in names:
                    refuse_not_finite(name, found[name])
        return found

    def _read(self, names: list[str]) -> torch.Tensor:
        """Read the numbers of tensors of one data type that lie one after another in the file."""
        kind = self._entries[names[0]].dtype
        if (dtype := FLOATS.get(kind)) is None:
            raise VariantRefused(f"{self._path}: {names[0]} holds {kind}, not floating-point numbers")
        begin, end = (self._entries[names[at]].data_offsets[at] for at in (0, -1))
        read = torch.empty(end - begin, dtype=torch.uint8)
        numbers: Any = read.numpy()
        try:
            read_into(self._file.fileno(), memoryview(numbers), self._begin + begin)
        except OSError as error:
            raise VariantRefused(f"{self._path}: {names[0]} cannot be read: {error}") from error
        return read.view(dtype)


def entries_in_order(found: Any, data_bytes: int) -> dict[str, Entry]:
    """Return the tensors of a header as they lie in the file: one after another, all of it.

    Raises ValueError.
    """
    pause()
    try:
        entries = msgspec.convert(found, dict[str, Entry])
    except msgspec.ValidationError as error:
        raise ValueError(f"it is no safetensors file: {error}") from error
    pause()
    end = 0
    in_order = dict(sorted(entries.items(), key=lambda item: item[1].data_offsets))
    for name, entry in in_order.items():
        pause()
        first, last = entry.data_offsets
        if first != end or last < first:
            raise ValueError(f"{name} does not begin where the tensor before it ends")
        if math.prod(size or 1 for size in entry.shape) > MAX_NUMBERS:
            raise ValueError(f"{name} has too large a shape")
        dtype = FLOATS.get(entry.dtype)
        if dtype is not None and last - first != math.prod(entry.shape) * dtype.itemsize:
            raise ValueError(f"{name} has {last - first:,} bytes, and its shape others")
        end = last
    if end != data_bytes:
        raise ValueError(f"it is cut, or no safetensors file: {data_bytes:,} bytes of data, {end:,} named")
    return in_order


def _are_finite(numbers: torch.Tensor) -> bool:
    """Return whether all numbers are finite: a hundredth of the time that `isfinite` of each takes."""
    return not numbers.numel() or all(bool(torch.isfinite(each)) for each in numbers.aminmax())


def refuse_not_finite(name: str, tensor: torch.Tensor) -> None:
    finite = int(torch.isfinite(tensor).sum())
    if finite < tensor.numel():
        raise VariantRefused(f"{name} holds {tensor.numel() - finite} numbers that are not finite")


def content_hash(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor's shape, data type and numbers."""
    with released() if tensor.nbytes > LARGE_BYTES else nullcontext():
        plain: Any = tensor.detach().cpu().contiguous()
        digest = hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)} ".encode())
        digest.update(memoryview(plain.view(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()
