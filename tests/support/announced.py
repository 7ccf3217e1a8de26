"""Read from its log the ports that a gateway chose itself."""

from __future__ import annotations

import re

CLIENTS, OPERATORS = "clients ask at", "operators ask at"
SITES, CERTIFIED = "sites join at", "sites with a certificate join at"


def port_of(who: str, log: str) -> int | None:
    """None as long as the log does not say it."""
    found = re.search(rf"\b{who} [\w.]+:(\d+)", log)
    return int(found[1]) if found else None
