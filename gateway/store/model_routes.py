"""Keep the model routes: those that operators set, for all replicas, over those of this gateway's file.

A replica learns of a change elsewhere within REFRESH_S. While the database is away the last known routes
hold.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec
from sqlalchemy import delete, func, insert, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.errors import BadRequest
from gateway.routing.model_routes import ModelRoute, Target, When, check_route, check_target_left
from gateway.store.audit import Act, add_entry, key_label
from gateway.store.database import lock_table, reason
from gateway.store.tables import model_routes as table
from gateway.tasks import cancel

log = logging.getLogger(__name__)

REFRESH_S: Final = 1.0
REFRESH_TIMEOUT_S: Final = 2.0
MAX_ROUTES: Final = 200
STAMP_BITS: Final = 40
_FINGERPRINT = select(func.count(), func.coalesce(func.sum(table.c.stamp), 0)).select_from(table)


@dataclass(frozen=True, slots=True)
class StoredRoute:
    """A route as an operator set it."""

    route: ModelRoute
    who: str
    reason: str
    changed_at: float


class RouteTable:
    """`current` is replaced by another mapping at each change. Changes may raise SQLAlchemy's errors."""

    def __init__(self, engine: AsyncEngine, *, clock: Callable[[], float] = time.time) -> None:
        self.current: Mapping[str, ModelRoute] = MappingProxyType({})
        self.stored: Mapping[str, StoredRoute] = {}
        self._of_file: Mapping[str, ModelRoute] = {}
        self._engine = engine
        self._clock = clock
        self._seen: tuple[int, int] | None = None
        self._refreshing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def start(self, of_file: Collection[ModelRoute] = ()) -> None:
        """Read the routes, and again for ever. `of_file`: where the table has no route of the name."""
        self._of_file = {route.name: route for route in of_file}
        self._merge()
        await self._refresh_or_log()
        self._task = asyncio.create_task(self._refresh_for_ever())

    async def close(self) -> None:
        await cancel(self._task)

    async def put(self, route: ModelRoute, act: Act) -> None:
        """Set a route, here at once. Raises BadRequest for one that can't be beside the others."""
        async with self._change() as connection:
            await self._check(connection, route)
            await self._write(connection, route, act, f"set route {route.name}")
        await self._refresh_or_log()

    async def take_out(self, model: str, of_route: str | None, act: Act) -> list[ModelRoute]:
        """Take a model out of one route, or of all; return them as they are now.

        What is left may be a fallback alone. Raises BadRequest where a route would be left without a target:
        then nothing was changed.
        """
        async with self._change() as connection:
            routes = {**self._of_file, **{each.route.name: each.route for each in await _read(connection)}}
            changed = [
                route.without(model)
                for name, route in sorted(routes.items())
                if of_route in (None, name) and route.without(model) != route
            ]
            for route in changed:
                check_target_left(route)
                await self._write(connection, route, act, f"take {model} out of route {route.name}")
        await self._refresh_or_log()
        return changed

    async def remove(self, name: str, act: Act) -> bool:
        """Remove a route; that of the file holds again, if it has one. Return False if there is none."""
        async with self._change() as connection:
            before = await connection.scalar(select(table.c.route).where(table.c.name == name))
            if before is not None:
                await connection.execute(delete(table).where(table.c.name == name))
                action, after = f"remove route {name}", _text(self._of_file.get(name))
                was = _text(_route_of(before, name))
                await add_entry(connection, act, self._clock(), action=action, before=was, after=after)
        await self._refresh_or_log()
        return before is not None

    async def refresh(self) -> None:
        """Read what changed. Raises SQLAlchemy's errors, OSError or TimeoutError, and keeps the known."""
        async with (
            self._refreshing,
            asyncio.timeout(REFRESH_TIMEOUT_S),
            self._engine.connect() as connection,
        ):
            count, stamps = (await connection.execute(_FINGERPRINT)).one()
            if self._seen == (count, int(stamps)):
                return
            self.stored = {each.route.name: each for each in await _read(connection)}
            self._seen = count, int(stamps)
            self._merge()

    def _merge(self) -> None:
        of_table = {name: each.route for name, each in self.stored.items()}
        self.current = MappingProxyType({**self._of_file, **of_table})

    @asynccontextmanager
    async def _change(self) -> AsyncIterator[AsyncConnection]:
        """Begin a transaction that changes routes; it waits for those of other replicas, and reads what they
        have written.
        """
        async with self._engine.begin() as connection:
            await lock_table(connection, table)
            yield connection

    async def _check(self, connection: AsyncConnection, route: ModelRoute) -> None:
        known = {each.route.name: each.route for each in await _read(connection)}
        check_route(route, {**self._of_file, **known}.values())
        if len(known) >= MAX_ROUTES and route.name not in known:
            raise BadRequest(f"there are {MAX_ROUTES} routes already, the most that there may be")

    async def _write(self, connection: AsyncConnection, route: ModelRoute, act: Act, action: str) -> None:
        now = self._clock()
        same = table.c.name == route.name
        before = await connection.scalar(select(table.c.route).where(same))
        was = self._of_file.get(route.name) if before is None else _route_of(before, route.name)
        row = {
            "name": route.name,
            "route": msgspec.to_builtins(route),
            "who": await key_label(connection, act.who),
            "reason": act.reason,
            "changed_at": now,
            "stamp": secrets.randbits(STAMP_BITS),
        }
        await connection.execute(delete(table).where(same))
        await connection.execute(insert(table), row)
        await add_entry(connection, act, now, action=action, before=_text(was), after=_text(route))

    async def _refresh_for_ever(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            await self._refresh_or_log()

    async def _refresh_or_log(self) -> None:
        try:
            await self.refresh()
        except TimeoutError:
            log.warning("routes are as of the last look: no answer within %g s", REFRESH_TIMEOUT_S)
        except (SQLAlchemyError, OSError) as exc:
            log.warning("routes are as of the last look: %s", reason(exc))
        except Exception:
            log.exception("a look at the routes went wrong in an unforeseen way")


def read_file(path: Path) -> list[ModelRoute]:
    """Read the routes of a TOML file, `[[route]]` each. Raises ValueError that names file and mistake."""
    try:
        routes = msgspec.toml.decode(path.read_bytes(), type=RouteFile).route
        for route in routes:
            check_route(route, routes)
        if len({route.name for route in routes}) < len(routes):
            raise ValueError("a name has two routes")
    except BadRequest as exc:
        raise ValueError(f"{path}: {exc.param}: {exc.message}") from exc
    except (OSError, ValueError) as exc:
        raise ValueError(f"{path}: {exc}") from exc
    return routes


class RouteFile(msgspec.Struct, forbid_unknown_fields=True):
    route: list[ModelRoute] = []


async def _read(connection: AsyncConnection) -> list[StoredRoute]:
    found = []
    for row in await connection.execute(select(table)):
        if route := _route_of(row.route, row.name):
            found.append(StoredRoute(route, row.who, row.reason, row.changed_at))
    return found


def _route_of(stored: object, name: str) -> ModelRoute | None:
    try:
        return msgspec.convert(stored, ModelRoute)
    except msgspec.ValidationError as exc:
        log.error("the route %r is not one of this version, and does not hold here: %s", name, exc)
        return None


def _text(route: ModelRoute | None) -> str:
    if route is None:
        return "none"
    targets = ", ".join(map(_target_text, route.targets))
    return f"{targets}; shadow {route.shadow.model} {route.shadow.share:g}" if route.shadow else targets


def _target_text(target: Target) -> str:
    if target.weight <= 0:
        return f"{target.model} off"
    if target.when is When.ALWAYS:
        return f"{target.model} {target.weight:g}"
    seconds = f" {target.slower_than_s:g} s" if target.when is When.SLOWER_THAN else ""
    return f"{target.model} if {target.when.value}{seconds}"
