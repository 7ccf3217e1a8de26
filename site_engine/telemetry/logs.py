"""One JSON object per line on stderr: when, how bad, who, what, and the fault if there is one."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """`site` is written on every line, because the lines of many sites end up together. So is `extra`."""

    def __init__(self, site: str) -> None:
        super().__init__()
        self._site = site

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "site": self._site,
            "logger": record.name,
            "message": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in _STANDARD},
        }
        if record.exc_info:
            line["fault"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up(level: str, site: str) -> None:
    """Replaces what the process logged with before; libraries speak up from warnings on."""
    stderr = logging.StreamHandler(sys.stderr)
    stderr.setFormatter(JsonLines(site))
    logging.basicConfig(level=logging.WARNING, handlers=[stderr], force=True)
    logging.captureWarnings(True)
    logging.getLogger("site_engine").setLevel(level.upper())
