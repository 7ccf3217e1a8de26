"""Several groups in one process: each a site of its own, that begin and end together."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from site_engine.app import serve_groups
from site_engine.config import SiteConfig, VariantConfig
from site_engine.engine.loading import Loaded
from site_engine.errors import ConfigError
from tests.support.site_fakes import fake_loaded
from tests.support.site_gateway import TOKEN, Gateway, Session, assign, serving
from wire import federation_pb2 as pb


def load(config: SiteConfig) -> Loaded:
    if config.model == "broken":
        raise ConfigError("model 'broken' cannot be served")
    return fake_loaded(name=config.model)


def configs(gateway: Gateway, *models: str) -> list[SiteConfig]:
    variants = (VariantConfig("one", adapter="/srv/one"),)
    return [
        SiteConfig(
            site=f"alpha/{model}",
            model=model,
            gateways=(gateway.address,),
            token=TOKEN,
            slots=2,
            engine_process=False,
            variants=variants if model == "letters" else (),
        )
        for model in models
    ]


async def ask(session: Session, model: str) -> str:
    body = assign(f"to-{model}", "abc", max_tokens=5)
    body["assign"].model = model
    await session.send(**body)
    assert await session.finished(f"to-{model}") == pb.Delta.LENGTH
    return session.text(f"to-{model}")


def test_groups_answer_as_sites_of_their_own_and_a_signal_drains_them_all() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as gateway:
            running = asyncio.create_task(serve_groups(configs(gateway, "letters", "digits"), load))
            sessions = {}
            for _ in range(2):
                session = await gateway.joined()
                hello = await session.welcome(reads_models=True, reads_held=True)
                sessions[hello.site] = session
            assert set(sessions) == {"alpha/letters", "alpha/digits"}
            await sessions["alpha/letters"].served_models("letters", "one")
            await sessions["alpha/digits"].served_models("digits")
            for site, model in (("letters", "letters"), ("letters", "one"), ("digits", "digits")):
                assert await ask(sessions[f"alpha/{site}"], model) == "abcab"
            os.kill(os.getpid(), signal.SIGTERM)
            assert await running == 0
            for session in sessions.values():
                await session.wait_for("bye")

    asyncio.run(scenario())


def test_a_group_that_cannot_begin_ends_the_others_with_its_reason() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as gateway:
            running = asyncio.create_task(serve_groups(configs(gateway, "letters", "broken"), load))
            with pytest.raises(ConfigError, match="model 'broken' cannot be served"):
                await running

    asyncio.run(scenario())
