"""Tensors of safetensors files, read one by one and all at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from site_engine.errors import VariantRefused
from site_engine.variants.tensor_files import TensorFile

LIKE = torch.empty(0)


def written(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "some.safetensors")
    return folder / "some.safetensors"


def mixed() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "b": torch.randn(3, 5),
        "a": torch.randn(7).to(torch.bfloat16),
        "scalar": torch.tensor(2.5, dtype=torch.float16),
        "empty": torch.empty(0, 4),
        "d": torch.randn(2, 2, 2, dtype=torch.float64),
        "e": torch.randn(1, 3).to(torch.bfloat16),
    }


def test_all_tensors_are_those_written(tmp_path: Path) -> None:
    expected = mixed()
    with TensorFile(written(tmp_path, expected)) as file:
        found = file.read_all(LIKE)
        alone = {name: file.read(name, LIKE) for name in file.names}
    assert found.keys() == alone.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == LIKE.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor.to(LIKE.dtype))
        assert torch.equal(alone[name], found[name])


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_the_tensor_that_is_not_finite_is_named(tmp_path: Path, odd: float) -> None:
    tensors = mixed()
    tensors["e"][0, 1] = odd
    with TensorFile(written(tmp_path, tensors)) as file, pytest.raises(VariantRefused, match="e holds 1 num"):
        file.read_all(LIKE)


def test_integers_are_refused_by_name(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2), "whole": torch.ones(2, dtype=torch.int32)}
    with (
        TensorFile(written(tmp_path, tensors)) as file,
        pytest.raises(VariantRefused, match="whole holds"),
    ):
        file.read_all(LIKE)


def test_a_file_that_became_shorter_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, mixed())
    with TensorFile(path) as file:
        with path.open("r+b") as cut:
            cut.truncate(path.stat().st_size - 20)
        with pytest.raises(VariantRefused, match="ends too early"):
            file.read_all(LIKE)


A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED: dict[str, tuple[object, int]] = {
    "no JSON": (b"{", 0),
    "a list": ([A], 8),
    "nested deeply": (b'{"a":' + b"[" * 100_000, 0),
    "an entry that is no entry": ({"a": 3}, 8),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, 8),
    "offsets of another kind": ({"a": {**A, "data_offsets": ["0", "8"]}}, 8),
    "another tensor's place": ({"a": A, "b": {**A, "data_offsets": [4, 12]}}, 12),
    "a gap": ({"a": A, "b": {**A, "data_offsets": [12, 20]}}, 20),
    "beyond the end": ({"a": A, "b": {**A, "data_offsets": [8, 16]}}, 8),
    "more data than named": ({"a": A}, 12),
    "fewer bytes than its shape": ({"a": {**A, "shape": [3]}}, 8),
    "a negative shape": ({"a": {**A, "shape": [-1, -2]}}, 8),
    "a shape of text": ({"a": {**A, "shape": ["2"]}}, 8),
    "a shape of numbers with points": ({"a": {**A, "shape": [2.0]}}, 8),
    "a shape of truth values": ({"a": {**A, "shape": [True, 2]}}, 8),
    "no list as a shape": ({"a": {**A, "shape": {}}}, 8),
    "more than 64 bits": ({"a": {**A, "shape": [10**30, 0], "data_offsets": [0, 0]}}, 0),
    "too many numbers": ({"a": {**A, "shape": [2**62, 4, 0], "data_offsets": [0, 0]}}, 0),
    "very many dimensions": ({"a": {**A, "shape": [2**62] * 40_000}}, 8),
    "offsets with points": ({"a": {**A, "data_offsets": [0.0, 8.0]}}, 8),
    "an end before its begin": (
        {
            "a": {**A, "shape": [10**12], "data_offsets": [0, 4 * 10**12]},
            "b": {"dtype": "I64", "shape": [1], "data_offsets": [4 * 10**12, 8]},
        },
        8,
    ),
    "a data type of no name": ({"a": {**A, "dtype": [1]}}, 8),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_refused(tmp_path: Path, kind: str) -> None:
    told, data_bytes = DAMAGED[kind]
    head = told if isinstance(told, bytes) else json.dumps(told).encode()
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(data_bytes))
    with pytest.raises(VariantRefused, match=r"damaged.safetensors cannot be read: .+") as refused:
        TensorFile(path)
    assert len(str(refused.value)) < 400 + len(str(path))


def test_a_header_longer_than_its_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(VariantRefused, match="cut"):
        TensorFile(path)
