"""Speed up a model without changing its results: joined projections and compiled layers.

The model's modules stay in place; only their `forward` and the layout of some weights change.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own convention

QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")
TIMED_ROWS = (16, *range(32, 545, 32), *range(576, 1025, 64))  # cuBLAS is slow at some sizes, which vary
TIMED_LAYERS = 8
TIMED_REPLAYS = 12
MAX_SPLIT_RATIO = 0.98


class _Joined:
    """The joint product, stored between the calls of its parts."""

    def __init__(self) -> None:
        self.product: torch.Tensor | None = None


class _Part(nn.Module):  # type: ignore[misc]
    """One of several projections of one input. The first computes the joint product for all."""

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
    """Join the linear layers of these names in every module that has all. Return the number of modules."""
    count = 0
    for module in list(model.modules()):
        linears = _linears(module, names)
        if not linears:
            continue
        count += 1
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
    return count


def _linears(module: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    found = [getattr(module, name, None) for name in names]
    if not all(type(one) is nn.Linear for one in found):
        return []
    linears = [one for one in found if isinstance(one, nn.Linear)]
    alike = len({(one.in_features, one.bias is None) for one in linears}) == 1
    return linears if alike else []


def faster_split(weights: Sequence[torch.Tensor]) -> Callable[[int], bool]:
    """Return a predicate on the number of rows: whether two GEMMs are faster than one. Timed at load."""
    if weights[0].device.type != "cuda":
        return lambda rows: False
    apart = {
        rows
        for rows in TIMED_ROWS
        if _seconds(weights, rows, 2) < MAX_SPLIT_RATIO * _seconds(weights, rows, 1)
    }

    def answer(rows: int) -> bool:
        return next((tried for tried in TIMED_ROWS if rows <= tried), 0) in apart

    return answer


def _seconds(weights: Sequence[torch.Tensor], rows: int, pieces: int) -> float:
    """Return the duration, in milliseconds, of the GEMMs of several layers on a warm device.

    Their weights exceed the cache.
    """
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
    for replay in range(TIMED_REPLAYS):
        if replay == TIMED_REPLAYS // 2:
            began.record()
        graph.replay()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended))


def compile_layers(model: nn.Module) -> int:
    """Compile each class of decoder layer once, for any number of tokens. Return the number of layers."""
    compiled: dict[type, Any] = {}
    layers = decoder_layers(model)
    for layer in layers:
        kind = type(layer)
        if kind not in compiled:
            compiled[kind] = torch.compile(kind.forward, fullgraph=True, dynamic=True)
        layer.forward = types.MethodType(compiled[kind], layer)
    return len(layers)


def compile_ends(model: nn.Module) -> None:
    """Compile the modules that run once per step outside the layers: rotary embedding and final norm."""
    layers = decoder_layers(model)
    lists = ((one, child) for one in model.modules() for child in one.children())
    owner = next(
        (one for one, child in lists if isinstance(child, nn.ModuleList) and list(child) == layers), None
    )
    if owner is None:
        return
    for child in owner.children():
        if type(child).__name__.endswith(("RMSNorm", "RotaryEmbedding", "LayerNorm")):
            child.forward = torch.compile(child.forward, fullgraph=True, dynamic=True)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the longest module list, which holds the decoder layers in every causal model."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))
