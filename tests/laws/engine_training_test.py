"""What is trained is the gradient of the loss, the same however its slices are spread or resumed."""

from __future__ import annotations

import copy
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from site_engine.core.chain import Variant
from site_engine.core.training import AdapterShape, Failed, Recipe, StepDone
from site_engine.errors import TrainingRefused
from site_engine.training import snapshot as snapshots
from site_engine.training import trainer as trainer_module
from site_engine.training.adapter import Adapter, write_folder
from site_engine.training.data import Dataset
from site_engine.training.micro_batch import MicroBatch, Slices, run_micro_batch
from site_engine.training.optimizer import Optimizer
from site_engine.training.packing import batch_at, micro_batches, pack
from site_engine.training.sliced_model import SlicedModel
from site_engine.training.snapshot import Snapshot
from site_engine.training.tensor_bytes import write_tensors
from tests.support.engine_models import FAMILIES, drain, engine_for, greedy, greedy_answer
from tests.support.model_families import random_model
from tests.support.training import SMALL, computed, equal, examples, run, started, trainer
from tests.support.variants import served

torch.set_num_threads(1)
SHAPE = AdapterShape(4, 8.0)


def passed(
    model: SlicedModel, adapter: Adapter, adapted: list[list[str]], data: Dataset, **how: Any
) -> MicroBatch:
    return computed(model, adapter, adapted, pack(data.examples), **how)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma2"])  # computes in float32
@pytest.mark.parametrize("target", ["all-linear", "attention"])
def test_gradients_are_those_of_finite_differences(name: str, target: str) -> None:
    model, adapter, adapted, _ = started(name, AdapterShape(4, 8.0, target))
    data = examples(5, seed=3)
    gradients = passed(model, adapter, adapted, data).gradients
    count = sum(int(example.learned.sum()) for example in data.examples)
    draw = torch.Generator().manual_seed(4)
    step = 1e-5
    for _ in range(3):
        ways = [torch.randn(each.shape, generator=draw, dtype=each.dtype) for each in gradients]
        step, losses = 1e-5, []
        for sign in (1, -2, 1):  # ahead, behind, and back where it was
            with torch.no_grad():
                for parameter, way in zip(adapter.parameters(), ways, strict=True):
                    parameter.add_(way, alpha=sign * step)
            losses.append(passed(model, adapter, adapted, data, backward=False).loss_sum / count)
        measured = (losses[0] - losses[1]) / (2 * step)
        computed = sum(float((each * way).sum()) for each, way in zip(gradients, ways, strict=True))
        assert computed == pytest.approx(measured, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_is_that_of_each_sequence_alone_in_the_plain_model(name: str) -> None:
    """Packed sequences do not see one another, and each token is learned from the one before."""
    model, adapter, adapted, plain = started(name)
    with torch.no_grad():
        for _, up in adapter.factors.values():
            up.zero_()
    data = examples(6, seed=7)
    expected = 0.0
    for example in data.examples:
        ids = torch.from_numpy(example.ids)
        learned = torch.from_numpy(example.learned).nonzero()[:, 0]
        with torch.no_grad():
            logits = plain(input_ids=ids[None], use_cache=False).logits[0]
        expected += float(F.cross_entropy(logits[learned - 1], ids[learned], reduction="sum"))
    assert passed(model, adapter, adapted, data).loss_sum == pytest.approx(expected, rel=1e-12)


def test_a_served_model_is_untouched_by_a_job_on_its_tensors() -> None:
    model, plain = served()
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    modules = {name: dict(module.__dict__) for name, module in model.model.named_modules()}
    job = trainer(examples(8), model=model.model)
    run(job)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.model.state_dict().items())
    after = dict(model.model.named_modules())
    assert all(after[name].__dict__.keys() == fields.keys() for name, fields in modules.items())
    assert not any(module._forward_hooks for module in after.values())
    engine = engine_for(model)
    engine.submit(greedy("a", [1, 2, 3], 8))
    assert drain(engine)["a"].token_ids == greedy_answer(plain, [1, 2, 3], 8)


def test_a_job_resumed_from_any_snapshot_ends_with_the_same_adapter() -> None:
    data = examples(11, seed=2)
    whole = trainer(data, valid=examples(3, seed=9))
    taken: dict[int, bytes] = {}

    def take(job: Any, slices: int) -> None:
        if slices % 7 == 3:
            taken[job.step] = snapshots.encode(job.snapshot())

    expected = run(whole, take)
    assert 0 in taken
    assert len(taken) > 5
    for step, taken_then in taken.items():
        resumed = trainer(data, valid=examples(3, seed=9), resumed=snapshots.decode(taken_then))
        events = run(resumed)
        assert equal(resumed.adapter.tensors(), whole.adapter.tensors())
        steps = [event for event in events if isinstance(event, StepDone)]
        assert steps == [event for event in expected if isinstance(event, StepDone)][step:]


