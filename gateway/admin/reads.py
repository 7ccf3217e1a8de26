"""Serve the reads of the page and `mico top`: snapshot, plot history, events, one query's decisions."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
from litestar import Response, get
from litestar.exceptions import NotFoundException
from litestar.handlers import HTTPRouteHandler

from gateway.admin.access import Access, AnyRequest
from gateway.admin.order_service import event_of
from gateway.errors import BadRequest
from gateway.http.error_handler import database_errors
from gateway.http.exchange import path_after
from gateway.http.pagination import read_page
from gateway.store.queries import OperatorReads, SiteHistory
from gateway.telemetry.history import columns
from gateway.telemetry.publisher import SnapshotPublisher

WINDOWS_MIN = (15, 60, 360, 1440)
DEFAULT_EVENTS, MAX_EVENTS = 100, 1_000


def read_routes(access: Access, publisher: SnapshotPublisher, reads: OperatorReads) -> list[HTTPRouteHandler]:
    @get("/admin/api/overview")
    async def overview(request: AnyRequest) -> Response[bytes]:
        await access.operator(request)
        return _json_bytes(msgspec.json.encode(publisher.snapshot) if publisher.snapshot else b"")

    @get("/admin/api/history")
    async def plot_history(request: AnyRequest) -> Response[bytes]:
        await access.operator(request)
        minutes = request.query_params.get("minutes", "15")
        return _json_bytes(msgspec.json.encode(history_of(publisher, minutes)))

    @get("/admin/api/events")
    async def events(request: AnyRequest) -> Response[bytes]:
        await access.operator(request)
        return _json_bytes(msgspec.json.encode({"events": publisher.events.newest()}))

    @get("/admin/api/sites/{place:path}")
    async def site_events(request: AnyRequest) -> Response[bytes]:
        """Events of one site: `place` is its name, which may have slashes, then "/events"."""
        await access.operator(request)
        name, _, suffix = path_after(request, "/admin/api/sites/").rpartition("/")
        if suffix != "events" or not name:
            raise NotFoundException
        limit = read_page(request, DEFAULT_EVENTS, MAX_EVENTS).limit
        with database_errors():
            history = await reads.site(name, limit)
        return _json_bytes(msgspec.json.encode({"events": event_dicts(history)[:limit]}))

    @get("/admin/api/decisions/{request_id:path}")
    async def decisions(request: AnyRequest) -> Response[bytes]:
        await access.operator(request)
        request_id = path_after(request, "/admin/api/decisions/")
        with database_errors():
            found = await reads.explain(request_id)
        return _json_bytes(msgspec.json.encode({"queries": found}))

    return [overview, plot_history, events, site_events, decisions]


def history_of(publisher: SnapshotPublisher, window: str) -> dict[str, Any]:
    """Return the columns of a window in minutes: a sample per second for the shortest, else per minute.

    Raises BadRequest for an unknown window.
    """
    known = {str(minutes): minutes for minutes in WINDOWS_MIN}
    if window not in known:
        raise BadRequest(f"minutes is one of {', '.join(known)}", param="minutes")
    minutes, kept = known[window], publisher.history
    since = publisher.unix_time() - minutes * 60
    return columns(kept.seconds(since) if minutes == WINDOWS_MIN[0] else kept.minutes(since))


def event_dicts(history: SiteHistory) -> list[dict[str, Any]]:
    """Return events of the site and acts on it, newest first.

    An event of the site has `replica`, which saw it; an act has `who`, the operator.
    """
    seen = [{**msgspec.structs.asdict(event), "who": ""} for event in history.events]
    done = [{**asdict(event_of(entry)), "id": entry.id, "replica": ""} for entry in history.entries]
    return sorted(seen + done, key=lambda event: event["at"], reverse=True)


def _json_bytes(body: bytes) -> Response[bytes]:
    return Response(body, media_type="application/json", headers={"cache-control": "no-store"})
