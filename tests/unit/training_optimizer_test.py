"""The optimizer of all factors at once computes what AdamW computes of each, and goes on from its copies."""

from __future__ import annotations

import math

import pytest
import torch

from site_engine.training.optimizer import MAX_GRADIENT_NORM, Optimizer

SHAPES = ((4, 7), (7, 4), (1, 130), (3, 3))
NAMES = [f"factor {number}" for number in range(len(SHAPES))]


def drawn(seed: int, size: float = 1.0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=draw) * size for shape in SHAPES]


def factors() -> list[torch.Tensor]:
    return [each.requires_grad_() for each in drawn(0)]


def give(optimizer: Optimizer, gradients: list[torch.Tensor]) -> None:
    for place, gradient in zip(optimizer.gradients, gradients, strict=True):
        place.copy_(gradient)


@pytest.mark.parametrize("size", [1e-3, 10.0])
def test_a_step_is_that_of_adamw_of_each_factor_with_gradients_clipped_together(size: float) -> None:
    ours, theirs = factors(), factors()
    optimizer = Optimizer(ours)
    peer = torch.optim.AdamW(theirs, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    for step in range(5):
        gradients, rate = drawn(1 + step, size), 0.01 / (1 + step)
        give(optimizer, gradients)
        assert optimizer.step(rate)
        for factor, gradient in zip(theirs, gradients, strict=True):
            factor.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_(theirs, MAX_GRADIENT_NORM)
        peer.param_groups[0]["lr"] = rate
        peer.step()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing(wrong: float) -> None:
    ours = factors()
    optimizer = Optimizer(ours)
    give(optimizer, drawn(1))
    optimizer.gradients[2][0, 5] = wrong
    before = optimizer.copies(NAMES)
    assert not optimizer.step(0.1)
    after = optimizer.copies(NAMES)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_optimizer_goes_on_from_copies_bit_by_bit() -> None:
    one, other = factors(), [torch.zeros_like(each) for each in drawn(0)]
    optimizer, again = Optimizer(one), Optimizer(other)
    give(optimizer, drawn(1))
    optimizer.step(0.1)
    again.restore(NAMES, optimizer.copies(NAMES))
    for each in (optimizer, again):
        give(each, drawn(2))
        each.step(0.1)
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_copies_stay_as_they_are_when_training_goes_on() -> None:
    ours = factors()
    optimizer = Optimizer(ours)
    give(optimizer, drawn(1))
    optimizer.step(0.1)
    copies = optimizer.copies(NAMES)
    kept = {name: each.clone() for name, each in copies.items()}
    give(optimizer, drawn(2))
    optimizer.step(0.1)
    assert all(torch.equal(kept[name], copies[name]) for name in kept)
    assert not torch.equal(copies[NAMES[0]], ours[0])


def test_copies_of_other_sizes_are_refused() -> None:
    optimizer = Optimizer(factors())
    copies = optimizer.copies(NAMES)
    with pytest.raises(KeyError):
        optimizer.restore(NAMES, {name: each for name, each in copies.items() if "exp_avg_sq" not in name})
    with pytest.raises(RuntimeError):
        optimizer.restore(NAMES, copies | {NAMES[0]: torch.zeros(5, 5)})
