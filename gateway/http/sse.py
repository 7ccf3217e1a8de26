"""One response of server-sent events: its headers, its frames, its comments against silence, its end.

Nothing is sent before the first frame, so that an early failure gets a status of its own. Never compresses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from litestar.types import Send

from gateway.openai.error_body import Header
from gateway.openai.frames import DONE

KEEP_ALIVE = b": keep-alive\n\n"
HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class EventStream:
    """Used as a context: while it is open, silence is filled with comments.

    A timer looks for silence, and only a comment takes a task: one that every stream ended by cancelling it
    would be a cycle of garbage for each. A lock is held for what opens the stream and for a comment. A frame
    needs none: one send is written in one go, so a frame and a comment may meet and both stay whole.
    """

    def __init__(
        self, send: Send, clock: Callable[[], float], *, keep_alive_s: float, first_byte_s: float
    ) -> None:
        self._send = send
        self._clock = clock
        self._keep_alive_s = keep_alive_s
        self._first_byte_s = first_byte_s
        self._last_s = clock()
        self._lock = asyncio.Lock()
        self._alarm: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None
        self.started = False

    async def __aenter__(self) -> Self:
        self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cuts off a comment that a client does not take: whoever leaves early must not wait for it."""
        self._cancel()
        if self._comment is not None:
            await asyncio.gather(self._comment, return_exceptions=True)

    async def stop_comments(self) -> None:
        """No comment from now on, and none half sent: whether the stream has started is settled."""
        async with self._lock:
            self._cancel()

    async def start(self, headers: tuple[Header, ...] = ()) -> None:
        """Sends the status, once; a second call does nothing."""
        async with self._lock:
            await self._open(headers)

    async def _open(self, headers: tuple[Header, ...] = ()) -> None:
        if not self.started:
            self.started = True
            self._listen()  # from now on for a shorter silence
            await self._send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *headers]})

    async def write(self, frames: bytes) -> None:
        self._last_s = self._clock()
        await self._send({"type": "http.response.body", "body": frames, "more_body": True})

    async def end(self, frames: bytes = b"") -> None:
        """The last frames and [DONE]. A client may trust that a stream without [DONE] was cut."""
        await self.stop_comments()
        await self._send({"type": "http.response.body", "body": frames + DONE, "more_body": False})

    def _listen(self) -> None:
        """Look again when silence would have lasted too long."""
        if self._alarm is not None:
            self._alarm.cancel()
        rest_s = max(0.0, self._rest_s())
        self._alarm = asyncio.get_running_loop().call_later(rest_s, self._look)

    def _look(self) -> None:
        if self._rest_s() > 0:
            self._listen()
        elif self._comment is None or self._comment.done():  # one that is not taken yet looks when it was
            self._comment = asyncio.create_task(self._fill_silence())

    async def _fill_silence(self) -> None:
        async with self._lock:
            await self._open()
            await self.write(KEEP_ALIVE)
        self._listen()

    def _cancel(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if self._comment is not None:
            self._comment.cancel()

    def _rest_s(self) -> float:
        """Until silence has lasted too long."""
        limit_s = self._keep_alive_s if self.started else self._first_byte_s
        return self._last_s + limit_s - self._clock()
