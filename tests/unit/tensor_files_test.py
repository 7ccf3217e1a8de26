"""Tensors of safetensors files, read one by one and all at once."""

from __future__ import annotations

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
