"""Read tensors of safetensors files, never more than there is room for. Pickles are never read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

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


class TensorFile:
    """One file, open for reading. Raises VariantRefused for a file that is cut, and for one without room.

    Tensors are read into memory of their own. With `get_tensor` of safetensors, which maps the file, another
    thread waits for the interpreter up to ten times as long: 10 ms of an adapter's 15.
    """

    def __init__(self, path: Path, *, room_bytes: int | None = None) -> None:
        if path.exists() and not path.is_file():
            raise VariantRefused(f"{path} is no file")
        try:
            with safe_open(str(path), framework="pt") as checked:
                self.names: list[str] = sorted(checked.keys())
            self._begin, self._entries = header(path)
            self._file = path.open("rb", buffering=0)
        except (OSError, SafetensorError) as error:
            raise VariantRefused(f"{path} cannot be read: {error}") from error
        self._path = path
        if room_bytes is not None and path.stat().st_size > room_bytes:
            self._file.close()
            size = path.stat().st_size
            raise VariantRefused(f"{path} has {size:,} bytes, and there is room for {room_bytes:,}")

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name]["shape"])

    def read(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Read a tensor with the data type of `like`, on its device."""
        entry = self._entries[name]
        if (dtype := FLOATS.get(entry["dtype"])) is None:
            raise VariantRefused(f"{self._path}: {name} holds {entry['dtype']}, not floating-point numbers")
        tensor = torch.empty(entry["shape"], dtype=dtype)
        numbers: Any = tensor.view(-1).view(torch.uint8).numpy()
        try:
            read_into(self._file.fileno(), memoryview(numbers), self._begin + entry["data_offsets"][0])
        except OSError as error:
            raise VariantRefused(f"{self._path}: {name} cannot be read: {error}") from error
        return tensor.to(like.device, like.dtype)


def refuse_not_finite(name: str, tensor: torch.Tensor) -> None:
    finite = int(torch.isfinite(tensor).sum())
    if finite < tensor.numel():
        raise VariantRefused(f"{name} holds {tensor.numel() - finite} numbers that are not finite")


def content_hash(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor's shape, data type and numbers."""
    plain: Any = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)} ".encode())
    digest.update(memoryview(plain.view(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()
