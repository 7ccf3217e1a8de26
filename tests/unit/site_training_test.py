"""Runs of training at a site: fences, ends that are repeated, transfers that go on, room, draining."""

from __future__ import annotations

import asyncio
import hashlib
import io
import tarfile
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from site_engine import messages as m
from site_engine.core.training import (
    AdapterShape,
    Content,
    End,
    Failed,
    Kind,
    Saved,
    StepDone,
    StopTraining,
    Train,
    Training,
    TrainingOrder,
)
from site_engine.errors import TrainingRefused, TransferFailed, VariantRefused
from site_engine.federation.connection import Connection
from site_engine.federation.site import Site
from site_engine.federation.training import MAX_SAVED, TrainingRuns
from site_engine.training.archive import pack, unpack
from site_engine.training.snapshot import Snapshot
from site_engine.variants.peft_folder import CONFIG, PREFIX, WEIGHTS
from tests.support.site_fakes import HELLO, FakeClock

BASE = HELLO.models[0]
DATA = b"lines of a file\n" * 10


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


class Trainer:
    """An engine that trains when its test says so."""

    def __init__(self) -> None:
        self.jobs: dict[str, TrainingOrder] = {}
        self.stopped: list[str] = []
        self.refusal: TrainingRefused | None = None
        self.unsaved: Failed | None = None

    def request_load(self) -> None: ...
    def cancel(self, request_ids: Iterable[str]) -> None: ...

    def train(self, order: TrainingOrder, reply: Callable[[TrainingRefused | None], None]) -> None:
        if self.refusal is None:
            self.jobs[order.job_id] = order
        reply(self.refusal)

    def stop_training(self, job_id: str, reply: Callable[[Saved | Failed | None], None]) -> None:
        self.stopped.append(job_id)
        here = self.jobs.pop(job_id, None)
        reply(None if here is None else self.unsaved or Saved(3, last=False, data=b"stopped"))


class Store:
    """The gateway's end of the calls. A fetch breaks after `breaks` bytes, once; `refusal` ends stores."""

    def __init__(self) -> None:
        self.contents = {hashlib.sha256(DATA).digest(): DATA}
        self.offsets: list[int] = []
        self.breaks: int | None = None
        self.refusal: TransferFailed | None = None
        self.stored: list[tuple[str, Kind, int, bytes]] = []

    async def fetch(self, content: Content, received: io.BytesIO) -> None:
        self.offsets.append(received.tell())
        if content.sha256 not in self.contents:
            raise TransferFailed("NOT_FOUND", final=True)
        whole, until, self.breaks = self.contents[content.sha256], self.breaks, None
        received.write(whole[received.tell() : until])
        if received.tell() < content.size_bytes:
            raise TransferFailed("the call was cut")

    async def store(self, order: Train, kind: Kind, step: int, data: bytes) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.stored.append((order.run, kind, step, data))


class Scene:
    def __init__(self, most: int = 2) -> None:
        self.clock, self.trainer, self.store = FakeClock(), Trainer(), Store()
        self.site = Site(HELLO, self.trainer, self.clock, 1)  # type: ignore[arg-type]
        self.served: list[tuple[str, str, bytes]] = []
        self.unservable = ""
        self.tuned, self.old = self.link("east", tunes=True), self.link("west", tunes=False)
        self.tuned.bulk = self.old.bulk = self.store  # type: ignore[assignment]
        self.runs = TrainingRuns(
            self.site,
            self.trainer,
            BASE,
            most,
            pack=lambda data, shape, base: b"tar of " + data,
            serve=self.serve,
            clock=self.clock,
            sleep=lambda _: asyncio.sleep(0),
        )

    def link(self, gateway: str, *, tunes: bool) -> Connection:
        welcome = m.Welcome(gateway, (), 1.0, 1.0, (), protocol=3, reads_models=True, tunes=tunes)
        return self.site.welcomed(self.site.hello(), welcome, lambda: None)

    async def serve(self, name: str, tenant: str, archive: bytes) -> str:
        self.served.append((name, tenant, archive))
        return self.unservable

    def order(self, run: str = "r1", job: str = "j", **more: Any) -> Train:
        data = Content(hashlib.sha256(DATA).digest(), len(DATA))
        train = Train(job, run, "acme", BASE.id, "ft:m", data, **{"epochs": 2, **more})
        self.runs.receive(train)
        return train

    def steps(self, run: str, *numbers: int, total: int = 4) -> None:
        for step in numbers:
            self.clock.now += 1.0
            self.runs.heard(run, StepDone(step, total, 1.0 / step, 0.5, 100 * step))

    def reports(self, connection: Connection | None = None) -> list[Training]:
        taken = (connection or self.tuned).attempts.outbox.take(float("inf"))
        return [each for each in taken if isinstance(each, Training)]

    async def until(self, holds: Callable[[], Any]) -> None:
        async with asyncio.timeout(30):
            while not holds():  # noqa: ASYNC110 - the code under test waits in the same way
                await asyncio.sleep(0)

    async def trains(self, run: str = "r1") -> None:
        await self.until(lambda: run in self.trainer.jobs)

    async def ended(self) -> Training:
        found: list[Training] = []

        def end() -> bool:
            found.extend(each for each in self.reports() if each.end)
            return bool(found)

        await self.until(end)
        return found[0]


