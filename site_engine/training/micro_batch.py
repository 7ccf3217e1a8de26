"""The loss and gradient of one micro-batch, in slices between which its caller may do anything else.

Only the inputs of layers are kept; backward, a layer is computed again. The logits of more than some tokens
never exist.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from site_engine.training.adapter import Adapter
from site_engine.training.packing import Packed
from site_engine.training.sliced_model import Begun, SlicedModel

HEAD_TOKENS = 256


class Slice(StrEnum):
    """The kinds of slices, whose times are unlike."""

    BEGIN = "begin"
    FORWARD = "forward"
    HEAD = "head"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(slots=True)
class MicroBatch:
    """The sum of the loss over the learned tokens, how many of them are predicted best, and the gradients.

    `gradients` are by the order of `Adapter.parameters()`, of the loss divided by the caller's `count`.
    """

    loss_sum: float = 0.0
    correct: int = 0
    gradients: list[torch.Tensor] = field(default_factory=list)


Slices = Generator[Slice, None, MicroBatch]
"""Yields the kind of each slice before it runs."""


def run_micro_batch(
    model: SlicedModel,
    adapter: Adapter,
    adapted: Sequence[Sequence[str]],
    packed: Packed,
    count: int,
    *,
    backward: bool = True,
) -> Slices:
    """Compute a micro-batch; `adapted[i]` are layer i's modules, `count` the whole batch's learned tokens."""
    yield Slice.BEGIN
    with torch.no_grad():
        ids, positions, predicting, targets = (
            torch.from_numpy(numbers).to(model.device)
            for numbers in (packed.ids, packed.positions, packed.predicting, packed.targets)
        )
        begun = model.begin(ids, positions, packed.begins)
    hidden, kept = begun.hidden, list[torch.Tensor]()
    for number in range(len(model.layers)):
        yield Slice.FORWARD
        if backward:
            kept.append(hidden)
        with torch.no_grad():
            hidden = model.layer(number, hidden, begun)
    result = MicroBatch()
    gradient = yield from _head(
        model, hidden, predicting, targets, count=count if backward else None, result=result
    )
    if gradient is not None:
        by_layer: list[list[torch.Tensor]] = []
        for number in reversed(range(len(model.layers))):
            yield Slice.BACKWARD
            factors = adapter.parameters(adapted[number])
            gradient, found = _layer_backward(model, begun, number, kept.pop(), gradient, factors=factors)
            by_layer.insert(0, found)
        result.gradients = [each for layer in by_layer for each in layer]
    return result


def _head(
    model: SlicedModel,
    hidden: torch.Tensor,
    predicting: torch.Tensor,
    targets: torch.Tensor,
    *,
    count: int | None,
    result: MicroBatch,
) -> Generator[Slice, None, torch.Tensor | None]:
    """Add the loss to the result; return the gradient of the hidden states, None without a `count`."""
    gradient = None if count is None else torch.zeros_like(hidden)
    for tokens, wanted in zip(predicting.split(HEAD_TOKENS), targets.split(HEAD_TOKENS), strict=True):
        yield Slice.HEAD
        part = hidden[0, tokens].requires_grad_(count is not None)
        with torch.set_grad_enabled(count is not None):
            logits = model.head(part)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            loss = F.cross_entropy(logits, wanted, reduction="sum")
        if gradient is not None:
            (gradient[0, tokens],) = torch.autograd.grad(loss / count, part)
        result.loss_sum += float(loss.detach())
        result.correct += int((logits.detach().argmax(-1) == wanted).sum())
    return gradient


def _layer_backward(
    model: SlicedModel,
    begun: Begun,
    number: int,
    below: torch.Tensor,
    gradient: torch.Tensor,
    *,
    factors: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Compute a layer again; return the gradients of its input (not of the first's) and of its factors."""
    below = below.requires_grad_(number > 0)
    with torch.enable_grad():
        above = model.layer(number, below, begun)
    wrt = [below, *factors] if number > 0 else factors
    found = torch.autograd.grad(above, wrt, gradient, materialize_grads=True)
    return (found[0], list(found[1:])) if number > 0 else (gradient, list(found))
