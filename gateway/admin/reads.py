"""What the page and `mico top` read: the newest snapshot, the plots' history, events, one query's story."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
from litestar import Response, get
from litestar.exceptions import NotFoundException
from litestar.handlers import HTTPRouteHandler

from gateway.admin.access import Access, AnyRequest, rest_of
from gateway.admin.order_service import event_of
from gateway.errors import BadRequest
from gateway.http.files import answering, page_of
from gateway.store.queries import Explained, Reads, SiteStory
from gateway.telemetry.history import columns
from gateway.telemetry.publisher import Watch

WINDOWS_MIN = (15, 60, 360, 1440)
EVENTS_DEFAULT, EVENTS_MOST = 100, 1_000


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

    @get("/admin/api/sites/{place:path}")
    async def site_events(request: AnyRequest) -> Response[bytes]:
        """`place` is a site's name, which may have slashes, and "events"."""
        await access.operator(request)
        name, _, what = rest_of(request, "/admin/api/sites/").rpartition("/")
        if what != "events" or not name:
            raise NotFoundException
        most = page_of(request, EVENTS_DEFAULT, EVENTS_MOST).limit
        with answering():
            story = await reads.site(name, most) if reads else SiteStory([], [])
        return _json_bytes(msgspec.json.encode({"events": told(story)[:most]}))

    @get("/admin/api/decisions/{request_id:path}")
    async def decisions(request: AnyRequest) -> Response[bytes]:
        await access.operator(request)
        request_id = rest_of(request, "/admin/api/decisions/")
        with answering():
            found: list[Explained] = await reads.explain(request_id) if reads else []
        return _json_bytes(msgspec.json.encode({"queries": found}))

    return [overview, history, events, site_events, decisions]


def history_of(watch: Watch, asked: str) -> dict[str, Any]:
    """Seconds for the shortest window, else minutes. Raises BadRequest for one that nothing is kept for."""
    known = {str(minutes): minutes for minutes in WINDOWS_MIN}
    if asked not in known:
        raise BadRequest(f"minutes is one of {', '.join(known)}", param="minutes")
    minutes, kept = known[asked], watch.history
    since = watch.unix_time() - minutes * 60
    return columns(kept.seconds(since) if minutes == WINDOWS_MIN[0] else kept.minutes(since))


def told(story: SiteStory) -> list[dict[str, Any]]:
    """Newest first. `replica` saw it and `who` did it: of each event one is empty."""
    seen = [{**msgspec.structs.asdict(event), "who": ""} for event in story.events]
    done = [{**asdict(event_of(entry)), "id": entry.id, "replica": ""} for entry in story.entries]
    return sorted(seen + done, key=lambda event: event["at"], reverse=True)


def _json_bytes(body: bytes) -> Response[bytes]:
    return Response(body, media_type="application/json", headers={"cache-control": "no-store"})
