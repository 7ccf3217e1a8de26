"""Sites whose engines run in processes of their own, behind a gateway: the same answers, also as one dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from site_engine.app import serve
from site_engine.config import SiteConfig
from tests.support.answers import backend_of
from tests.support.child_processes import child_processes
from tests.support.fakes.edge import Edge, Script, on_loopback
from tests.support.fakes.federation import TOKEN, Scene, scene
from tests.support.site_process import spawn_engine
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

WITHIN_S = 150.0
TOKENS = 120
ANSWERS = 6


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


async def until(holds: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(WITHIN_S / 2):
            while not holds():  # noqa: ASYNC110 - processes begin and end without an event
                await asyncio.sleep(0.01)
    except TimeoutError as exc:
        raise AssertionError(f"not in time: {what}") from exc


class Stage:
    def __init__(self, here: Scene, edge: Edge, model: Path) -> None:
        self.here, self.edge, self._model = here, edge, model
        self.sites: dict[str, asyncio.Task[int]] = {}

    def begin(self, name: str, **settings: Any) -> None:
        config = SiteConfig(
            site=name,
            model=str(self._model),
            served_model="m",
            gateways=(self.here.address,),
            token=TOKEN,
            slots=4,
            threads=1,
            iteration_floor_s=0.01,
            **settings,
        )
        self.sites[name] = asyncio.create_task(serve(config, spawn=spawn_engine))

    def is_ready(self, name: str) -> bool:
        assert not self.sites[name].done(), self.sites[name]
        return name in {site.name for site in self.here.gateway.directory.sites if site.state == "ready"}

    async def answer(self, at: int, arrived: Callable[[], None] = lambda: None) -> str:
        """Return the whole text of a stream. `arrived` is called with its first text."""
        messages = [{"role": "user", "content": f"Tell me about the number {at}."}]
        stream = await self.edge.sdk.chat.completions.create(
            model="m", messages=messages, max_tokens=TOKENS, temperature=0.0, stream=True
        )
        text = ""
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            if text:
                arrived()
        arrived()
        return text


def play(model: Path, scenario: Callable[[Stage], Awaitable[None]]) -> None:
    async def main() -> None:
        before = child_processes()
        async with (
            asyncio.timeout(WITHIN_S),
            scene() as here,
            on_loopback(Script(), backend_of(here)) as (edge, _),
        ):
            stage = Stage(here, edge, model)
            try:
                await scenario(stage)
                await here.gateway.wait_settled()
                await until(here.nothing_is_left, "all counters at zero")
            finally:
                for site in stage.sites.values():
                    site.cancel()
                await asyncio.gather(*stage.sites.values(), return_exceptions=True)
                await until(lambda: child_processes() <= before, "no engine is left")

    asyncio.run(main())


def test_an_engine_that_is_killed_in_mid_stream_costs_no_answer_and_comes_back(model_folder: Path) -> None:
    async def scenario(stage: Stage) -> None:
        stage.begin("alone", engine_process=False)
        await until(lambda: stage.is_ready("alone"), "the site with an engine of its own")
        expected = [await stage.answer(at) for at in range(ANSWERS)]
        stage.sites["alone"].cancel()
        await asyncio.gather(stage.sites.pop("alone"), return_exceptions=True)
        assert max(map(len, expected)) > TOKENS / 2, "some run long enough to be cut"
        before = child_processes()
        for name in ("a", "b"):
            stage.begin(name, engine_process=True)
            await until(lambda name=name: stage.is_ready(name), f"{name} is ready")
            if name == "a":
                (victim,) = child_processes() - before
        begun = [asyncio.Event() for _ in range(ANSWERS)]
        asking = [asyncio.create_task(stage.answer(at, begun[at].set)) for at in range(ANSWERS)]
        await asyncio.gather(*(event.wait() for event in begun))
        os.kill(victim, signal.SIGKILL)
        assert await asyncio.gather(*asking) == expected
        await until(lambda: not Path(f"/proc/{victim}").exists(), "no zombie is left")
        assert not stage.sites["a"].done()
        await until(lambda: stage.is_ready("a"), "the site is back, with another engine")
        stage.sites["b"].cancel()
        await asyncio.gather(stage.sites.pop("b"), return_exceptions=True)
        assert [await stage.answer(at) for at in range(2)] == expected[:2]

    play(model_folder, scenario)