def test_a_snapshot_comes_with_each_epoch_and_with_time() -> None:
    now_s = iter(range(0, 10**6, 20))
    events = run(trainer(examples(16), clock=lambda: float(next(now_s))))
    at = [event.step for event in events if isinstance(event, Snapshot)]
    assert {4, 8, 12} < set(at)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"about": {"base": "another", "data": "some data"}}, "base"),
        ({"about": {"base": "a base", "data": "other data"}}, "data"),
        ({"recipe": Recipe(epochs=4, batch_size=4, learning_rate=3e-3, seed=5, shape=SHAPE)}, "recipe"),
    ],
)
def test_a_snapshot_of_another_job_is_refused(change: dict[str, Any], named: str) -> None:
    data = examples(6)
    snapshot = trainer(data).snapshot()
    with pytest.raises(TrainingRefused, match=f"{named} differ"):
        trainer(data, resumed=snapshot, **change)


def test_a_snapshot_that_is_cut_is_refused() -> None:
    whole = snapshots.encode(trainer(examples(6)).snapshot())
    assert snapshots.decode(whole).step == 0
    for cut in (b"", whole[:5], whole[: len(whole) // 2], b"{}" * 40):
        with pytest.raises(TrainingRefused, match="can't be read"):
            snapshots.decode(cut)


@pytest.mark.parametrize(
    "note", ["", "{}", "[" * 100_000, '{"step": 1e999, "about": {}}', '{"step": 1, "about": []}', "\ufffd"]
)
def test_a_snapshot_that_does_not_say_what_it_is_of_is_refused(note: str) -> None:
    file = BytesIO()
    write_tensors(file, {"a": torch.ones(2)}, {snapshots.ABOUT: note})
    with pytest.raises(TrainingRefused, match="can't be read"):
        snapshots.decode(file.getvalue())


def test_steps_without_finite_gradients_are_left_out_and_the_third_in_a_row_fails() -> None:
    plain = random_model(FAMILIES["llama"]())
    job = trainer(examples(16), model=plain)
    while job.step < 2:
        job.run_slice()
    before = job.adapter.tensors()
    with torch.no_grad():
        plain.model.norm.weight[0] = float("nan")  # the base's tensors are shared
    events = run(job)
    assert equal(job.adapter.tensors(), before)
    assert isinstance(events[-1], Failed)
    assert "not finite" in events[-1].reason
    assert job.step == 5


def test_lack_of_memory_halves_micro_batches_once_and_then_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    data = examples(8, longest=30)
    expected = trainer(data, train_tokens=32)
    run(expected)
    job, layer = trainer(data, train_tokens=64), SlicedModel.layer

    def small(self: SlicedModel, number: int, hidden: torch.Tensor, begun: Any) -> torch.Tensor:
        if hidden.shape[1] > limit:
            raise torch.OutOfMemoryError("no memory")
        return layer(self, number, hidden, begun)

    monkeypatch.setattr(SlicedModel, "layer", small)
    limit = 32
    events = run(job)
    assert not any(isinstance(event, Failed) for event in events)
    assert equal(job.adapter.tensors(), expected.adapter.tensors())
    limit, starved = 64, trainer(data, train_tokens=64)
    limit = 1
    failed = run(starved)
    reason = "the device has too little memory beside what it serves"
    (failure,) = (event for event in failed if isinstance(event, Failed))
    assert failure is failed[-1]
    assert failure == Failed(reason, elsewhere=True)  # that of another site may have more


def test_no_gradients_of_a_micro_batch_are_kept_while_the_next_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gradients, kept = list["ref[torch.Tensor]"](), list[int]()

    def watched(*given: Any, **how: Any) -> Slices:
        kept.append(sum(each() is not None for each in gradients))
        result = yield from run_micro_batch(*given, **how)
        gradients.extend(map(ref, result.gradients))
        return result

    monkeypatch.setattr(trainer_module, "run_micro_batch", watched)
    run(trainer(examples(8, longest=30), replace(SMALL, epochs=1, batch_size=8), train_tokens=32))
    assert kept == [0] * len(kept)
    assert len(kept) > 2


@pytest.mark.parametrize("what", [(SlicedModel, "layer"), (Optimizer, "copies")])
def test_where_memory_lacks_once_no_step_snapshot_or_validation_is_lost(
    monkeypatch: pytest.MonkeyPatch, what: tuple[type, str]
) -> None:
    data, valid = examples(4, longest=30), examples(2, seed=1, longest=30)
    recipe = replace(SMALL, epochs=2)  # a first step and a later one: the cost is the square of their number
    owner, name = what
    calls = fails_at = 0
    real = getattr(owner, name)

    def lacking(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise torch.OutOfMemoryError("no memory")
        return real(*given)

    def steps_of_a_job() -> list[tuple[int, bool | None]]:
        nonlocal calls
        job = trainer(data, recipe, valid=valid, train_tokens=64)
        calls = 0
        return [
            (each.step, each.valid_loss is None if isinstance(each, StepDone) else None)
            for each in run(job)
            if not isinstance(each, Failed)
        ]

    monkeypatch.setattr(owner, name, lacking)
    expected, count = steps_of_a_job(), calls
    for fails_at in range(1, count + 1):
        assert steps_of_a_job() == expected, fails_at


def test_a_written_adapter_is_served_as_it_was_trained(tmp_path: Path) -> None:
    model, plain = served()
    job = trainer(examples(8), Recipe(epochs=6, batch_size=4, learning_rate=0.05, shape=SHAPE), model.model)
    run(job)
    write_folder(tmp_path / "tuned", job.adapter.tensors(), job.adapter.shape, "base")
    engine = engine_for(model)
    engine.add_variant(Variant("tuned", adapter=str(tmp_path / "tuned")))
    merged = copy.deepcopy(plain)
    modules = dict(merged.named_modules())
    with torch.no_grad():
        for name, (down, up) in job.adapter.factors.items():
            modules[name].weight += up @ down * job.adapter.scale
    for number in range(4):
        prompt = [number, 9, 4]
        for request_id, chain in ((f"base {number}", ""), (f"tuned {number}", "tuned")):
            request = greedy(request_id, prompt, 12)
            request.chain = chain
            engine.submit(request)
    answers = drain(engine)
    for number in range(4):
        assert answers[f"tuned {number}"].token_ids == greedy_answer(merged, [number, 9, 4], 12)
        assert answers[f"base {number}"].token_ids == greedy_answer(plain, [number, 9, 4], 12)
    assert any(answers[f"tuned {n}"].token_ids != answers[f"base {n}"].token_ids for n in range(4))


def test_what_cannot_be_trained_is_refused() -> None:
    model = SlicedModel(random_model(FAMILIES["llama"]()))
    for shape in (AdapterShape(0), AdapterShape(65), AdapterShape(4, 8.0, "everything")):
        with pytest.raises(TrainingRefused):
            model.targets(shape)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 80))
def test_micro_batches_hold_every_sequence_once_within_their_limit(lengths: list[int], limit: int) -> None:
    groups = micro_batches(lengths, limit)
    assert sorted(number for group in groups for number in group) == list(range(len(lengths)))
    assert all(len(group) == 1 or sum(lengths[each] for each in group) <= limit for group in groups)
    assert len(groups) <= max(len(lengths), 1)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 5))
