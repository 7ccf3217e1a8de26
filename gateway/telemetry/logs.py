"""Structured logs on stderr: one JSON object a line, with the fields of `extra={"fields": …}`."""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

import msgspec

FLUSH_AFTER_S = 0.05
MAX_BUFFERED_LINES = 200

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that the current task works for; tasks inherit it, and every log line includes it."""


class RequestLine:
    """Fields of the line that is logged at the end of a request; the query adds its own to them."""

    __slots__ = ("fields", "is_written")

    def __init__(self) -> None:
        self.fields: dict[str, object] = {}
        self.is_written = False


REQUEST_LINE: ContextVar[RequestLine | None] = ContextVar("line", default=None)


def add_request_fields(fields: dict[str, object]) -> bool:
    """Add fields to the current request's line; return whether they were added.

    Only the first query of a request may add fields, and only before the line is written.
    """
    line = REQUEST_LINE.get()
    if line is None or line.is_written or line.fields:
        return False
    line.fields = fields
    return True


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if "request_id" not in fields and (request_id := REQUEST_ID.get()):
            fields["request_id"] = request_id
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields, enc_hook=str).decode()


class BufferedHandler(logging.StreamHandler[TextIO]):
    """Buffers lines up to level info for FLUSH_AFTER_S where an event loop runs, so that many share one
    write.

    A warning or the end of the process flushes the buffer; `kill -9` loses it.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(self.format(record))
        except Exception:  # noqa: BLE001 - logging has its own report of a line that cannot be written
            self.handleError(record)
            return
        if record.levelno > logging.INFO or len(self._lines) >= MAX_BUFFERED_LINES:
            self.flush()
        elif len(self._lines) == 1:
            try:
                asyncio.get_running_loop().call_later(FLUSH_AFTER_S, self.flush)
            except RuntimeError:  # not on a loop's thread
                self.flush()

    def flush(self) -> None:
        with self.lock or nullcontext():
            lines, self._lines = self._lines, []
            if lines:
                with suppress(OSError, ValueError):  # the reader is gone
                    self.stream.write("\n".join(lines) + "\n")
                    super().flush()


def configure(level: str) -> None:
    """Configure logging for the whole process, once, before anything logs.

    Libraries log from warnings on: at finer levels some of them log their inputs, secrets included.
    """
    stream = BufferedHandler(sys.stderr)
    stream.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[stream], force=True)
    # not in our lines, and expensive to find out (Python's logging HOWTO, "Optimization")
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    for ours in ("gateway", "predictor"):
        logging.getLogger(ours).setLevel(level.upper())
    logging.getLogger("uvicorn.access").disabled = True  # the edge logs each request with its id
