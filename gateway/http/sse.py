"""Sends one response of server-sent events: headers, frames, comments during silence, the end.

Sends nothing before the first frame, so that an early failure gets its own status. Does not compress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from litestar.types import Send

from gateway.openai.error_body import Header

KEEP_ALIVE = b": keep-alive\n\n"
HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class EventStream:
    """Context manager that sends a comment whenever the stream has been silent for too long.

    A timer detects silence, and a task is created only to send a comment: a task per stream, cancelled at its
    end, would leave a reference cycle as garbage. A lock guards the opening of the stream and the comments.
    Frames need no lock: each send is written at once, so a concurrent frame and comment both stay intact.
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
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None
        self.started = False

    async def __aenter__(self) -> Self:
        self._start_timer()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel a comment that the client does not read, so that leaving early does not wait for it."""
        self._cancel()
        if self._comment is not None:
            await asyncio.gather(self._comment, return_exceptions=True)

    async def stop_comments(self) -> None:
        """Send no more comments. When this returns, `started` is final and no comment is half sent."""
        async with self._lock:
            self._cancel()

    async def start(self, headers: tuple[Header, ...] = ()) -> None:
        """Send the status and the headers; a second call does nothing."""
        async with self._lock:
            await self._open(headers)

    async def _open(self, headers: tuple[Header, ...] = ()) -> None:
        if not self.started:
            self.started = True
            self._start_timer()  # keep_alive_s applies from now on
            await self._send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *headers]})

    def write(self, frames: bytes) -> Awaitable[None]:
        """Send frames. Waits only if the client reads too slowly."""
        self._last_s = self._clock()
        return self._send({"type": "http.response.body", "body": frames, "more_body": True})

    async def end(self, frames: bytes) -> None:
        """Send the last frames. The format's terminal frame shows clients that the stream was not cut."""
        await self.stop_comments()
        await self._send({"type": "http.response.body", "body": frames, "more_body": False})

    def _start_timer(self) -> None:
        """Set the timer to the moment when the silence exceeds its limit."""
        if self._timer is not None:
            self._timer.cancel()
        remaining_s = max(0.0, self._remaining_s())
        self._timer = asyncio.get_running_loop().call_later(remaining_s, self._on_timer)

    def _on_timer(self) -> None:
        if self._remaining_s() > 0:
            self._start_timer()
        elif self._comment is None or self._comment.done():  # a pending comment restarts the timer itself
            self._comment = asyncio.create_task(self._send_comment())

    async def _send_comment(self) -> None:
        async with self._lock:
            await self._open()
            await self.write(KEEP_ALIVE)
        self._start_timer()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()

    def _remaining_s(self) -> float:
        """Return the seconds until the silence exceeds its limit."""
        limit_s = self._keep_alive_s if self.started else self._first_byte_s
        return self._last_s + limit_s - self._clock()
