"""The product that an adapter adds in 16 bits: as in float32 but for rounding, and so are its gradients."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from site_engine.core.training import AdapterShape
from site_engine.training.adapter import AddedProduct, write_folder


@pytest.mark.parametrize("shape", [(1, 9, 24), (7, 24)])
def test_a_product_of_16_bits_and_its_gradients_are_those_of_float32_but_for_rounding(
    shape: tuple[int, ...],
) -> None:
    draw = torch.Generator().manual_seed(0)
    given, out = (
        torch.randn(*shape[:-1], width, generator=draw).bfloat16().requires_grad_() for width in (24, 40)
    )
    down, up = (torch.randn(*size, generator=draw).requires_grad_() for size in ((4, 24), (40, 4)))
    exact = [each.detach().float().requires_grad_() for each in (given, out, down, up)]
    found = AddedProduct.apply(given, out, down, up)
    wanted = exact[1] + exact[0] @ exact[2].T @ exact[3].T
    gradient = torch.randn(wanted.shape, generator=draw)
    found.backward(gradient.bfloat16())
    wanted.backward(gradient)
    pairs = [
        (found, wanted),
        *zip((each.grad for each in (given, out, down, up)), (each.grad for each in exact), strict=True),
    ]
    for one, other in pairs:
        assert one.shape == other.shape
        assert (one.float() - other).norm() <= 0.01 * other.norm()
    assert down.grad.dtype == up.grad.dtype == torch.float32


def test_the_first_layer_needs_no_gradient_of_what_it_is_given() -> None:
    given, out = torch.ones(3, 8, dtype=torch.bfloat16), torch.ones(3, 8, dtype=torch.bfloat16)
    down, up = torch.ones(2, 8, requires_grad=True), torch.ones(8, 2, requires_grad=True)
    AddedProduct.apply(given, out, down, up).sum().backward()
    assert given.grad is None
    assert (down.grad == 24).all()


@pytest.mark.parametrize("missing", [1, 1000])
def test_an_adapter_that_the_disk_has_no_room_for_is_not_there(tmp_path: Path, missing: int) -> None:
    factors = {"base_model.model.q_proj.lora_A.weight": torch.ones(64, 4096)}
    write_folder(tmp_path / "whole", factors, AdapterShape(), "base")
    size = (tmp_path / "whole" / "adapter_model.safetensors").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - missing, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            write_folder(tmp_path / "cut", factors, AdapterShape(), "base")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "cut").exists()
