"""A site before a foreign OpenAI server, for tests of the remote engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from site_engine.config import SiteConfig
from site_engine.remote_site import serve
from tests.support.openai_server import OpenAIServer, openai_server
from tests.support.site_gateway import PATIENCE_S, TOKEN, Gateway, Session, assign, serving
from wire import federation_pb2 as pb


def config(server: OpenAIServer, gateway: Gateway, **more: Any) -> SiteConfig:
    settings: dict[str, Any] = {
        "site": "front",
        "engine": "openai",
        "url": server.url,
        "gateways": (gateway.address,),
        "token": TOKEN,
        "slots": 4,
    }
    return SiteConfig(**{**settings, **more})


@dataclass
class Scene:
    server: OpenAIServer
    gateway: Gateway
    session: Session
    hello: pb.Hello

    async def refused(self, attempt_id: str) -> pb.Rejected:
        def mine() -> list[pb.Rejected]:
            return [each for each in self.session.received("rejected") if each.attempt_id == attempt_id]

        await self.session.until(mine)
        assert not self.session.finish(attempt_id)
        return mine()[0]

    async def load(self, **figures: int) -> pb.Load:
        """The first report that says so."""

        def found() -> list[pb.Load]:
            said = self.session.received("load")
            return [each for each in said if all(getattr(each, n) == v for n, v in figures.items())]

        await self.session.until(found)
        return found()[0]


@asynccontextmanager
async def scene(*, settings: dict[str, Any] | None = None, **of_server: Any) -> AsyncIterator[Scene]:
    async with openai_server(**of_server) as server, serving(Gateway()) as gateway:
        site = asyncio.create_task(serve(config(server, gateway, **(settings or {}))))
        try:
            session = await gateway.joined()
            hello = await session.welcome(reads_models=True)
            yield Scene(server, gateway, session, hello)
        finally:
            if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # else it is ending, and hears none
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(site, PATIENCE_S)


def run(scenario: Callable[[Scene], Awaitable[None]], **of_scene: Any) -> None:
    async def whole() -> None:
        async with scene(**of_scene) as here:
            await scenario(here)

    asyncio.run(whole())


def chat(attempt_id: str, text: str, **sampling: Any) -> dict[str, pb.Assign]:
    body = assign(attempt_id, **sampling)["assign"]
    body.chat.messages.extend([pb.ChatMessage(role="user", content=text)])
    return {"assign": body}
