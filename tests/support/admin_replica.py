"""A gateway's operator API over its real core and a real database, for tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import httpx2

from gateway.admin.access import Access
from gateway.admin.models import SiteModels
from gateway.admin.order_service import OrderService
from gateway.admin.routes import AdminContext, admin_routes
from gateway.domain import AnswerEvent, Caller, Delta
from gateway.http.app import create_http
from gateway.http.backend import Backend, Readiness
from gateway.query.answer import answer
from gateway.store.database import open_engine
from gateway.store.ended_sessions import EndedSessions
from gateway.store.model_routes import RouteTable
from gateway.store.orders import OrderTable
from gateway.store.queries import OperatorReads
from gateway.store.recorder import Recorder
from gateway.store.snapshots import SnapshotTable
from gateway.store.writer import DatabaseWriter
from gateway.telemetry.publisher import SnapshotPublisher
from gateway.telemetry.replicas import SummaryExchange
from tests.support.fakes.federation import Scene, scene

ADMIN, USER = "admin-key", "user-key"

BEARER = {"authorization": f"Bearer {ADMIN}"}


@dataclass
class Replica:
    """One replica's operator side. `now` moves unix time; `callers` are the keys that are good now."""

    here: Scene
    publisher: SnapshotPublisher
    order_service: OrderService
    book: OrderTable
    http: httpx2.AsyncClient
    callers: dict[str, Caller]
    exchange: SummaryExchange
    recorder: Recorder
    shift_s: list[float] = field(default_factory=lambda: [0.0])

    async def act(self, site: str, verb: str, **body: Any) -> httpx2.Response:
        asked = {"reason": "a test", **body}
        return await self.http.post(f"/admin/api/sites/{site}/{verb}", json=asked, headers=BEARER)

    async def state(self, site: str) -> str:
        listed = (await self.http.get("/admin/api/sites", headers=BEARER)).json()["sites"]
        return str(next(each["state"] for each in listed if each["name"] == site))

    def pass_time(self, seconds: float) -> None:
        self.shift_s[0] += seconds


@asynccontextmanager
async def open_replica(here: Scene, url: str, name: str = "g1") -> AsyncIterator[Replica]:
    engine = open_engine(url)
    shift = [0.0]

    def unix_time() -> float:
        return time.time() + shift[0]

    callers = {ADMIN: Caller("key-a", "ops", admin=True), USER: Caller("key-u", "shop")}
    snapshots = SnapshotTable(engine)
    reads = OperatorReads(engine)
    recorder = Recorder(Path(mkdtemp(dir=Path(str(engine.url.database)).parent)), DatabaseWriter(engine))
    await recorder.start()
    publisher = SnapshotPublisher(
        here.gateway.directory,
        name,
        unix_time=unix_time,
        history_store=snapshots,
        store_event=partial(recorder.record_event, replica=name),
    )
    exchange = SummaryExchange(snapshots, name, publisher.summary, publisher.events.add, unix_time=unix_time)
    await publisher.restore_events(reads.events_of_replica)
    book = OrderTable(engine)
    order_service = OrderService(
        book, here.gateway.directory, here.gateway.federation.links, publisher, unix_time=unix_time
    )
    by_id = {caller.key_id: secret for secret, caller in callers.items()}
    backend = Backend(
        answer=partial(answer, here.gateway),
        models=lambda: list(here.gateway.directory.served.values()),
        authenticate=callers.get,
        ready=lambda: Readiness(True, ""),
        version="0",
        clock=here.gateway.clock,
        unix_time=unix_time,
    )
    routes = RouteTable(engine, clock=unix_time)
    store: Any = SimpleNamespace(read=reads, hours=None, clock=unix_time)  # no tenants, keys or quotas
    context = AdminContext(
        directory=here.gateway.directory,
        publisher=publisher,
        order_service=order_service,
        reads=reads,
        store=store,
        routes=routes,
        models=SiteModels(here.gateway.directory, here.gateway.federation.links, book),
    )
    ended_sessions = EndedSessions(engine, unix_time=unix_time)
    access = Access(backend, lambda key_id: callers.get(by_id.get(key_id, "")), b"k" * 32, ended_sessions)
    await routes.start()
    here.gateway.routes = publisher.route_figures.routes = lambda: routes.current
    transport = httpx2.ASGITransport(create_http(backend, admin_routes(backend, access, context)))
    await order_service.start()
    await publisher.start(lambda: exchange.summaries)
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as http:
        try:
            yield Replica(here, publisher, order_service, book, http, callers, exchange, recorder, shift)
        finally:
            publisher.close()
            await order_service.close()
            await routes.close()
            await asyncio.gather(*publisher.saving)
            await recorder.close()
            await engine.dispose()


def play(url: str, scenario: Callable[[Replica], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), scene() as here, open_replica(here, url) as operator:
            await scenario(operator)

    asyncio.run(main())


async def text_of(here: Scene, **sampling: Any) -> str:
    pieces: list[AnswerEvent] = [piece async for piece in answer(here.gateway, here.query(**sampling))]
    return "".join(piece.text for piece in pieces if isinstance(piece, Delta))


async def site_events(o: Replica, site: str, limit: int = 100) -> list[tuple[str, str]]:
    """Return who saw or did what at a site, oldest first."""
    path = f"/admin/api/sites/{site}/events?limit={limit}"
    events = (await o.http.get(path, headers=BEARER)).raise_for_status().json()["events"]
    return [(event["who"] or event["replica"], event["text"]) for event in reversed(events)]


async def sign_in(o: Replica, **more: Any) -> httpx2.Response:
    return await o.http.post("/admin/api/session", json={"key": ADMIN, **more})