@on_a_loop
async def test_a_job_is_fetched_trained_stored_served_and_then_succeeds() -> None:
    scene = Scene()
    order = scene.order(rank=8, alpha=16.0)
    await scene.trains()
    job = scene.trainer.jobs["r1"]
    assert (job.tenant, job.data, job.recipe.shape) == ("acme", DATA, AdapterShape(8, 16.0))
    scene.steps("r1", 1, 2)
    scene.runs.heard("r1", Saved(2, last=False, data=b"two"))
    await scene.until(lambda: len(scene.store.stored) == 2)
    (report,) = scene.reports()
    assert (report.step, report.total_steps, report.trained_tokens) == (2, 4, 200)
    assert (report.tokens_per_s, report.revision, report.end) == (100.0, BASE.revision, End.RUNNING)
    scene.steps("r1", 3, 4)
    scene.runs.heard("r1", Saved(4, last=True, data=b"four"))
    assert (await scene.ended()).end is End.SUCCEEDED
    assert scene.store.stored == [
        ("r1", Kind.SNAPSHOT, 2, b"two"),
        ("r1", Kind.CHECKPOINT, 2, b"tar of two"),
        ("r1", Kind.ADAPTER, 4, b"tar of four"),
    ]
    assert scene.served == [(order.tuned_model, "acme", b"tar of four")]
    assert scene.reports(scene.old) == []


@on_a_loop
async def test_an_end_is_repeated_to_every_gateway_until_the_run_is_dropped() -> None:
    scene = Scene()
    scene.trainer.refusal = TrainingRefused("training_file: line 3: has 602 tokens")
    scene.order()
    assert (await scene.ended()).end is End.FAILED
    other = scene.link("north", tunes=True)
    reporting = asyncio.create_task(scene.runs.report_forever())
    heard: list[Training] = []
    await scene.until(lambda: heard.extend(scene.reports(other)) or len(heard) > 2)
    assert {(each.end, each.error) for each in heard} == {(End.FAILED, str(scene.trainer.refusal))}
    scene.order()  # the order again: the run has ended, and does not begin anew
    assert scene.trainer.jobs == {}
    scene.runs.receive(StopTraining("r1", snapshot=False))
    scene.reports(other)
    for _ in range(20):
        await asyncio.sleep(0)
    assert scene.reports(other) == []
    reporting.cancel()


@on_a_loop
async def test_a_run_that_is_stopped_stores_its_state_first() -> None:
    scene = Scene()
    scene.order()
    await scene.trains()
    scene.steps("r1", 1, 2, 3)
    scene.runs.receive(StopTraining("r1", snapshot=True))
    assert (await scene.ended()).end is End.STOPPED
    assert scene.store.stored == [("r1", Kind.SNAPSHOT, 3, b"stopped")]