def test_every_epoch_has_every_example_once_in_an_order_of_its_own(count: int, size: int, seed: int) -> None:
    recipe = Recipe(batch_size=size, seed=seed)
    per_epoch = recipe.steps_per_epoch(count)
    epochs = [
        [number for step in range(per_epoch) for number in batch_at(epoch * per_epoch + step, count, recipe)]
        for epoch in range(2)
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(count))] * 2
    assert count < 10 or epochs[0] != epochs[1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"batch_size": 0},
        {"batch_size": 10**6},
        {"learning_rate": 0.0},
        {"learning_rate": float("inf")},
        {"learning_rate": float("nan")},
        {"shape": AdapterShape(4, float("nan"))},
    ],
)
def test_a_recipe_without_meaning_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Recipe(**wrong)


def test_the_order_of_examples_is_the_same_for_ever() -> None:
    """A job goes on at another site, maybe of another version, from the number of its step alone."""
    assert batch_at(0, 10, Recipe(batch_size=10, seed=7)) == [4, 0, 2, 1, 3, 7, 9, 5, 6, 8]
    assert batch_at(4, 10**5, Recipe(batch_size=3, seed=7)) == [65864, 16096, 16054]


@given(st.integers(1, 500))
def test_the_learning_rate_rises_then_falls(total: int) -> None:
    rates = [SMALL.learning_rate_at(step, total) for step in range(total)]
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert max(rates) == pytest.approx(SMALL.learning_rate)
    assert rates[-1] > 0.0
