"""Read the header of a GGUF file: its metadata and its table of tensors, without the weights.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from site_engine.errors import ModelNotSupported

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
NUMBERS = dict(enumerate(["B", "b", "H", "h", "I", "i", "f", "?"])) | {10: "Q", 11: "q", 12: "d"}
"""The `struct` formats of the value types that have a fixed size."""
MAX_NESTED_ARRAYS = 4
MAX_DIMENSIONS = 4


class Tensor(NamedTuple):
    """A tensor of the file. `shape` is in torch's order, `kind` the number of its GGML type."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    metadata: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    data_start: int

    @property
    def family(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def elements(self) -> int:
        """Return the number of weights."""
        return sum(tensor.elements for tensor in self.tensors)


def read_header(path: Path) -> Header:
    """Read the header. Raises ModelNotSupported if the file is no GGUF, of another version, or cut."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            header = HeaderReader(content).header()
    except ValueError as error:  # of mmap: an empty file; of the reader: no GGUF
        raise ModelNotSupported(f"{path} is no GGUF file: {error}") from error
    except (struct.error, IndexError) as error:
        raise ModelNotSupported(f"{path} is cut: it ends within its header") from error
    except OSError as error:
        raise ModelNotSupported(f"{path} cannot be read: {error.strerror}") from error
    check_length(path, header)
    return header


def check_length(path: Path, header: Header) -> None:
    """Raise ModelNotSupported if the file ends before its last tensor."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    end = header.data_start
    for tensor in header.tensors:
        if tensor.kind not in set(GGMLQuantizationType):
            raise ModelNotSupported(f"{path}: {tensor.name} is of GGML type {tensor.kind}, which is unknown")
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
        end = max(end, header.data_start + tensor.offset + tensor.elements // block * block_bytes)
    size = path.stat().st_size
    if size < end:
        raise ModelNotSupported(f"{path} is cut: it has {size:,} bytes of at least {end:,}")


class HeaderReader:
    """A place in the bytes of a file. Raises struct.error, IndexError or ValueError where they are wrong."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content = content
        self.place = 0

    def header(self) -> Header:
        if self.take(4) != MAGIC:
            raise ValueError("its first four bytes are not GGUF")
        version = self.number("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version} of the format; {VERSIONS} are read")
        tensor_count, entry_count = self.number("Q"), self.number("Q")
        metadata = {self.string(): self.value(self.number("I")) for _ in range(entry_count)}
        tensors = tuple(self.tensor() for _ in range(tensor_count))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"an alignment of {alignment!r}")
        return Header(metadata, tensors, -(-self.place // alignment) * alignment)

    def tensor(self) -> Tensor:
        name, dimensions = self.string(), self.number("I")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))
        return Tensor(name, shape[::-1], self.number("I"), self.number("Q"))

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY or depth > MAX_NESTED_ARRAYS:
            raise ValueError(f"a value of type {kind} is unknown")
        of, count = self.number("I"), self.number("Q")
        if of in NUMBERS:
            shape = f"<{count}{NUMBERS[of]}"
            return list(struct.unpack(shape, self.take(struct.calcsize(shape))))
        return [self.value(of, depth + 1) for _ in range(count)]

    def number(self, kind: str) -> Any:
        (found,) = struct.unpack_from(f"<{kind}", self.content, self.place)
        self.place += struct.calcsize(f"<{kind}")
        return found

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def take(self, count: int) -> bytes:
        if self.place + count > len(self.content):
            raise IndexError(f"{count} bytes at {self.place} of {len(self.content)}")
        self.place += count
        return self.content[self.place - count : self.place]
