"""Micro-batches of a few sizes: each computed before a job begins, and none changes what is trained."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from site_engine.core.slack import SliceCosts
from site_engine.core.training import StepDone
from site_engine.errors import TrainingRefused
from site_engine.training import sliced_model
from site_engine.training.job import warm_up
from site_engine.training.packing import fitting_size, pack, pad, sizes_up_to
from site_engine.training.sliced_model import Recomputed, SlicedModel
from site_engine.training.slices import Slice
from site_engine.training.snapshot import Snapshot
from tests.support.engine_models import FAMILIES, family
from tests.support.model_families import random_model
from tests.support.training import SMALL, computed, equal, examples, run, started, trainer

torch.set_num_threads(1)


@pytest.mark.parametrize("train_tokens", [64, 16])
def test_the_slices_of_a_padded_job_have_only_sizes_that_were_warmed_up(
    train_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of examples that are longer than a micro-batch, and of a validation."""
    seen, layer, loss = set[tuple[str, int]](), SlicedModel.layer, SlicedModel.loss

    def layer_seen(self: SlicedModel, number: int, hidden: torch.Tensor, begun: Any) -> torch.Tensor:
        seen.add(("layer", hidden.shape[1]))
        return layer(self, number, hidden, begun)

    def loss_seen(self: SlicedModel, hidden: torch.Tensor, targets: torch.Tensor, *more: Any) -> Any:
        seen.add(("head", len(hidden)))
        return loss(self, hidden, targets, *more)

    monkeypatch.setattr(SlicedModel, "layer", layer_seen)
    monkeypatch.setattr(SlicedModel, "loss", loss_seen)
    valid = examples(5, seed=4)
    job = trainer(examples(30), valid=valid, train_tokens=train_tokens, padded=True)
    job.warm_up()
    warmed = set(seen)
    seen.clear()
    assert len(warmed) <= 12
    events = run(job)
    assert sum(isinstance(event, StepDone) for event in events) == job.total_steps
    assert seen <= warmed


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("head_tokens", [16, 48])
def test_what_is_padded_counts_for_nothing(
    name: str, head_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sliced_model, "HEAD_TOKENS", head_tokens)
    model, adapter, adapted, _ = started(name)
    packed = pack(examples(5, seed=3).examples)
    plain = computed(model, adapter, adapted, packed)
    for more in (0, 1, 50):
        padded = computed(model, adapter, adapted, pad(packed, len(packed.ids) + more, head_tokens))
        assert padded.loss_sum == pytest.approx(plain.loss_sum, rel=1e-12)
        assert padded.correct == plain.correct
        for one, other in zip(padded.gradients, plain.gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_a_padded_job_trains_the_same_adapter_whatever_its_sizes_are() -> None:
    data = examples(11, seed=1)
    plain = trainer(data, model=random_model(FAMILIES["llama"]()).double())
    run(plain)
    for train_tokens in (16, 40, 256):
        model = random_model(FAMILIES["llama"]()).double()
        padded = trainer(data, model=model, train_tokens=train_tokens, padded=True)
        padded.warm_up()
        run(padded)
        for name, factor in plain.adapter.tensors().items():
            torch.testing.assert_close(padded.adapter.tensors()[name], factor, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("token_s", "fitted", "tried"),
    [(1e-8, 1024, 1024), (1e-5, 512, 1024), (2e-5, 256, 1024), (3e-5, 256, 512), (1e-4, 256, 512)],
)
def test_micro_batches_are_fitted_to_the_time_of_a_slice(
    token_s: float, fitted: int, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches take 5 ms whatever the size, at times much longer: more tokens are computed faster until their
    own time counts. Of equally fast sizes the smallest is taken; none is tried after one that takes too long.
    """
    now_s, backward, sizes = [0.0], SlicedModel.backward, list[int]()

    def timed(self: SlicedModel, number: int, again: Recomputed, *more: Any) -> Any:
        sizes.append(again.below.shape[1])
        now_s[0] += max(0.005, sizes[-1] * token_s) + 0.02 * (len(sizes) % 3 == 0)
        return backward(self, number, again, *more)

    monkeypatch.setattr(SlicedModel, "backward", timed)
    most: dict[str, Any] = {"train_tokens": 1024, "slice_s": 0.0103, "padded": True}
    job = trainer(examples(4), clock=lambda: now_s[0], **most)
    job.warm_up()
    assert job.train_tokens == fitted
    assert max(sizes) == tried
    assert run(job)


def test_micro_batches_are_fitted_to_the_memory_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = SlicedModel.backward

    def small(self: SlicedModel, number: int, again: Recomputed, *more: Any) -> Any:
        if again.below.shape[1] > 512:
            raise torch.OutOfMemoryError("no memory")
        return backward(self, number, again, *more)

    monkeypatch.setattr(SlicedModel, "backward", small)
    most: dict[str, Any] = {"train_tokens": 4096, "slice_s": 1.0, "padded": True}
    ticks = count()
    job = trainer(examples(4), clock=lambda: 0.001 * next(ticks), **most)
    job.warm_up()
    assert job.train_tokens == 512
    assert any(isinstance(event, Snapshot) for event in run(job))


def test_the_moments_of_a_job_are_allocated_before_its_first_step() -> None:
    job = trainer(examples(4))

    def places() -> list[int]:
        moments = [each.data_ptr() for each in job._optimizer._state.values()]
        return moments + [each.data_ptr() for each in (*job._optimizer.gradients, *job.adapter.parameters())]

    before = places()
    assert len(set(before)) == 3 + 2 * len(job.adapter.parameters())
    while job.step < 2:
        job.run_slice()
    assert places() == before


@pytest.mark.parametrize("train_tokens", [64, 8])
def test_a_job_that_was_warmed_up_gives_the_same_adapter_and_knows_what_slices_take(
    train_tokens: int,
) -> None:
    data, ticks = examples(11), count()
    plain = trainer(data, train_tokens=train_tokens)
    run(plain)
    warmed = trainer(data, train_tokens=train_tokens, clock=lambda: 0.001 * next(ticks))
    warmed.warm_up()
    assert warmed.following.micro_batch_s > 0.0
    assert not warmed.take_events()
    run(warmed)
    assert equal(warmed.adapter.tensors(), plain.adapter.tensors())


@pytest.mark.parametrize("layers", [1, 3, 5])
def test_a_rehearsal_foresees_what_slices_take(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each slice that is timed is computed: one that was cut off would promise the next for nothing."""
    now_s = [0.0]

    def slow(name: str, seconds: float) -> None:
        quick = getattr(SlicedModel, name)

        def timed(*given: Any) -> Any:
            now_s[0] += seconds
            return quick(*given)

        monkeypatch.setattr(SlicedModel, name, timed)

    for name, seconds in (("layer", 0.01), ("recompute", 0.02), ("backward", 0.04)):
        slow(name, seconds)
    config = FAMILIES["llama"]()
    config.num_hidden_layers = layers
    job = trainer(examples(4), model=random_model(config), clock=lambda: now_s[0])
    job.warm_up()
    foreseen = [
        job._costs.seconds(kind, job.train_tokens, now_s[0])
        for kind in (Slice.FORWARD, Slice.RECOMPUTE, Slice.BACKWARD)
    ]
    assert foreseen == pytest.approx([0.01, 0.03, 0.04])  # a layer is computed again before its gradient


@given(st.integers(1, 200), st.integers(1, 3000), st.data())
def test_every_micro_batch_fits_a_size_and_there_are_few(
    limit: int, longest: int, data: st.DataObject
) -> None:
    sizes = sizes_up_to(limit, longest)
    assert sizes == tuple(sorted(set(sizes)))
    assert limit in sizes
    assert len(sizes) <= 8 + 12
    tokens = data.draw(st.integers(1, max(limit, longest)))
    size = fitting_size(sizes, tokens)
    assert tokens <= size
    assert size - tokens <= max(limit / 8 + 1, tokens)


def test_a_site_warms_up_a_job_of_its_own_and_tells_why_it_could_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ticks, costs = family("llama").served, count(), SliceCosts()
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    tokens = warm_up(model, SMALL.shape, lambda: 0.1 * next(ticks), costs)
    assert tokens == 256
    assert equal(before, model.model.state_dict())
    unfused = [kind for kind in Slice if kind not in (Slice.GATE_UP_BACKWARD, Slice.ATTENTION_BACKWARD)]
    for kind in unfused:
        assert costs.seconds(kind, 0 if kind is Slice.UPDATE else tokens, 0.1 * next(ticks)) > 0.0

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(SlicedModel, "layer", full)
    monkeypatch.setattr(SlicedModel, "_difference", lambda self: 0.0)
    with pytest.raises(TrainingRefused, match="too little memory"):
        warm_up(model, SMALL.shape, lambda: 0.1 * next(ticks), costs)


def test_a_job_computes_nothing_again_of_what_one_of_its_shape_has_warmed_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for sizes that only it has."""
    model, costs, ticks = family("llama").served, SliceCosts(), count()
    chosen: dict[str, Any] = {"padded": True, "costs": costs, "clock": lambda: 0.001 * next(ticks)}
    trainer(examples(20), model=model.model, **chosen).warm_up()
    again = trainer(examples(20, seed=1), model=model.model, **chosen)
    longer = trainer(examples(20, seed=1, longest=100), model=model.model, **chosen)
    sizes, layer = set[int](), SlicedModel.layer

    def seen(self: SlicedModel, number: int, hidden: torch.Tensor, begun: Any) -> torch.Tensor:
        sizes.add(hidden.shape[1])
        return layer(self, number, hidden, begun)

    monkeypatch.setattr(SlicedModel, "layer", seen)
    again.warm_up()
    assert not sizes
    assert again.following.micro_batch_s > 0.0
    longer.warm_up()
    assert sizes == {128}


def test_what_slices_took_in_a_rehearsal_is_forgotten_where_it_is_known_and_soon_elsewhere() -> None:
    """Beside answers a rehearsal's slices take longer than the job's."""
    costs, rehearsed = SliceCosts(), SliceCosts()
    for seconds in (1.0, 0.01, 0.01):
        costs.observe("forward", 64, seconds, 0.0)
    for seconds in (1.0, 0.3, 0.2, 0.3):
        rehearsed.observe("forward", 64, seconds, 0.0)
        rehearsed.observe("forward", 256, seconds, 0.0)
    costs.adopt(rehearsed)
    assert costs.seconds("forward", 64, 0.0) == 0.01
    assert costs.seconds("forward", 256, 0.0) == 0.2
    costs.observe("forward", 256, 0.04, 0.0)
    assert costs.seconds("forward", 256, 0.0) == 0.04
