"""What the page and `mico top` read: the newest snapshot, the plots' history, events, one query's story."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Response, get
from litestar.handlers import HTTPRouteHandler

from gateway.admin.access import Access, AnyRequest
from gateway.api.files import answering
from gateway.errors import BadRequest
from gateway.store.queries import Explained, Reads
from gateway.telemetry.history import columns
from gateway.telemetry.watch import Watch

WINDOWS_MIN = (15, 60, 360, 1440)


def read_routes(access: Access, watch: Watch, reads: Reads | None) -> list[HTTPRouteHandler]:
    @get("/admin/api/overview")
    async def overview(request: AnyRequest) -> Response[bytes]:
        await access.operator(request)
        return _json_bytes(watch.encoded)

    @get("/admin/api/history")
    async def history(request: AnyRequest) -> Response[bytes]:
        await access.operator(request)
        minutes = request.query_params.get("minutes", "15")
        return _json_bytes(msgspec.json.encode(history_of(watch, minutes)))

    @get("/admin/api/events")
    async def events(request: AnyRequest) -> Response[bytes]:
        await access.operator(request)
        return _json_bytes(msgspec.json.encode({"events": watch.events.latest()}))

    @get("/admin/api/decisions/{request_id:str}")
    async def decisions(request: AnyRequest) -> Response[bytes]:
        await access.operator(request)
        request_id = request.path_params["request_id"]
        with answering():
            found: list[Explained] = await reads.explain(request_id) if reads else []
        return _json_bytes(msgspec.json.encode({"queries": found}))

    return [overview, history, events, decisions]


def history_of(watch: Watch, asked: str) -> dict[str, Any]:
    """Seconds for the shortest window, else minutes. Raises BadRequest for one that nothing is kept for."""
    known = {str(minutes): minutes for minutes in WINDOWS_MIN}
    if asked not in known:
        raise BadRequest(f"minutes is one of {', '.join(known)}", param="minutes")
    minutes, kept = known[asked], watch.history
    since = watch.unix_time() - minutes * 60
    return columns(kept.seconds(since) if minutes == WINDOWS_MIN[0] else kept.minutes(since))


def _json_bytes(body: bytes) -> Response[bytes]:
    return Response(body, media_type="application/json", headers={"cache-control": "no-store"})
