"""Compute the loss and gradients of one micro-batch in slices, between which the caller can do other work.

The inputs of layers are kept; the backward pass recomputes each layer. Logits are computed for a limited
number of tokens at a time.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch

from site_engine.training.adapter import Adapter
from site_engine.training.packing import Packed
from site_engine.training.sliced_model import SlicedModel
from site_engine.training.slices import Slice


@dataclass(slots=True)
class MicroBatch:
    """The results of a micro-batch.

    `sums` has, per head slice, the summed loss of its learned tokens and the number predicted correctly.
    `gradients`, in the order of `Adapter.parameters()`, are those of the loss divided by the caller's count.
    """

    sums: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)

    @property
    def loss_sum(self) -> float:
        """The summed loss. Waits for the device, as `correct` does."""
        return sum(float(loss) for loss, _ in self.sums)

    @property
    def correct(self) -> int:
        return sum(int(hits) for _, hits in self.sums)


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
    """Run a micro-batch. `adapted[i]` names the adapted modules of layer i.

    `count` is the number of learned tokens in the whole batch.
    """
    yield Slice.BEGIN
    with torch.no_grad():
        ids, positions, predicting, targets = (
            torch.from_numpy(numbers).to(model.device)
            for numbers in (packed.ids, packed.positions, packed.predicting, packed.targets)
        )
        begun = model.begin(ids, positions, packed.begins, backward=backward)
    hidden, kept = begun.hidden, list[torch.Tensor]()
    for number in range(len(model.layers)):
        yield Slice.FORWARD
        if backward:
            kept.append(hidden)
        with torch.no_grad():
            hidden = model.layer(number, hidden, begun)
    result, counted = MicroBatch(), count if backward else None
    gradient = yield from _head(
        model, hidden, predicting, targets, packed.learned, count=counted, sums=result.sums
    )
    if gradient is not None:
        by_layer: list[list[torch.Tensor]] = []
        for number in reversed(range(len(model.layers))):
            if model.recomputes:
                yield Slice.RECOMPUTE
            again = model.recompute(number, kept.pop(), begun)
            yield Slice.BACKWARD
            factors = {name: adapter.factors[name] for name in adapted[number]}
            gradient, found = yield from model.backward(number, again, begun, gradient, factors)
            by_layer.insert(0, found)
        result.gradients = [each for layer in by_layer for each in layer]
    return result


def _head(
    model: SlicedModel,
    hidden: torch.Tensor,
    predicting: torch.Tensor,
    targets: torch.Tensor,
    learned: int,
    *,
    count: int | None,
    sums: list[tuple[torch.Tensor, torch.Tensor]],
) -> Generator[Slice, None, torch.Tensor | None]:
    """Append losses and hits to `sums`. Return the gradient of the hidden states if `count` is given."""
    gradient = None if count is None else torch.zeros_like(hidden)
    size = model.head_tokens
    for number, (tokens, wanted) in enumerate(zip(predicting.split(size), targets.split(size), strict=True)):
        yield Slice.HEAD
        rows = min(size, learned - number * size)
        loss, hits, found = model.loss(hidden[0, tokens], wanted, count, rows)
        sums.append((loss, hits))
        if gradient is not None and found is not None:
            gradient[0, tokens[:rows]] = found[:rows]
    return gradient
