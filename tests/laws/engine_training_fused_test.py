"""Fused kernels of training, interpreted here: losses and gradients are those of transformers' layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support import interpreted  # noqa: F401 - skips where there is no Triton

# isort: split
from site_engine.core.training import AdapterShape, StepDone
from site_engine.cuda.kernels import training_kernels
from site_engine.training import llama_layers, sliced_model
from site_engine.training.adapter import Adapter, new_adapter
from site_engine.training.micro_batch import MicroBatch, run_micro_batch
from site_engine.training.packing import pack, pad
from site_engine.training.sliced_model import SlicedModel
from site_engine.training.slices import BACKWARD_SLICES, Slice
from tests.support.engine_models import FAMILIES, WINDOW
from tests.support.model_families import random_model
from tests.support.training import SMALL, computed, examples, run, trainer

pytestmark = pytest.mark.slow
FUSED = ("llama", "qwen2", "mistral")


def started(name: str, target: str, *, fused: bool) -> tuple[SlicedModel, Adapter, list[list[str]]]:
    model = SlicedModel(random_model(FAMILIES[name]()).float(), fused=fused)
    shape = AdapterShape(4, 8.0, target)
    adapter = new_adapter(model.targets(shape), shape, seed=1)
    adapted = model.attach(adapter)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, up in adapter.factors.values():
            up.normal_(0.0, 0.05, generator=draw)
    return model, adapter, adapted


def passed(name: str, target: str, *, fused: bool, backward: bool = True, padded: int = 0) -> MicroBatch:
    model, adapter, adapted = started(name, target, fused=fused)
    longest = WINDOW + 6 if name == "mistral" else 8  # of which one is longer than its window
    packed = pack(examples(3, seed=3, longest=longest).examples)
    if padded:
        packed = pad(packed, len(packed.ids) + padded, model.head_tokens)
    return computed(model, adapter, adapted, packed, backward=backward)


@pytest.mark.parametrize(
    ("name", "target", "room"),
    [
        *((name, "all-linear", True) for name in FUSED),
        ("qwen2", "attention", True),
        ("llama", "all-linear", False),
    ],
)
def test_loss_and_gradients_are_those_of_the_layers_of_transformers(
    name: str, target: str, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With attention kept and, where there is no room, computed again."""
    monkeypatch.setattr(SlicedModel, "_has_room", lambda *_: room)
    found, wanted = (passed(name, target, fused=fused) for fused in (True, False))
    assert found.loss_sum == pytest.approx(wanted.loss_sum, rel=1e-5)
    assert found.correct == wanted.correct
    assert len(found.gradients) == len(wanted.gradients)
    for one, other in zip(found.gradients, wanted.gradients, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).norm() <= 1e-5 * other.norm() + 1e-9


@pytest.mark.parametrize("fused", [True, False])
def test_a_fused_layer_s_backward_pass_is_three_slices(fused: bool) -> None:
    model, adapter, adapted = started("llama", "all-linear", fused=fused)
    packed = pack(examples(3, seed=3, longest=8).examples)
    slices = list(run_micro_batch(model, adapter, adapted, packed, 1))
    of_layer = [*BACKWARD_SLICES] if fused else [Slice.RECOMPUTE, Slice.BACKWARD]
    assert slices[slices.index(Slice.HEAD) + 1 :] == of_layer * len(model.layers)


def test_what_is_padded_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_model, "FUSED_HEAD_TOKENS", 16)
    found, wanted = (passed("llama", "all-linear", fused=True, padded=padded) for padded in (9, 0))
    assert found.loss_sum == pytest.approx(wanted.loss_sum, rel=1e-6)
    assert found.correct == wanted.correct
    for one, other in zip(found.gradients, wanted.gradients, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm() + 1e-9


def test_a_validation_has_the_loss_and_no_gradients() -> None:
    found, wanted = (passed("llama", "all-linear", fused=fused, backward=False) for fused in (True, False))
    assert found.loss_sum == pytest.approx(wanted.loss_sum, rel=1e-5)
    assert not found.gradients


def losses(*, fused: bool) -> list[float]:
    model = random_model(FAMILIES["llama"]()).float()
    recipe = replace(SMALL, batch_size=2, learning_rate=0.02)
    job = trainer(examples(2, seed=3, longest=8), recipe, model, fused=fused)
    return [each.loss for each in run(job) if isinstance(each, StepDone)]


def test_each_step_is_computed_with_the_factors_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the fused optimizer of GPUs, which does not count up the versions of what it changes."""
    optimizer = torch.optim.AdamW
    with monkeypatch.context() as patched:
        patched.setattr(
            torch.optim, "AdamW", lambda *given, **how: optimizer(*given, **{**how, "fused": True})
        )
        found = losses(fused=True)
    assert found == pytest.approx(losses(fused=False), rel=1e-4)


def test_only_the_llama_family_is_fused() -> None:
    fitting = {name for name in FAMILIES if llama_layers.fits(random_model(FAMILIES[name]()))}
    assert fitting == set(FUSED) & set(FAMILIES)


def test_a_loss_of_logits_far_apart_or_minus_infinite_is_that_of_pytorch() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 300, generator=draw) * 40
    logits[1, 7], logits[2, :290] = 500.0, float("-inf")
    targets = torch.tensor([3, 7, 295, 0, 299])
    exact = logits.clone().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(exact, targets, reduction="none")
    (gradient,) = torch.autograd.grad(wanted.sum() / 9, exact)
    losses, hits = torch.empty(5), torch.empty(5)
    best = logits.argmax(-1)
    training_kernels.cross_entropy[(5,)](
        logits, targets, losses, hits, 300, 1 / 9, BACKWARD=True, BLOCK=64
    )  # fmt: skip
    torch.testing.assert_close(losses, wanted.detach())
    torch.testing.assert_close(logits, gradient)
    assert hits.tolist() == (best == targets).float().tolist()
