"""Making a loaded model fast without changing what it computes: joined projections, compiled layers.

The model's modules stay where they are; only their `forward` and the layout of some weights change.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own convention

QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")
TRIED_ROWS = (16, *range(32, 545, 32), *range(576, 1025, 64))  # what sizes the library slips at, varies
TRIED_LAYERS = 8
TRIED_REPLAYS = 40
WORTH_SPLITTING = 0.98


class _Joined:
    """Holds the joint product between the calls of its parts."""

    def __init__(self) -> None:
        self.product: torch.Tensor | None = None


class _Part(nn.Module):  # type: ignore[misc]
    """One of several projections of one input. The first multiplies for all; each gives out its columns."""

    def __init__(self, joined: _Joined, begin: int, end: int, *, last: bool) -> None:
        super().__init__()
        self.joined = joined
        self.begin = begin
        self.end = end
        self.last = last
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.weight is not None:
            self.joined.product = F.linear(hidden, self.weight, self.bias)
        product = self.joined.product
        assert product is not None
        if self.last:
            self.joined.product = None
        return product[..., self.begin : self.end]


def join(model: nn.Module, names: Sequence[str]) -> int:
    """Join the linear layers of these names wherever one module has them all; how many modules had."""
    count = 0
    for module in list(model.modules()):
        linears = _linears(module, names)
        if linears:
            _replace(module, names, linears)
            count += 1
    return count


def _linears(module: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    found = [getattr(module, name, None) for name in names]
    if not all(type(one) is nn.Linear for one in found):
        return []
    linears = [one for one in found if isinstance(one, nn.Linear)]
    alike = len({(one.in_features, one.bias is None) for one in linears}) == 1
    return linears if alike else []


def _replace(module: nn.Module, names: Sequence[str], linears: list[nn.Linear]) -> None:
    joined, begin = _Joined(), 0
    weight = torch.cat([one.weight.data for one in linears])
    bias = torch.cat([one.bias.data for one in linears]) if linears[0].bias is not None else None
    for at, (name, linear) in enumerate(zip(names, linears, strict=True)):
        end = begin + linear.out_features
        part = _Part(joined, begin, end, last=at == len(names) - 1)
        if at == 0:
            part.weight = nn.Parameter(weight, requires_grad=False)
            part.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        setattr(module, name, part)
        begin = end


def faster_apart(weights: Sequence[torch.Tensor]) -> Callable[[int], bool]:
    """By rows: whether each joint weight's halves are faster as two products. Timed on the device at load."""
    if weights[0].device.type != "cuda":
        return lambda rows: False
    apart = {
        rows
        for rows in TRIED_ROWS
        if _seconds(weights, rows, 2) < WORTH_SPLITTING * _seconds(weights, rows, 1)
    }

    def answer(rows: int) -> bool:
        return next((tried for tried in TRIED_ROWS if rows <= tried), 0) in apart

    return answer


def _seconds(weights: Sequence[torch.Tensor], rows: int, pieces: int) -> float:
    """Of the products with some layers' weights, more than the cache holds, once the chip is warm."""
    hidden = torch.randn(rows, weights[0].shape[1], dtype=weights[0].dtype, device=weights[0].device)

    def once() -> None:
        for weight in weights:
            for piece in weight.chunk(pieces):
                F.linear(hidden, piece)

    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for replay in range(TRIED_REPLAYS):
        if replay == TRIED_REPLAYS // 2:
            began.record()
        graph.replay()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended))


def compile_layers(model: nn.Module, backend: str = "inductor") -> int:
    """Compile each class of decoder layer once, for all its layers and any number of tokens; the layers."""
    compiled: dict[type, Any] = {}
    layers = decoder_layers(model)
    for layer in layers:
        kind = type(layer)
        if kind not in compiled:
            compiled[kind] = torch.compile(kind.forward, fullgraph=True, dynamic=True, backend=backend)
        layer.forward = types.MethodType(compiled[kind], layer)
    return len(layers)


def compile_ends(model: nn.Module, backend: str = "inductor") -> None:
    """What runs once per step beside the layers: rotary table and last norm, a dozen small kernels."""
    layers = decoder_layers(model)
    owner = next((one for one in model.modules() if _has_layers(one, layers)), None)
    if owner is None:
        return
    for child in owner.children():
        if type(child).__name__.endswith(("RMSNorm", "RotaryEmbedding", "LayerNorm")):
            child.forward = torch.compile(child.forward, fullgraph=True, dynamic=True, backend=backend)


def _has_layers(module: nn.Module, layers: list[nn.Module]) -> bool:
    return any(isinstance(child, nn.ModuleList) and list(child) == layers for child in module.children())


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The longest list of modules: in every causal language model, its decoder layers."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))
