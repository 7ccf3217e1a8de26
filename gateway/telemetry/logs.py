"""Structured logs: one JSON object a line on stderr, whatever `extra` holds as fields of it."""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

import msgspec

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Of the request that is worked for, in its tasks and those that they start: every line of them names it."""


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


def configure(level: str) -> None:
    """For the whole process, once, before anything logs.

    Libraries speak up from warnings on: finer, some of them write down what they are given, secrets too.
    """
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[stream], force=True)
    for ours in ("gateway", "predictor"):
        logging.getLogger(ours).setLevel(level.upper())
    logging.getLogger("uvicorn.access").disabled = True  # the edge logs each request with its id
