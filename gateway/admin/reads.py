"""What the page and `mico top` read: the newest snapshot, the plots' history, events, one query's story."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import Parameter

from gateway.admin.access import Access, AnyRequest
from gateway.errors import BadRequest
from gateway.store.queries import Explained, Reads
from gateway.telemetry.history import columns
from gateway.telemetry.watch import Watch

WINDOWS_MIN = {15: "seconds", 60: "minutes", 360: "minutes", 1440: "minutes"}


def read_routes(access: Access, watch: Watch, reads: Reads | None) -> list[HTTPRouteHandler]:
    @get("/admin/api/overview")
    async def overview(request: AnyRequest) -> Response[bytes]:
        await access.operator(request)
        return _json_bytes(watch.encoded)

    @get("/admin/api/history")
    async def history(request: AnyRequest, minutes: int = 15) -> Response[bytes]:
        await access.operator(request)
        return _json_bytes(msgspec.json.encode(history_of(watch, minutes)))

    @get("/admin/api/events")
    async def events(
        request: AnyRequest, limit: Annotated[int, Parameter(ge=1, le=1000)] = 200
    ) -> Response[bytes]:
        await access.operator(request)
        return _json_bytes(msgspec.json.encode({"events": watch.events.latest(limit)}))

    @get("/admin/api/decisions/{request_id:str}")
    async def decisions(request: AnyRequest, request_id: str) -> Response[bytes]:
        await access.operator(request)
        found: list[Explained] = await reads.explain(request_id) if reads else []
        return _json_bytes(msgspec.json.encode({"queries": found}))

    return [overview, history, events, decisions]


def history_of(watch: Watch, minutes: int) -> dict[str, Any]:
    """Raises BadRequest for a window that nothing is kept for."""
    if minutes not in WINDOWS_MIN:
        known = ", ".join(map(str, WINDOWS_MIN))
        raise BadRequest(f"minutes is one of {known}", param="minutes")
    since = watch.unix_time() - minutes * 60
    kept = watch.history
    return columns(kept.seconds(since) if WINDOWS_MIN[minutes] == "seconds" else kept.minutes(since))


def _json_bytes(body: bytes) -> Response[bytes]:
    return Response(body, media_type="application/json", headers={"cache-control": "no-store"})
