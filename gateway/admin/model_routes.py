"""Serve the model routes below `/admin/api/routes`, for `mico routes`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import get, post
from litestar.handlers import HTTPRouteHandler

from gateway.admin.access import Access, AnyRequest
from gateway.admin.tenancy import act, body_of, translated_errors
from gateway.errors import NotFound
from gateway.federation.directory import Directory
from gateway.routing.model_routes import ModelRoute, Shadow, Target
from gateway.store.model_routes import RouteTable
from gateway.telemetry.publisher import SnapshotPublisher
from gateway.telemetry.route_figures import TargetFigures


class NewRoute(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    targets: tuple[Target, ...]
    shadow: Shadow | None = None
    reason: str = ""


class Removal(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    reason: str = ""


class Off(msgspec.Struct, forbid_unknown_fields=True):
    """Take `model` out of the route of this name, or of every route."""

    model: str
    name: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RouteFacts:
    """Describes routes to operators."""

    table: RouteTable
    directory: Directory
    figures: Callable[[], list[TargetFigures]]

    def of(self, route: ModelRoute) -> dict[str, Any]:
        stored = self.table.stored.get(route.name)
        return {
            "name": route.name,
            "targets": [
                {**msgspec.to_builtins(target), "served": target.model in self.directory.served}
                for target in route.targets
            ],
            "shadow": msgspec.to_builtins(route.shadow),
            "source": "file" if stored is None else "operator",
            "who": stored.who if stored else "",
            "reason": stored.reason if stored else "",
            "changed_at": stored.changed_at if stored else None,
            "figures": [msgspec.to_builtins(each) for each in self.figures() if each.route == route.name],
        }

    def named(self, name: str) -> dict[str, Any]:
        """Describe the current route of a name; without a route, it has no targets."""
        route = self.table.current.get(name)
        return self.of(route) if route else {"name": name, "targets": []}


def model_route_routes(
    access: Access, table: RouteTable, directory: Directory, publisher: SnapshotPublisher
) -> list[HTTPRouteHandler]:
    facts = RouteFacts(
        table, directory, lambda: publisher.snapshot.model_routes if publisher.snapshot else []
    )

    @get("/admin/api/routes")
    async def list_routes(request: AnyRequest) -> dict[str, Any]:
        await access.operator(request)
        return {"routes": [facts.named(name) for name in sorted(table.current)]}

    @post("/admin/api/routes", status_code=200)
    async def set_route(request: AnyRequest) -> dict[str, Any]:
        who = (await access.acting_operator(request)).who
        new = await body_of(request, NewRoute)
        async with translated_errors():
            await table.put(ModelRoute(new.name, new.targets, new.shadow), act(who, new.reason))
        return facts.named(new.name)

    @post("/admin/api/routes/remove", status_code=200)
    async def remove_route(request: AnyRequest) -> dict[str, Any]:
        who = (await access.acting_operator(request)).who
        body = await body_of(request, Removal)
        async with translated_errors():
            if not await table.remove(body.name, act(who, body.reason)):
                raise NotFound(f"no operator has set a route {body.name!r}")
        return facts.named(body.name)

    @post("/admin/api/routes/off", status_code=200)
    async def take_out(request: AnyRequest) -> dict[str, Any]:
        who = (await access.acting_operator(request)).who
        body = await body_of(request, Off)
        async with translated_errors():
            changed = await table.take_out(body.model, body.name, act(who, body.reason))
        if not changed:
            where = "any route" if body.name is None else f"a route {body.name!r}"
            raise NotFound(f"{body.model!r} takes no queries of {where}")
        return {"routes": [facts.of(route) for route in changed]}

    return [list_routes, set_route, remove_route, take_out]
