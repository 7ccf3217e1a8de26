"""A job on an engine's thread: from lines of a file to a tuned model that the same engine serves."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from site_engine.core.chain import Chain, Variant
from site_engine.core.request import Output, Request, Sampling
from site_engine.core.training import AdapterShape, Failed, Recipe, Saved, StepDone, TrainingOrder
from site_engine.engine.build import packed_engine
from site_engine.engine.engine_thread import EngineThread
from site_engine.engine.settings import EngineSettings
from site_engine.engine_client import Listener
from site_engine.errors import TrainingRefused
from site_engine.model import loader
from site_engine.training import snapshot as snapshots
from site_engine.training.adapter import write_folder
from site_engine.training.optimizer import Optimizer
from tests.support.tiny_model import write_tiny_model
from tests.support.training import chats

torch.set_num_threads(1)
PATIENCE_S = 60.0
RECIPE = Recipe(epochs=6, batch_size=8, learning_rate=0.02, seed=1, shape=AdapterShape(8, 16.0))
ORDER = TrainingOrder("ftjob-1", "acme", RECIPE, b"\n".join(chats(16)) + b"\n", chats(3)[0])


class Owner:
    """The event loop's side of an engine's thread, played by the test's own thread."""

    def __init__(self, model: loader.LoadedModel) -> None:
        self.calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self.events: list[StepDone | Saved | Failed] = []
        self.outputs: list[Output] = []
        engine = packed_engine(model, EngineSettings(slots=4, kv_tokens=2048), time.monotonic)
        self.thread = EngineThread(engine, self.calls.put, time.monotonic)
        self.thread.start(Listener(self.outputs.extend, lambda _: None, lambda _: None, self.heard))

    def heard(self, job_id: str, event: StepDone | Saved | Failed) -> None:
        assert job_id == "ftjob-1"
        self.events.append(event)

    def until(self, holds: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not holds():
            self.calls.get(timeout=max(0.01, deadline_s - time.monotonic()))()

    def answer(self, call: Callable[[Callable[[Any], None]], None]) -> Any:
        answers: list[Any] = []
        call(answers.append)
        self.until(lambda: answers)
        return answers[0]

    def train(self, order: TrainingOrder) -> TrainingRefused | None:
        refused: TrainingRefused | None = self.answer(lambda reply: self.thread.trainer.train(order, reply))
        return refused

    def ended(self) -> Saved:
        """Wait for the job's end and return its last snapshot."""
        self.until(lambda: any(isinstance(each, Saved) and each.last for each in self.events))
        return next(each for each in self.events if isinstance(each, Saved) and each.last)

    def text(self, model: loader.LoadedModel, asked: str, chain: str) -> str:
        prompt = model.tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}], add_generation_prompt=True, return_dict=False
        )
        request = Request(f"{chain} {asked}", prompt, Sampling(max_tokens=8, temperature=0.0), chain=chain)
        self.answer(lambda reply: self.thread.submit([request], reply))
        self.until(lambda: any(each.request_id == request.id and each.finish for each in self.outputs))
        return "".join(each.text for each in self.outputs if each.request_id == request.id)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> loader.LoadedModel:
    return loader.load(str(write_tiny_model(tmp_path_factory.mktemp("model"))))


@pytest.fixture
def owner(model: loader.LoadedModel) -> Iterator[Owner]:
    made = Owner(model)
    yield made
    made.thread.stop()