@on_a_loop
async def test_a_run_that_is_stopped_ends_also_where_its_state_cannot_be_saved() -> None:
    scene = Scene()
    scene.order()
    await scene.trains()
    scene.trainer.unsaved = Failed("no memory", elsewhere=True)
    scene.runs.receive(StopTraining("r1", snapshot=True))
    report = await scene.ended()
    assert (report.end, report.error) == (End.GIVEN_UP, "no memory")
    assert scene.store.stored == []


@on_a_loop
async def test_a_fetch_goes_on_where_it_was_cut_and_a_missing_file_ends_the_run() -> None:
    scene = Scene()
    scene.store.breaks = 70
    scene.order()
    await scene.trains()
    assert scene.store.offsets == [0, 70]
    scene.order("r2", "other", snapshot=Content(b"x" * 32, 5))
    ended = await scene.ended()
    assert (ended.run, ended.end, ended.error_code) == ("r2", End.GIVEN_UP, "transfer_failed")
    assert "r2" not in scene.trainer.jobs


@on_a_loop
async def test_a_run_that_still_fetches_stops_at_once() -> None:
    scene = Scene()
    scene.tuned.bulk = None  # no gateway has the file now
    scene.order()
    await asyncio.sleep(0)
    scene.runs.receive(StopTraining("r1", snapshot=True))
    assert [each.end for each in scene.reports()] == [End.STOPPED]
    scene.tuned.bulk = scene.store  # type: ignore[assignment]
    for _ in range(20):
        await asyncio.sleep(0)
    assert (scene.store.offsets, scene.trainer.jobs) == ([], {})


@on_a_loop
async def test_a_run_that_is_not_current_is_dropped_without_a_word() -> None:
    scene = Scene()
    scene.order()
    await scene.trains()
    scene.store.refusal = TransferFailed("FAILED_PRECONDITION", final=True, stale=True)
    scene.steps("r1", 1)
    scene.runs.heard("r1", Saved(1, last=False, data=b"one"))
    await scene.until(lambda: scene.trainer.stopped)
    assert scene.trainer.jobs == {}
    assert [each for each in scene.reports() if each.end] == []


@on_a_loop
async def test_training_goes_on_while_snapshots_cannot_be_stored_and_the_newest_count() -> None:
    scene = Scene()
    scene.order(epochs=10)
    await scene.trains()
    scene.store.refusal = TransferFailed("UNAVAILABLE")
    for step in range(1, 8):
        scene.steps("r1", step, total=10)
        scene.runs.heard("r1", Saved(step, last=False, data=b"%d" % step))
        await asyncio.sleep(0)
    scene.store.refusal = None
    await scene.until(lambda: scene.store.stored and scene.store.stored[-1][2] == 7)
    snapshots = [step for _, kind, step, _ in scene.store.stored if kind is Kind.SNAPSHOT]
    assert len(snapshots) <= MAX_SAVED + 1 and snapshots == sorted(snapshots)
    assert scene.trainer.stopped == []


@on_a_loop
async def test_another_run_of_a_job_replaces_the_one_that_is_here() -> None:
    scene = Scene()
    scene.order("r1")
    await scene.trains("r1")
    scene.order("r2")
    await scene.trains("r2")
    assert scene.trainer.stopped == ["r1"]
    scene.runs.heard("r1", StepDone(1, 4, 1.0, 0.5, 9))  # the engine had read its data only then
    assert scene.trainer.stopped == ["r1", "r1"]
    assert {each.run for each in scene.reports()} <= {"r2"}


@on_a_loop
async def test_what_this_site_cannot_train_is_given_up_and_what_no_site_can_fails() -> None:
    for order, refusal, end, word in (
        ({"model": "another"}, None, End.GIVEN_UP, "base_changed"),
        ({"revision": "older"}, None, End.GIVEN_UP, "base_changed"),
        ({"epochs": 0}, None, End.FAILED, "invalid_hyperparameters"),
        ({}, TrainingRefused("full", elsewhere=True), End.GIVEN_UP, "training_refused"),
        ({}, TrainingRefused("bad"), End.FAILED, "training_refused"),
    ):
        scene = Scene()
        scene.trainer.refusal = refusal
        data = Content(hashlib.sha256(DATA).digest(), len(DATA))
        values: dict[str, Any] = {"model": BASE.id, "tuned_model": "ft:m", "data": data, **order}
        scene.runs.receive(Train(job_id="j", run="r1", tenant="acme", **values))
        ended = await scene.ended()
        assert (ended.end, ended.error_code) == (end, word)


