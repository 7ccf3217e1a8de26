"""Log one JSON object per line on stderr: time, level, site, logger, message, and a traceback if any."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Writes `site` on every line, since lines of many sites end up together, and the fields of `extra`."""

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
    """Replace the process's log handlers; libraries log from warnings on."""
    stderr = logging.StreamHandler(sys.stderr)
    stderr.setFormatter(JsonLines(site))
    logging.basicConfig(level=logging.WARNING, handlers=[stderr], force=True)
    logging.captureWarnings(True)
    logging.getLogger("site_engine").setLevel(level.upper())
