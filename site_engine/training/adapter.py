"""The LoRA adapter in training: float32 factors in addition to the base model, saved in peft's format."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from site_engine.core.loader_turns import pause
from site_engine.core.training import AdapterShape
from site_engine.errors import TrainingRefused
from site_engine.training.tensor_bytes import write_tensors
from site_engine.variants.peft_folder import CONFIG, MAX_RANK, PREFIX, WEIGHTS

KINDS = {"Linear": (1, 0), "Conv1D": (0, 1)}
"""Module types that compute a matrix product, with the input and output dimension of their weight."""
STAGING = ".new"
Factors = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""`down` [rank, in] and `up` [out, rank] by the name of the adapted module."""


class Adapter:
    """The trainable factors, in float32."""

    def __init__(self, shape: AdapterShape, factors: Factors) -> None:
        self.shape = shape
        self.factors = {name: (_leaf(down), _leaf(up)) for name, (down, up) in factors.items()}

    @property
    def scale(self) -> float:
        return self.shape.alpha / self.shape.rank

    def parameters(self) -> list[torch.Tensor]:
        """Return the factors of all modules in order, `down` before `up`."""
        return [factor for pair in self.factors.values() for factor in pair]

    @property
    def names(self) -> list[str]:
        """The names of the factors in a peft file, in the order of `parameters`."""
        return [f"{PREFIX}{name}.lora_{part}.weight" for name in self.factors for part in "AB"]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of the factors on their device, by their names in a peft file."""
        return {
            name: factor.detach().clone() for name, factor in zip(self.names, self.parameters(), strict=True)
        }


def _leaf(factor: torch.Tensor) -> torch.Tensor:
    return factor.detach().clone().requires_grad_()


def new_adapter(modules: Mapping[str, Any], shape: AdapterShape, seed: int) -> Adapter:
    """Return an adapter without effect, initialized as in peft: `down` uniform, `up` zero."""
    draw = torch.Generator().manual_seed(seed)
    factors = {}
    for name, module in modules.items():
        pause()
        weight = module.weight
        inputs, outputs = (weight.shape[dimension] for dimension in KINDS[type(module).__name__])
        bound = 1 / sqrt(inputs)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        down = torch.empty(shape.rank, inputs, dtype=dtype).uniform_(-bound, bound, generator=draw)
        factors[name] = (
            down.to(weight.device),
            torch.zeros(outputs, shape.rank, dtype=dtype, device=weight.device),
        )
    return Adapter(shape, factors)


def target_modules(layers: Iterable[tuple[str, Any]], shape: AdapterShape) -> dict[str, Any]:
    """Return the target modules of an adapter of this shape, by name. Raises TrainingRefused."""
    if not 0 < shape.rank <= MAX_RANK:
        raise TrainingRefused(f"rank {shape.rank} is not 1 to {MAX_RANK}")
    if shape.target not in {"all-linear", "attention"}:
        raise TrainingRefused(f"target {shape.target!r} is not all-linear or attention")
    found = {}
    for layer, top in layers:
        for name, module in top.named_modules(prefix=layer):
            attention = any("attn" in part or "attention" in part for part in name.split("."))
            if type(module).__name__ in KINDS and (attention or shape.target == "all-linear"):
                found[name] = module
    if not found:
        raise TrainingRefused("the model has no projections that an adapter could change")
    return found


def attach(name: str, module: Any, adapter: Adapter) -> None:
    """Add an adapter's product to the output of a module of the trained copy.

    The product is computed in float32 and added before rounding, or in 16 bits for a 16-bit model on a GPU.
    """
    factors, scale = adapter.factors[name], adapter.scale

    def added(_: Any, given: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        down, up = factors
        if out.is_cuda and out.dtype.itemsize == 2:
            return AddedProduct.apply(given[0], out, down, up * scale)
        product = F.linear(F.linear(given[0].to(down.dtype), down), up) * scale
        return (out + product).to(out.dtype)

    module.register_forward_hook(added)


class AddedProduct(torch.autograd.Function):  # type: ignore[misc]  # torch does not type it
    """Compute `out + up @ down @ given` with factors rounded to the 16 bits of `out`. The gradients of the
    factors are float32.

    Each pass reads and writes the wide tensors once. In float32, those passes would cost half as much time as
    the model's own products.
    """

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, out: torch.Tensor, down: torch.Tensor, up: torch.Tensor
    ) -> torch.Tensor:
        """Add the adapter's product of `given` [..., in] to `out` [..., out]."""
        rows, narrow, wide = given.flatten(0, -2), down.to(out.dtype), up.to(out.dtype)
        inner = rows @ narrow.T
        ctx.save_for_backward(rows, inner, narrow, wide)
        return torch.addmm(out.flatten(0, -2), inner, wide.T).view(out.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, inner, narrow, wide = ctx.saved_tensors
        wanted = gradients[0].flatten(0, -2)
        through = wanted @ wide
        given = (through @ narrow).view(*gradients[0].shape[:-1], -1) if ctx.needs_input_grad[0] else None
        return given, gradients[0], exact_product(through.T, rows), exact_product(wanted.T, inner)


def exact_product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Multiply 16-bit matrices and return a float32 result."""
    if one.is_cuda:
        return torch.mm(one, other, out_dtype=torch.float32)
    return one.float() @ other.float()


def write_folder(folder: Path, factors: Mapping[str, torch.Tensor], shape: AdapterShape, base: str) -> None:
    """Write an adapter in peft's format. The folder appears only once it is complete."""
    names = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in factors}
    parts = 1 if shape.target == "all-linear" else 2  # gpt2 has a c_proj in attention and one in the MLP
    targets = sorted({".".join(name.split(".")[-parts:]) for name in names})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": shape.rank,
        "lora_alpha": shape.alpha,
        "target_modules": targets,
        "lora_dropout": 0.0,
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }

    staging = folder.with_name(folder.name + STAGING)
    shutil.rmtree(staging, ignore_errors=True)  # left by a killed process
    staging.mkdir(parents=True)
    (staging / CONFIG).write_text(json.dumps(settings, indent=2), "utf-8")
    with (staging / WEIGHTS).open("wb") as file:
        write_tensors(file, factors, {"format": "pt"})
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)
