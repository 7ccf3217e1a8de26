"""One site process from start to end: its messages, its draining, its exit status."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from site_engine.app import serve
from site_engine.config import SiteConfig
from site_engine.engine.loading import Loaded, load_engine
from site_engine.errors import ConfigError
from site_engine.shutdown import EXIT_FAILED
from tests.support.site_fakes import CONTEXT_TOKENS, FakeEngine, fake_loaded
from tests.support.site_gateway import PATIENCE_S, TOKEN, Gateway, assign, serving
from wire import federation_pb2 as pb


def config(gateway: Gateway, **more: object) -> SiteConfig:
    settings = {
        "site": "alpha",
        "model": "letters",
        "gateways": (gateway.address,),
        "token": TOKEN,
        "slots": 2,
    }
    return SiteConfig(**{**settings, **more})


def with_engine(engine: FakeEngine) -> Loaded:
    return fake_loaded(engine)


def start(gateway: Gateway, engine: FakeEngine, **more: object) -> asyncio.Task[int]:
    return asyncio.create_task(serve(config(gateway, **more), lambda _: with_engine(engine)))


def test_a_signal_drains_and_the_process_leaves_in_order() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as gateway:
            serving_site = start(gateway, FakeEngine(), iteration_floor_s=0.002)
            session = await gateway.joined()
            hello = await session.welcome()
            assert (hello.slots, hello.kv_capacity_tokens) == (2, 2 * CONTEXT_TOKENS)
            assert list(hello.models[0].features) == [
                "chat",
                "count",
                "logprobs",
                "resume",
                "resume_text",
                "resume_chat",
                "template_kwargs",
            ]
            await session.send(**assign("a", max_tokens=60))
            await session.until(lambda: session.text("a"))
            os.kill(os.getpid(), signal.SIGTERM)
            assert (await session.wait_for("draining"))[0].reason == "the site is ending (SIGTERM)"
            assert await asyncio.wait_for(serving_site, PATIENCE_S) == 0
            await session.ended()
            assert session.finish("a") == pb.Delta.LENGTH
            assert session.log[-1].WhichOneof("body") == "bye"

    asyncio.run(scenario())


@pytest.mark.parametrize("hurried", [True, False])
def test_what_does_not_end_in_time_is_left_to_the_gateway(hurried: bool) -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as gateway:
            floor_s, drain_s = 3600.0, (3600.0 if hurried else 0.01)
            serving_site = start(gateway, FakeEngine(), iteration_floor_s=floor_s, drain_s=drain_s)
            session = await gateway.linked()
            await session.send(**assign("a", max_tokens=60))
            await session.until(lambda: session.text("a"))
            os.kill(os.getpid(), signal.SIGINT)
            await session.wait_for("draining")
            if hurried:
                os.kill(os.getpid(), signal.SIGINT)
            assert await asyncio.wait_for(serving_site, PATIENCE_S) == (128 + signal.SIGINT if hurried else 0)
            await session.ended()
            assert session.finish("a") == 0
            assert session.log[-1].WhichOneof("body") == "bye"

    asyncio.run(scenario())


def test_a_broken_engine_fails_its_attempts_says_bye_and_leaves_with_a_fault() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as gateway:
            engine = FakeEngine(slots=1)
            serving_site = start(gateway, engine)
            session = await gateway.linked()
            await session.wait_for("load")
            engine.failures += [RuntimeError("device lost")] * 9
            for name in ("a", "b", "c", "d"):
                await session.send(**assign(name))
            assert await asyncio.wait_for(serving_site, PATIENCE_S) == 1
            await session.ended()
            assert "device lost" in session.log[-1].bye.reason
            accepted = {each.attempt_id for each in session.received("accepted")}
            rejected = {each.attempt_id for each in session.received("rejected")}
            assert {session.finish(name) for name in accepted} == {pb.Delta.FAILED}
            assert not accepted & rejected

    asyncio.run(scenario())


HANGS = """
import sys, threading
from site_engine import app
from site_engine.config import SiteConfig
from site_engine.errors import ConfigError
def load(config):
    if config.site == "a/wrong":
        raise ConfigError("it is wrong")
    print("loading", flush=True)
    threading.Event().wait()
app.load_engine = load
each = [SiteConfig(site=f"a/{name}", model="m", gateways=("h:1",), token="t") for name in sys.argv[1:]]
sys.exit(app.run(each))
"""


@contextmanager
def hanging(*groups: str) -> Iterator[subprocess.Popen[str]]:
    """Run a site whose engines load for ever."""
    with subprocess.Popen(
        [sys.executable, "-c", HANGS, *groups],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("groups", [("a",), ("a", "b")])
@pytest.mark.parametrize("signalled", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_process_whose_engine_still_loads(
    signalled: signal.Signals, groups: tuple[str, ...]
) -> None:
    with hanging(*groups) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "loading\n":
            assert process.poll() is None
        process.send_signal(signalled)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert said.count(f"ending while the engine starts: the site is ending ({signalled.name})") == len(groups)


def test_a_group_that_cannot_begin_ends_the_process_also_while_another_loads() -> None:
    with hanging("wrong", "b") as process:
        said, _ = process.communicate(timeout=60)
    assert process.returncode == EXIT_FAILED, said
    assert "it is wrong" in said


def test_a_model_that_cannot_be_loaded_is_named() -> None:
    with pytest.raises(ConfigError, match="'/nowhere/at/all' cannot be served"):
        load_engine(SiteConfig(site="a", model="/nowhere/at/all", gateways=("h:1",)))


def test_composing_a_site_imports_no_framework() -> None:
    command = "import sys, site_engine.app; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", command], text=True).strip() == "[]"