@on_a_loop
async def test_there_is_room_for_so_many_runs_and_an_end_makes_some() -> None:
    scene = Scene(most=1)
    scene.order("r1", "j1")
    await scene.trains("r1")
    scene.order("r2", "j2")
    assert ((await scene.ended()).run, scene.trainer.jobs.keys()) == ("r2", {"r1"})
    scene.runs.heard("r1", Failed("the gradients were not finite"))
    ended = await scene.ended()
    while ended.run != "r1":
        ended = await scene.ended()
    assert (ended.end, ended.error) == (End.FAILED, "the gradients were not finite")
    scene.order("r3", "j3")
    await scene.trains("r3")


@on_a_loop
async def test_an_adapter_that_is_not_served_is_no_success() -> None:
    scene = Scene()
    scene.unservable = "it differs from transformers"
    scene.order()
    await scene.trains()
    scene.runs.heard("r1", Saved(4, last=True, data=b"four"))
    ended = await scene.ended()
    assert (ended.end, ended.error_code) == (End.GIVEN_UP, "not_served")
    assert "it differs from transformers" in ended.error


@on_a_loop
async def test_a_site_that_ends_stores_its_runs_and_takes_no_others() -> None:
    scene = Scene()
    scene.order()
    await scene.trains()
    await scene.runs.drain()
    assert [kind for _, kind, _, _ in scene.store.stored] == [Kind.SNAPSHOT]
    assert (await scene.ended()).end is End.STOPPED
    scene.order("r2", "other")
    ended = await scene.ended()
    assert (ended.run, ended.end, ended.error_code) == ("r2", End.GIVEN_UP, "draining")


def test_a_tenants_model_is_told_only_to_gateways_that_keep_it_to_the_tenant() -> None:
    scene = Scene()
    own = replace(BASE, id="ft:m", parent=BASE.id, tenant="acme")
    scene.site.set_models((BASE, own))

    def told(connection: Connection) -> list[tuple[m.Model, ...]]:
        taken = connection.attempts.outbox.take(float("inf"))
        return [each.models for each in taken if isinstance(each, m.Models)]

    assert (told(scene.tuned), told(scene.old)) == ([(BASE, own)], [])
    assert scene.site.hello().models == (BASE,)
    assert told(scene.link("new", tunes=True)) == [(BASE, own)]
    assert told(scene.link("newer, and old", tunes=False)) == []
    everyones = replace(own, id="v", tenant="")
    scene.site.set_models((BASE, own, everyones))
    assert (told(scene.tuned), told(scene.old)) == ([(BASE, own, everyones)], [(BASE, everyones)])


def test_an_archive_has_the_two_files_and_what_is_none_leaves_nothing_behind(tmp_path: Path) -> None:
    factors = {f"{PREFIX}a.lora_A.weight": torch.ones(2, 3), f"{PREFIX}a.lora_B.weight": torch.zeros(3, 2)}
    snapshot = Snapshot(1, {}, {**factors, f"exp_avg.{PREFIX}a.lora_A.weight": torch.ones(2, 3)})
    data = snapshot.saved(last=True).data
    archive = pack(data, AdapterShape(2, 4.0), "base")
    assert archive == pack(data, AdapterShape(2, 4.0), "base")
    folder = unpack(archive, tmp_path)
    assert sorted(each.name for each in folder.iterdir()) == [CONFIG, WEIGHTS]
    assert load_file(folder / WEIGHTS).keys() == factors.keys()
    outside = io.BytesIO()
    with tarfile.open(fileobj=outside, mode="w") as made:
        link = tarfile.TarInfo(CONFIG)
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        made.addfile(link)
    for wrong in (b"", b"x" * 2000, archive[:600], outside.getvalue()):
        with pytest.raises(VariantRefused):
            unpack(wrong, tmp_path)
    assert list(tmp_path.iterdir()) == [folder]
