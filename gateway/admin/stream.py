"""Serve `/admin/stream`: the history that a page lacks, then a snapshot per second, encoded once for all."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator

import msgspec
from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.response import Stream

from gateway.admin.access import Access, AnyRequest
from gateway.errors import MicoError, Overloaded
from gateway.telemetry.history import columns
from gateway.telemetry.publisher import SnapshotPublisher

MAX_LISTENERS = 200
RECHECK_EVERY = 15
"""Snapshots between two checks that a listener is still authorized."""
_IS_NUMBER = re.compile(r"[0-9]{1,15}")
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


def stream_routes(access: Access, publisher: SnapshotPublisher) -> list[HTTPRouteHandler]:
    listeners: set[object] = set()

    @get("/admin/stream")
    async def stream(request: AnyRequest) -> Stream:
        await access.operator(request)
        if len(listeners) >= MAX_LISTENERS:
            raise Overloaded(f"{MAX_LISTENERS} pages listen already")
        return Stream(listen(request), media_type="text/event-stream", headers=HEADERS)

    async def listen(request: AnyRequest) -> AsyncGenerator[bytes, None]:
        listener = object()
        listeners.add(listener)
        try:
            last = request.headers.get("last-event-id", "")
            seq = last_seen_seq(publisher, last)
            yield b"retry: 2000\n" + sse_event("history", columns_after(publisher, seq))
            sent = 0
            while (snapshot := await publisher.after(seq)) is not None:
                seq, sent = snapshot.seq, sent + 1
                yield b"id: %b-%d\nevent: snapshot\ndata: %b\n\n" % (
                    publisher.boot_id.encode(),
                    seq,
                    publisher.encoded,
                )
                if sent % RECHECK_EVERY == 0 and not await is_still_authorized(access, request):
                    return
        finally:
            listeners.discard(listener)

    return [stream]


async def is_still_authorized(access: Access, request: AnyRequest) -> bool:
    try:
        await access.operator(request)
    except MicoError:
        return False
    return True


def last_seen_seq(publisher: SnapshotPublisher, last_event_id: str) -> int:
    """Return the number of the last snapshot that a page received from this process, 0 if there is none."""
    boot_id, _, seq = last_event_id.partition("-")
    seen = int(seq) if boot_id == publisher.boot_id and _IS_NUMBER.fullmatch(seq) else 0
    return seen if publisher.snapshot is not None and seen <= publisher.snapshot.seq else 0


def columns_after(publisher: SnapshotPublisher, seq: int) -> bytes:
    """Encode the seconds that a page lacks: all that are kept, or those since its connection broke."""
    kept = publisher.history.seconds()
    missed = publisher.snapshot.seq - seq if publisher.snapshot else 0
    newest = kept[max(0, len(kept) - missed) :] if seq else kept
    return msgspec.json.encode({"resumed": bool(seq), "columns": columns(newest)})


def sse_event(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
