"""A gateway's core over sites in front of fake servers, one each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from gateway.domain import Delta, Query, SiteState, Usage
from gateway.operator_orders import Standing
from gateway.query.answer import answer
from site_engine.config import SiteConfig
from site_engine.remote_site import serve
from tests.support.fakes.federation import TOKEN, Scene, scene, until
from tests.support.openai_server import OpenAIServer


@dataclass
class Fleet:
    here: Scene
    servers: dict[str, OpenAIServer]

    async def ask(self, query: Query) -> tuple[str, Usage]:
        text, usage = "", Usage(0, 0)
        async for piece in answer(self.here.gateway, query):
            if isinstance(piece, Delta):
                text += piece.text
            elif isinstance(piece, Usage):
                usage = piece
        return text, usage

    async def at_rest(self) -> None:
        def idle() -> bool:
            loads = [site.load for site in self.here.gateway.directory.sites if site.state == "ready"]
            return self.here.nothing_is_left() and not any(load.running or load.pending for load in loads)

        await until(idle, "every counter is back at zero")

    def hold_back(self, *names: str) -> None:
        """As an operator would; all others take queries, however near or fast these are."""
        self.here.gateway.directory.apply_standings({name: Standing(SiteState.PAUSED) for name in names})

    def ready(self) -> set[str]:
        return {site.name for site in self.here.gateway.directory.sites if site.state == "ready"}


@asynccontextmanager
async def fleet(
    *names: str, settings: Mapping[str, Mapping[str, Any]] = MappingProxyType({}), **of_server: Any
) -> AsyncIterator[Fleet]:
    """Run a server and a site before it for each name. `settings`: more of the configuration of a site."""
    sites: list[asyncio.Task[int]] = []
    async with scene() as here:
        made = Fleet(here, {})
        try:
            for name in names:
                server = made.servers[name] = OpenAIServer(models=("m",), **of_server)
                await server.start()
                config = SiteConfig(
                    site=name,
                    engine="openai",
                    url=server.url,
                    gateways=(here.address,),
                    token=TOKEN,
                    **{"slots": 4, **settings.get(name, {})},
                )
                sites.append(asyncio.create_task(serve(config)))
                await until(lambda name=name: name in made.ready(), f"{name} is ready")
            yield made
        finally:
            for site in sites:
                site.cancel()
            await asyncio.gather(*sites, return_exceptions=True)
            for server in made.servers.values():
                await server.die()


def run(scenario: Callable[[Fleet], Awaitable[None]], *names: str, **of_fleet: Any) -> None:
    async def whole() -> None:
        async with fleet(*names, **of_fleet) as made:
            await scenario(made)

    asyncio.run(whole())
