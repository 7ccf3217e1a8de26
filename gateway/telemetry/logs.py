"""Structured logs: one JSON object a line on stderr, whatever `extra` holds as fields of it."""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

import msgspec

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


GATHER_S = 0.05
MOST_GATHERED = 200

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Of the request that is worked for, in its tasks and those that they start: every line of them names it."""


class Line:
    """The line that will be written of a request at its end; its query adds what is known of it by then."""

    __slots__ = ("fields", "is_written")

    def __init__(self) -> None:
        self.fields: dict[str, object] = {}
        self.is_written = False


LINE: ContextVar[Line | None] = ContextVar("line", default=None)


def note(fields: dict[str, object]) -> bool:
    """Whether the line of the request took them: the first query's, as long as it is not written."""
    line = LINE.get()
    if line is None or line.is_written or line.fields:
        return False
    line.fields = fields
    return True


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{key: value for key, value in vars(record).items() if key not in _STANDARD},
        }
        if "request_id" not in fields and (request_id := REQUEST_ID.get()):
            fields["request_id"] = request_id
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields, enc_hook=str).decode()


class Gathered(logging.StreamHandler[TextIO]):
    """Where an event loop runs, lines up to info wait `GATHER_S` for others, so that many share one write.

    A warning takes along what waits, and so does the end of the process; `kill -9` costs what waits.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(self.format(record))
        except Exception:  # noqa: BLE001 - logging has its own way to tell of a line that cannot be written
            self.handleError(record)
            return
        if record.levelno > logging.INFO or len(self._lines) >= MOST_GATHERED:
            self.flush()
        elif len(self._lines) == 1:
            try:
                asyncio.get_running_loop().call_later(GATHER_S, self.flush)
            except RuntimeError:  # not on a loop's thread
                self.flush()

    def flush(self) -> None:
        with self.lock or nullcontext():
            lines, self._lines = self._lines, []
            if lines:
                with suppress(OSError, ValueError):  # nobody reads it any more
                    self.stream.write("\n".join(lines) + "\n")
                    super().flush()


def configure(level: str) -> None:
    """For the whole process, once, before anything logs.

    Libraries speak up from warnings on: finer, some of them write down what they are given, secrets too.
    """
    stream = Gathered(sys.stderr)
    stream.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[stream], force=True)
    # in no line of ours, and dear to find out (Python's logging HOWTO, "Optimization")
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    for ours in ("gateway", "predictor"):
        logging.getLogger(ours).setLevel(level.upper())
    logging.getLogger("uvicorn.access").disabled = True  # the edge logs each request with its id