def test_a_job_becomes_a_tuned_model_of_the_same_engine(
    owner: Owner, model: loader.LoadedModel, tmp_path: Path
) -> None:
    assert owner.train(ORDER) is None
    saved = snapshots.decode(owner.ended().data)
    steps = [each for each in owner.events if isinstance(each, StepDone)]
    assert [each.step for each in steps] == list(range(1, 13))
    assert [each.valid_loss is not None for each in steps] == [False, True] * 6
    assert steps[-1].loss < steps[0].loss / 2
    write_folder(tmp_path / "tuned", saved.adapter, RECIPE.shape, model.name)
    variant = Variant("tuned", adapter=str(tmp_path / "tuned"))
    chain = owner.answer(lambda reply: owner.thread.add_variant(variant, reply))
    assert isinstance(chain, Chain), chain
    assert owner.text(model, "what is 3?", "") != "1!"
    answers = [owner.text(model, f"what is {number}?", "tuned") for number in range(8)]
    assert sum(answer.endswith("!") and len(answer) == 2 for answer in answers) >= 6


def test_a_stopped_job_goes_on_from_where_it_stopped_and_ends_the_same(
    owner: Owner, model: loader.LoadedModel
) -> None:
    owner.train(ORDER)
    owner.until(lambda: sum(isinstance(each, StepDone) for each in owner.events) >= 3)
    stopped = owner.answer(lambda reply: owner.thread.trainer.stop_training("ftjob-1", reply))
    assert 3 <= stopped.step < 12
    assert owner.answer(lambda reply: owner.thread.trainer.stop_training("ftjob-1", reply)) is None
    owner.train(replace(ORDER, snapshot=stopped.data))
    resumed = owner.ended()
    whole = Owner(model)
    try:
        whole.train(ORDER)
        assert whole.ended() == resumed
    finally:
        whole.thread.stop()


@pytest.mark.parametrize("what", [(Optimizer, "copies"), (snapshots, "encode")])
def test_a_job_whose_state_has_no_room_ends_here_and_the_engine_goes_on(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, what: tuple[Any, str]
) -> None:
    def lacking(*_: object) -> Any:
        raise MemoryError

    owner.train(replace(ORDER, recipe=replace(RECIPE, epochs=10_000)))
    owner.until(lambda: owner.events)
    with monkeypatch.context() as patched:
        patched.setattr(*what, lacking)
        failed = owner.answer(lambda reply: owner.thread.trainer.stop_training("ftjob-1", reply))
    assert isinstance(failed, Failed) and failed.elsewhere
    owner.events.clear()
    assert owner.train(ORDER) is None
    assert owner.ended().step == 12


def test_a_job_whose_adapter_cannot_be_written_fails_here(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = snapshots.encode

    def lacking(snapshot: snapshots.Snapshot) -> bytes:
        if snapshot.step == 12:
            raise MemoryError
        return real(snapshot)

    monkeypatch.setattr(snapshots, "encode", lacking)
    owner.train(ORDER)
    owner.until(lambda: any(isinstance(each, Failed) and each.elsewhere for each in owner.events))
    assert [each.step for each in owner.events if isinstance(each, Saved)] == [2, 4, 6, 8, 10]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"data": ORDER.data + b'{"messages": 1}\n{}\n'},
            "training_file: line 17: .*\ntraining_file: line 18",
        ),
        ({"data": b""}, "training file is empty"),
        ({"valid": b"x"}, "validation_file: line 1: is not JSON"),
        ({"data": b'{"prompt": "a", "completion": "%s"}' % (b"b" * 600)}, "line 1: has 602 tokens"),
        ({"snapshot": b"some bytes"}, "snapshot can't be read"),
        ({"recipe": replace(RECIPE, shape=AdapterShape(100))}, "rank 100 is not 1 to 64"),
    ],
)
def test_a_job_that_cannot_be_trained_is_refused_with_the_reason(
    owner: Owner, change: dict[str, Any], reason: str
) -> None:
    import re

    refused = owner.train(replace(ORDER, **change))
    assert isinstance(refused, TrainingRefused)
    assert re.search(reason, str(refused))
    assert owner.events == []


def test_a_job_of_the_same_name_is_refused_and_the_first_goes_on(owner: Owner) -> None:
    owner.train(ORDER)
    assert "trained here already" in str(owner.train(ORDER))
    assert owner.ended().step == 12
