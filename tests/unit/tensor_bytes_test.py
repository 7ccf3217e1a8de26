"""Files of tensors, against safetensors itself."""

from __future__ import annotations

from io import BytesIO

import pytest
import torch
from safetensors.torch import load, save

from site_engine.training import tensor_bytes
from site_engine.training.tensor_bytes import PIECE_BYTES, PIECES_OF_A_TURN, read_tensors, write_tensors

TENSORS = {
    "b": torch.randn(3, 5),
    "a": torch.randn(2, 7).to(torch.bfloat16),
    "part": torch.randn(9, 4)[2:5, 1:],
    "none": torch.empty(0, 4),
    "number": torch.tensor(7.0),
    "wide": torch.randn(64, dtype=torch.float64),
    "large": torch.randn(PIECE_BYTES // 4 * (PIECES_OF_A_TURN + 1) + 3),
    "repeated": torch.ones(1).expand(5),
}
METADATA = {"format": "pt", "note": "größer"}


def written() -> bytes:
    file = BytesIO()
    write_tensors(file, TENSORS, METADATA)
    return file.getvalue()


def test_a_file_is_the_one_that_safetensors_writes() -> None:
    expected = save({name: each.contiguous() for name, each in TENSORS.items()}, metadata={"format": "pt"})
    file = BytesIO()
    write_tensors(file, TENSORS, {"format": "pt"})
    assert file.getvalue() == expected


def test_what_is_written_is_read_here_and_by_safetensors() -> None:
    found, metadata = read_tensors(written())
    assert metadata == METADATA
    for tensors in (found, load(written())):
        assert tensors.keys() == TENSORS.keys()
        for name, each in TENSORS.items():
            assert tensors[name].dtype is each.dtype
            assert torch.equal(tensors[name], each)


def test_tensors_that_share_their_memory_are_written_each() -> None:
    file, shared = BytesIO(), torch.tensor(3.0)
    write_tensors(file, {"one": shared, "other": shared}, {})
    found, _ = read_tensors(file.getvalue())
    found["one"] += 1.0
    assert (float(found["one"]), float(found["other"]), float(shared)) == (4.0, 3.0, 3.0)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        written()[:6],
        written()[:90],
        written()[:-1],
        written() + b"\0",
        (2**63).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"{{}}",
        save({"integers": torch.arange(4)}),
    ],
)
def test_what_is_no_such_file_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"cut|no safetensors file|not floating-point"):
        read_tensors(data)


def test_a_header_larger_than_any_file_s_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_bytes, "MAX_HEADER_BYTES", 8)
    with pytest.raises(ValueError, match="no safetensors file"):
        read_tensors(written())
