"""One query through the gateway's core, for tests of its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from gateway.domain import AnswerEvent, Delta, Query
from gateway.http.backend import Backend, Readiness
from gateway.query.answer import answer
from gateway.query.counting import TokenCounter
from gateway.query.targets import NamedModels
from tests.support.fakes.edge import CALLERS, Edge, Script, on_loopback
from tests.support.fakes.federation import Scene, ScriptedSite, scene, until
from wire import federation_pb2 as pb


def run(scenario: Callable[[Scene], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        async with scene(**settings) as here:
            await scenario(here)
            await here.gateway.wait_settled()
            await until(here.nothing_is_left, "all counters at zero")

    asyncio.run(main())


async def collect(here: Scene, query: Query) -> list[AnswerEvent]:
    return [piece async for piece in answer(here.gateway, query)]


def text_of(pieces: list[AnswerEvent]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Delta))


async def assigned_site(here: Scene, *sites: ScriptedSite) -> tuple[ScriptedSite, pb.Assign]:
    """Return the site that got the next query, and the assignment that it accepts."""
    await until(lambda: any(not site.inbox.empty() for site in sites), "an assignment")
    site = next(site for site in sites if not site.inbox.empty())
    return site, await site.assigned()


def start_answer(here: Scene, query: Query) -> tuple[asyncio.Task[None], list[AnswerEvent]]:
    """Return a task that reads the answer, and the list to which it appends the events as they come."""
    pieces: list[AnswerEvent] = []

    async def read() -> None:
        async for piece in answer(here.gateway, query):
            pieces.append(piece)

    return asyncio.create_task(read()), pieces


def backend_of(here: Scene) -> Backend:
    """Return what the HTTP application needs to serve the gateway's core."""
    return Backend(
        answer=partial(answer, here.gateway),
        count=TokenCounter(here.gateway).count,
        models=NamedModels(here.gateway),
        known_models=NamedModels(here.gateway, also_away=True),
        fleet_complete=lambda: here.gateway.fleet_complete,
        routes=here.gateway.routes,
        authenticate=CALLERS.get,
        ready=lambda: Readiness(True, ""),
        version="0",
        clock=here.gateway.clock,
    )


def run_over_http(scenario: Callable[[Scene, Edge], Awaitable[None]], **settings: Any) -> None:
    """Run a scenario of sites, and of clients that ask over HTTP."""

    async def with_edge(here: Scene) -> None:
        async with asyncio.timeout(60), on_loopback(Script(), backend_of(here)) as (edge, _):
            await scenario(here, edge)

    run(with_edge, **settings)
