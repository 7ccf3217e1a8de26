"""The configuration of a local federation: one TOML file per process.

Does not start anything.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mico.errors import CommandFailed, ExitCode
from mico.local.folder import Folder, write_private
from mico.local.profiles import Profile
from mico.store_access import PEPPER_VARIABLE

HOST = "127.0.0.1"
KV_TOKENS_PER_SLOT = 512
LAST_PORT = 65_535


class Ports(NamedTuple):
    """Ports of one gateway: HTTP for clients, gRPC for sites, HTTP for metrics; 0: any free one."""

    http: int
    grpc: int
    metrics: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A federation to start. Every site serves `model`, a folder or a Hub id, under its own name or as
    `served_model`. Every gateway is a replica: same database, pepper and sites, a journal of its own.
    """

    folder: Folder
    gateways: tuple[Ports, ...]
    model: str
    sites: tuple[Profile, ...]
    database_url: str
    served_model: str = ""

    @property
    def gateway_names(self) -> tuple[str, ...]:
        return tuple("gateway" if n == 1 else f"gateway-{n}" for n in range(1, len(self.gateways) + 1))

    def write(self) -> None:
        for name, ports in zip(self.gateway_names, self.gateways, strict=True):
            write_private(self.folder.config(name), to_toml(self.gateway(name, ports)))
        for site in self.sites:
            write_private(self.folder.config(site.name), to_toml(self.site(site)))

    def gateway(self, name: str, ports: Ports) -> dict[str, object]:
        """Return a gateway's settings.

        Raises FileNotFoundError when several gateways share keys and the database is not prepared yet.
        """
        settings: dict[str, object] = {
            "name": "local" if name == "gateway" else name,
            "host": HOST,
            "http_port": ports.http,
            "grpc_host": HOST,
            "grpc_port": ports.grpc,
            "metrics_port": ports.metrics,
            "database_url": self.database_url,
            "folder": str(self.folder.path if name == "gateway" else self.folder.path / name),
            "site_token_file": str(self.folder.token_file),
        }
        if len(self.gateways) > 1:
            if PEPPER_VARIABLE not in os.environ:  # which all of them read
                settings["key_pepper"] = self.folder.pepper_file.read_text().strip()
            settings["peers"] = [f"{HOST}:{other.grpc}" for other in self.gateways if other != ports]
        return settings

    def site(self, profile: Profile) -> dict[str, object]:
        """Return a site's settings, with one thread: the sites of a laptop share its few cores."""
        return {
            "site": profile.name,
            "cloud": profile.cloud,
            "region": profile.region,
            "model": self.model,
            "served_model": self.served_model,
            "gateways": [f"{HOST}:{ports.grpc}" for ports in self.gateways],
            "token_file": str(self.folder.token_file),
            "slots": profile.slots,
            "kv_tokens": profile.slots * KV_TOKENS_PER_SLOT,
            "threads": 1,
            "iteration_floor_s": profile.iteration_floor_s,
            "input_usd_per_mtok": profile.input_usd_per_mtok,
            "output_usd_per_mtok": profile.output_usd_per_mtok,
        }


def to_toml(settings: Mapping[str, object]) -> str:
    """Return a flat table as TOML. JSON's values are TOML's, except DEL and surrogate pairs in strings."""
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in settings.items()]
    return "".join(lines).replace("\x7f", "\\u007f")


def choose_ports(http_port: int) -> Ports:
    """Return `http_port` and free ones for sites and metrics, the next one and that 1,000 above if possible;
    for 0 any free ports.

    Raises CommandFailed if the port is in use or no port.
    """
    if http_port == 0:
        return Ports(free_port(), free_port(), free_port())
    if not is_free(http_port):
        raise CommandFailed(
            f"port {http_port} is in use",
            cause=f"another program listens on {HOST}:{http_port}",
            tip="--port chooses another, --port 0 takes a free one",
        )
    return Ports(http_port, _port_or_free(http_port + 1), _port_or_free(http_port + 1_000))


def _port_or_free(port: int) -> int:
    return port if port <= LAST_PORT and is_free(port) else free_port()


def is_free(port: int) -> bool:
    if not 0 < port <= LAST_PORT:
        raise CommandFailed(f"{port} is no port", tip="1 to 65535", exit_code=ExitCode.WRONG_USAGE)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """Return a free port that, for a minute, only a program that names it gets.

    A connection of the port has just ended, on this side first, and the system does not give a port in
    TIME_WAIT to a program that asks for any.
    """
    with socket.create_server((HOST, 0)) as server, socket.create_connection(server.getsockname()):
        accepted, _ = server.accept()
        accepted.close()
        return int(server.getsockname()[1])
