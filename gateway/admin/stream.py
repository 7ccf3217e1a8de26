"""`/admin/stream`: what came while a page was away, then a snapshot a second, encoded once for all."""

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
from gateway.telemetry.publisher import Watch

MOST_LISTENERS = 200
CHECKED_EVERY = 15
"""Snapshots between two looks at whether who listens still may."""
_IS_NUMBER = re.compile(r"[0-9]{1,15}")
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


def stream_routes(access: Access, watch: Watch) -> list[HTTPRouteHandler]:
    listeners: set[object] = set()

    @get("/admin/stream")
    async def stream(request: AnyRequest) -> Stream:
        await access.operator(request)
        if len(listeners) >= MOST_LISTENERS:
            raise Overloaded(f"{MOST_LISTENERS} pages listen already")
        return Stream(listen(request), media_type="text/event-stream", headers=HEADERS)

    async def listen(request: AnyRequest) -> AsyncGenerator[bytes, None]:
        me = object()
        listeners.add(me)
        try:
            last = request.headers.get("last-event-id", "")
            seq = seen_before(watch, last)
            yield b"retry: 2000\n" + event("history", columns_after(watch, seq))
            sent = 0
            while (snapshot := await watch.after(seq)) is not None:
                seq, sent = snapshot.seq, sent + 1
                yield b"id: %b-%d\nevent: snapshot\ndata: %b\n\n" % (
                    watch.boot_id.encode(),
                    seq,
                    watch.encoded,
                )
                if sent % CHECKED_EVERY == 0 and not await still_let_in(access, request):
                    return
        finally:
            listeners.discard(me)

    return [stream]


async def still_let_in(access: Access, request: AnyRequest) -> bool:
    try:
        await access.operator(request)
    except MicoError:
        return False
    return True


def seen_before(watch: Watch, last_event_id: str) -> int:
    """The number of the last snapshot that a page has of this process, 0 if none or none that there was."""
    boot_id, _, seq = last_event_id.partition("-")
    said = int(seq) if boot_id == watch.boot_id and _IS_NUMBER.fullmatch(seq) else 0
    return said if watch.snapshot is not None and said <= watch.snapshot.seq else 0


def columns_after(watch: Watch, seq: int) -> bytes:
    """What a page lacks: all the seconds kept, or those since it was cut off."""
    kept = watch.history.seconds()
    missed = watch.snapshot.seq - seq if watch.snapshot else 0
    newest = kept[max(0, len(kept) - missed) :] if seq else kept
    return msgspec.json.encode({"resumed": bool(seq), "columns": columns(newest)})


def event(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
