"""Health check of a site, which has no port: exit 0 while it has a connection to one of its gateways."""

import os
import sys
from pathlib import Path

ESTABLISHED = "01"


def ports(gateways: str) -> set[int]:
    """Return the ports of `host:port,host:port`."""
    return {int(address.rpartition(":")[2]) for address in gateways.split(",") if address}


def remote_ports(table: str) -> set[int]:
    """Return the remote ports of the established connections in a kernel table such as /proc/net/tcp."""
    rows = [line.split() for line in table.splitlines()[1:]]
    return {int(row[2].rpartition(":")[2], 16) for row in rows if row[3] == ESTABLISHED}


def main() -> int:
    """Return the exit status."""
    tables = [path for path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if path.exists()]
    reached = set().union(*(remote_ports(path.read_text()) for path in tables))
    return 0 if reached & ports(os.environ.get("MICO_SITE_GATEWAYS", "")) else 1


if __name__ == "__main__":
    sys.exit(main())
