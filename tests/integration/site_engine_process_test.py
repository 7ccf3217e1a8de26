"""One site process whose engine has another: drains, the loss of the engine, signals while it loads."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from site_engine.app import MAX_LOST_IN_A_ROW, event_loop_factory, serve
from site_engine.config import SiteConfig, VariantConfig
from site_engine.engine.process_spawn import Spawn, spawn
from tests.support.child_processes import child_processes, is_there
from tests.support.fake_engine_process import spawn_fake
from tests.support.site_fakes import CONTEXT_TOKENS
from tests.support.site_gateway import TOKEN, Gateway, Session, assign, serving
from tests.support.tiny_model import write_tiny_model
from wire import federation_pb2 as pb

WITHIN_S = 240.0
spawn_never_ready = partial(spawn, (sys.executable, "-c", "import time; time.sleep(3600)"))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


class Stage:
    """A gateway, and the site: an engine without a model, the tokenizer of a tiny one."""

    def __init__(self, gateway: Gateway, model: Path, spawn: Spawn, settings: Mapping[str, Any]) -> None:
        self.gateway = gateway
        self._before = child_processes()
        config = SiteConfig(
            site="alpha",
            model=str(model),
            served_model="letters",
            gateways=(gateway.address,),
            token=TOKEN,
            slots=2,
            **{"engine_process": True, "iteration_floor_s": 0.03, **settings},
        )
        self.serving = asyncio.create_task(serve(config, spawn=spawn))

    def engine(self) -> int:
        (pid,) = self.engines()
        return pid

    def engines(self) -> set[int]:
        return {each for each in child_processes() - self._before if is_there(each, as_zombie=False)}

    async def linked(self) -> Session:
        while True:
            joined = asyncio.create_task(self.gateway.linked(reads_models=True))
            await asyncio.wait((joined, self.serving), return_when=asyncio.FIRST_COMPLETED)
            assert not self.serving.done(), self.serving
            return await joined


def play(
    model: Path,
    scenario: Callable[[Stage], Awaitable[None]],
    spawn: Spawn = spawn_fake,
    **settings: Any,
) -> None:
    async def main() -> None:
        before = child_processes()
        async with asyncio.timeout(WITHIN_S), serving(Gateway()) as gateway:
            stage = Stage(gateway, model, spawn, settings)
            try:
                await scenario(stage)
            finally:
                stage.serving.cancel()
                await asyncio.gather(stage.serving, return_exceptions=True)
        while child_processes() > before:  # noqa: ASYNC110 - the last is being waited for
            await asyncio.sleep(0.01)

    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(main())


def test_an_engine_that_dies_fails_its_attempts_at_once_and_the_site_joins_again(model_folder: Path) -> None:
    async def scenario(stage: Stage) -> None:
        session = await stage.linked()
        await session.send(**assign("a", max_tokens=60))
        await session.until(lambda: len(session.text("a")) >= 2)
        os.kill(stage.engine(), signal.SIGKILL)
        assert await session.finished("a") == pb.Delta.FAILED
        await session.ended()
        assert session.log[-1].bye.reason == "its engine is lost"
        again = await stage.linked()
        await again.send(**assign("b", max_tokens=5))
        assert await again.finished("b") == pb.Delta.LENGTH
        assert again.text("b") == "abcab"
        first, second = (each.received("hello")[0] for each in (session, again))
        assert (first.boot_id != second.boot_id, list(second.attempts)) == (True, [])

    play(model_folder, scenario, iteration_floor_s=0.2)


def test_of_two_devices_one_is_lost_and_the_site_stays(model_folder: Path) -> None:
    async def scenario(stage: Stage) -> None:
        session = await stage.linked()
        (hello,) = session.received("hello")
        assert (hello.slots, hello.kv_capacity_tokens) == (4, 4 * CONTEXT_TOKENS)
        assert hello.models[0].context_tokens == CONTEXT_TOKENS
        first, second = sorted(stage.engines())
        for name in ("a", "b"):
            await session.send(**assign(name, max_tokens=50))
        await session.until(lambda: len(session.text("a")) >= 2 and len(session.text("b")) >= 2)
        os.kill(first, signal.SIGKILL)
        for name in ("a", "b"):
            assert await session.finished(name) == pb.Delta.LENGTH
            assert session.text(name) == ("abc" * 50)[:50]
        await session.until(lambda: len(stage.engines()) == 2)
        assert second in stage.engines()
        assert not session.over.is_set()

    play(model_folder, scenario, devices=("cpu", "cpu"), engine_process=None)


@pytest.mark.parametrize("sleep", ["disk", "host"])
def test_a_base_sleeps_with_its_variants_and_a_query_for_any_of_them_wakes_it(
    model_folder: Path, sleep: str
) -> None:
    async def scenario(stage: Stage) -> None:
        session = await stage.gateway.linked(reads_models=True, reads_held=True)
        await session.served_models("letters", "one", "two")
        engine = stage.engine()

        async def order(kind: str, model: str) -> str:
            order_id = str(len(session.received("ordered")))
            await session.send(order=pb.ModelOrder(order_id=order_id, kind=kind, model=model))
            await session.until(lambda: [e for e in session.received("ordered") if e.order_id == order_id])
            return str(session.received("ordered")[-1].error)

        def states() -> set[int]:
            return {each.state for each in session.received("models")[-1].models}

        for model in ("two", "letters", "letters"):
            assert await order("sleep", model) == ""
        await session.until(lambda: states() == {pb.Model.SLEEPING})
        assert (engine in stage.engines()) == (sleep == "host")
        for kind, model in (("remove", "one"), ("sleep", "one")):
            assert await order(kind, model) == "letters sleeps here, and its variants with it; wake it first"
        for name, model in (("a", "letters"), ("b", "one"), ("c", "two")):
            body = assign(name, max_tokens=5)
            body["assign"].model = model
            await session.send(**body)
        for name in "abc":
            assert await session.finished(name) == pb.Delta.LENGTH
            assert session.text(name) == "abcab"
        held = {each.attempt_id for each in session.received("held")}
        assert "a" in held  # a base may wake from host memory before the others come
        assert held == set("abc") or sleep == "host"
        await session.until(lambda: states() == {pb.Model.READY})
        assert session.received("models")[-1].models[0].wake_s > 0
        assert not session.over.is_set()

    variants = (VariantConfig("one", adapter="/srv/one"), VariantConfig("two", adapter="/srv/two"))
    play(model_folder, scenario, variants=variants, devices=("cpu",), engine_process=None, sleep=sleep)


def test_an_engine_that_is_started_again_serves_what_orders_have_added_and_not_what_they_removed(
    model_folder: Path, tmp_path: Path
) -> None:
    async def scenario(stage: Stage) -> None:
        session = await stage.linked()
        await session.served_models("letters", "one", "two")
        add = pb.ModelOrder(order_id="1", kind="add", model="three", adapter=str(tmp_path))
        await session.send(order=add)
        await session.send(order=pb.ModelOrder(order_id="2", kind="remove", model="one"))
        await session.served_models("letters", "two", "three")
        os.kill(stage.engine(), signal.SIGKILL)
        await session.ended()
        again = await stage.linked()
        await again.served_models("letters", "two", "three")
        body = assign("a", max_tokens=5)
        body["assign"].model = "three"
        await again.send(**body)
        assert await again.finished("a") == pb.Delta.LENGTH

    variants = (VariantConfig("one", adapter="/srv/one"), VariantConfig("two", adapter="/srv/two"))
    play(model_folder, scenario, variants=variants, models_from=(str(tmp_path),))


def test_a_site_whose_engines_are_lost_one_after_the_other_ends(model_folder: Path) -> None:
    async def scenario(stage: Stage) -> None:
        for _ in range(MAX_LOST_IN_A_ROW):
            session = await stage.linked()
            os.kill(stage.engine(), signal.SIGKILL)
            await session.ended()
        assert await stage.serving == 1

    play(model_folder, scenario)


def test_a_signal_drains_and_ends_both_processes(model_folder: Path) -> None:
    async def scenario(stage: Stage) -> None:
        session = await stage.linked()
        await session.send(**assign("a", max_tokens=60))
        await session.until(lambda: session.text("a"))
        engine = stage.engine()
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await session.wait_for("draining"))[0].reason == "the site is ending (SIGTERM)"
        assert await stage.serving == 0
        assert session.finish("a") == pb.Delta.LENGTH
        assert session.text("a") == "abc" * 20
        assert engine not in child_processes()

    play(model_folder, scenario)


def test_an_engine_that_dies_while_the_site_drains_is_not_started_again(model_folder: Path) -> None:
    async def scenario(stage: Stage) -> None:
        session = await stage.linked()
        await session.send(**assign("a", text="a", max_tokens=500))
        await session.until(lambda: session.text("a"))
        os.kill(stage.engine(), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGTERM)
        await session.wait_for("draining")
        os.kill(stage.engine(), signal.SIGKILL)
        assert await stage.serving == 1
        assert session.finish("a") == pb.Delta.FAILED

    play(model_folder, scenario, iteration_floor_s=0.5)


def test_a_signal_while_the_model_loads_ends_both_processes(model_folder: Path) -> None:
    async def scenario(stage: Stage) -> None:
        while not child_processes() - stage._before:  # noqa: ASYNC110 - until the process is there
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await stage.serving == 0

    play(model_folder, scenario, spawn_never_ready)
