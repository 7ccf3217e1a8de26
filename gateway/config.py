"""The configuration of a gateway, from a TOML file, the environment and flags; the last one wins. Frozen."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gateway.quotas.limits import WhenAway
from gateway.routing.policies import POLICIES

SERVICE_LINK = re.compile(r"SERVICE_HOST|SERVICE_PORT\w*|PORT|PORT_\d+_\w+")
"""The variables, after the prefix, that Kubernetes sets for a service named mico-gateway. Not settings."""
LAST_PORT = 65_535
WORKER_PORTS = 2
"""The offset of a worker's gRPC, mTLS and metrics ports from those of the previous worker."""
MAX_WORKERS = 64
MAX_NAME_CHARS = 200
METRICS_ABOVE = 1_000
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class ConfigError(Exception):
    """An invalid setting. The message names the setting, its source and the expected value."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The settings of a gateway. Ports: HTTP for clients, gRPC for sites, HTTP for metrics. `folder` holds
    the journal of outcomes that are not in the database yet.
    """

    name: str = "gateway-1"
    host: str = "127.0.0.1"
    http_port: int = 8080
    metrics_host: str = "127.0.0.1"  # serves /metrics and a detailed /ready without a key
    metrics_port: int | None = None  # absent: 1,000 above http_port
    grpc_host: str = "127.0.0.1"
    grpc_port: int = 8081
    database_url: str = field(default="sqlite+aiosqlite:///.mico/mico.db", repr=False)
    folder: Path = Path(".mico")
    site_tokens: tuple[str, ...] = field(default=(), repr=False)
    site_token_file: Path | None = None
    tls_cert: Path | None = None  # PEM chain for clients and sites; None: TLS is terminated elsewhere
    tls_key: Path | None = None
    pki: Path | None = None  # the folder of `mico pki init`: issue and accept certificates of sites
    mtls_port: int = 8082  # where sites with a certificate join; open if `pki` is set
    tls_names: tuple[str, ...] = ("localhost", "127.0.0.1")  # names in the certificate issued by `pki`
    key_pepper: str = field(default="", repr=False)  # the same at all replicas; empty: a file in `folder`
    peers: tuple[str, ...] = ()  # host:port at which sites reach the other gateways
    workers: int = 1  # processes that share http_port, each a replica
    worker: int = 1  # the number of this process; not a setting, but set by `of_worker`
    policy: str = "mico"
    predictor: Path | None = None  # lexical, small or an artifact's folder; None: small
    outcomes: Path | None = None  # a folder for recent prompts and lengths, to update the predictor
    scaling: Path | None = None  # a TOML file with the pools of machines that this gateway resizes
    routes: Path | None = None  # a TOML file with routes; operators' routes of the same name override them
    most_live: int = 10_000  # limit of queries in progress
    most_tries: int = 4  # limit of failed tries per query
    quotas_when_away: str = "hold"  # for expired leases of quotas: "hold" (keep using them) or "refuse"
    answer_within_s: float = 600.0  # from the arrival of a query to the end of its answer
    body_limit_bytes: int = 8 * 2**20
    keep_alive_s: float = 15.0
    heartbeat_s: float = 1.0  # between two pings in a small fleet; a site silent for three is down
    stream_interval_s: float = 0.02  # the longest that text is held back while the gateway is busy
    drain_s: float = 25.0  # how long running answers may take after a stop signal
    log_level: str = "INFO"
    otlp_url: str = ""  # where traces are sent, such as http://collector:4318; empty: none. Needs extra otel

    def __post_init__(self) -> None:
        self._check_words()
        self._check_amounts()
        self._check_ports()
        self._check_workers()
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key belong together")

    def _check_words(self) -> None:
        if not (0 < len(self.name) <= MAX_NAME_CHARS and self.name.isprintable()):
            raise ConfigError(f"name is {self.name!r}; it has 1 to {MAX_NAME_CHARS} printable characters")
        if self.policy not in POLICIES:
            raise ConfigError(f"policy {self.policy!r} is unknown; there are: {', '.join(POLICIES)}")
        if self.quotas_when_away not in tuple(WhenAway):
            raise ConfigError(
                f"quotas_when_away is {self.quotas_when_away!r}; it is one of: {', '.join(WhenAway)}"
            )
        if self.log_level.upper() not in LEVELS:
            raise ConfigError(f"log_level is {self.log_level!r}; it is one of: {', '.join(LEVELS)}")
        for peer in self.peers:
            host, _, port = peer.rpartition(":")
            if not (host and "/" not in host and port.isdecimal() and 0 < int(port) <= LAST_PORT):
                raise ConfigError(f"peers has {peer!r}; each is the host:port at which sites reach a gateway")
        for name in self.tls_names:
            if not name.isascii():
                raise ConfigError(f"tls_names has {name!r}; write it in ASCII, as DNS has it (xn--…)")

    def _check_amounts(self) -> None:
        for name in (
            "most_live",
            "most_tries",
            "answer_within_s",
            "body_limit_bytes",
            "keep_alive_s",
            "heartbeat_s",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in ("drain_s", "stream_interval_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it can't be negative")

    def _check_workers(self) -> None:
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ConfigError(f"workers is {self.workers}; it is from 1 to {MAX_WORKERS}")
        if self.workers == 1 or self.worker > 1:
            return
        for name in ("http_port", "grpc_port"):
            if getattr(self, name) == 0:
                raise ConfigError(
                    f"{name} is 0, any free port: {self.workers} workers need a number that all know"
                )
        taken = [
            self.http_port,
            *self.worker_ports(self.grpc_port),
            *self.worker_ports(self.own_metrics_port),
        ]
        if self.pki is not None:
            taken += self.worker_ports(self.mtls_port)
        twice = sorted({port for port in taken if taken.count(port) > 1})
        if twice:
            raise ConfigError(
                f"port {twice[0]} would be needed twice: a worker's grpc_port, mtls_port and metrics_port "
                f"are {WORKER_PORTS} above those of the worker before it"
            )
        self.of_worker(self.workers)  # its construction checks the last worker's ports

    def _check_ports(self) -> None:
        for name in ("http_port", "grpc_port", "mtls_port", "own_metrics_port"):
            if not 0 <= getattr(self, name) <= LAST_PORT:
                shown = name.removeprefix("own_")
                raise ConfigError(f"{shown} is {getattr(self, name)}; a port is from 0 to {LAST_PORT}")
        if self.http_port == self.grpc_port != 0:
            raise ConfigError(f"http_port and grpc_port are both {self.http_port}; they need two ports")
        if self.own_metrics_port in {self.http_port, self.grpc_port} - {0}:
            raise ConfigError(
                f"metrics_port is {self.own_metrics_port} as another port is; set one of its own"
            )
        if self.pki is not None and self.mtls_port in {self.http_port, self.grpc_port} - {0}:
            raise ConfigError(f"mtls_port is {self.mtls_port} as another port is; it needs one of its own")

    @property
    def own_metrics_port(self) -> int:
        """The port of the metrics; 0 (any free port) if http_port is 0 and metrics_port is not set."""
        if self.metrics_port is not None:
            return self.metrics_port
        return self.http_port + METRICS_ABOVE if self.http_port else 0

    def of_worker(self, number: int) -> GatewayConfig:
        """Return the configuration of worker `number`, from 1. The first has the name and ports as set."""
        if number == 1:
            return self
        above = WORKER_PORTS * (number - 1)
        return replace(
            self,
            worker=number,
            name=f"{self.name}.{number}",
            grpc_port=self.grpc_port + above,
            mtls_port=self.mtls_port + above,
            metrics_port=self.own_metrics_port + above,
            outcomes=None,  # written by one process only
        )

    def worker_ports(self, own: int) -> tuple[int, ...]:
        """Return the ports of all workers, given the `own` port of this one; () for a single process."""
        first = own - WORKER_PORTS * (self.worker - 1)
        return tuple(first + WORKER_PORTS * each for each in range(self.workers)) if self.workers > 1 else ()

    def tokens(self) -> tuple[str, ...]:
        """Return all site tokens. Raises ConfigError if no site could join at all."""
        try:
            lines = self.site_token_file.read_text().split() if self.site_token_file else []
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"site_token_file can't be read: {exc}") from exc
        tokens = (*self.site_tokens, *lines)
        if not tokens and self.pki is None:
            raise ConfigError("no site could join: set site_tokens, site_token_file or pki")
        return tokens


def load(
    path: Path | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> GatewayConfig:
    """Read the configuration. Raises ConfigError, for an unknown key with the closest known one."""
    known = {f.name: str(f.type) for f in fields(GatewayConfig) if f.name != "worker"}
    values: dict[str, Any] = {}
    for source, given in _sources(path, env or {}, overrides or {}):
        for key, value in given.items():
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise ConfigError(f"unknown setting {key!r} in {source}{hint}")
            values[key] = _convert(key, known[key], value, source)
    return GatewayConfig(**values)


def _sources(
    path: Path | None, env: Mapping[str, str], overrides: Mapping[str, Any]
) -> list[tuple[str, Mapping[str, Any]]]:
    sources: list[tuple[str, Mapping[str, Any]]] = []
    if path is not None:
        try:
            sources.append((str(path), tomllib.loads(path.read_text())))
        except (OSError, ValueError) as exc:  # ValueError: invalid TOML or UTF-8
            raise ConfigError(f"{path} can't be read: {exc}") from exc
    prefix = "MICO_GATEWAY_"
    names = (key for key in env if key.startswith(prefix) and not SERVICE_LINK.fullmatch(key, len(prefix)))
    from_env = {key.removeprefix(prefix).lower(): env[key] for key in names}
    return [*sources, (f"the environment ({prefix}…)", from_env), ("the command line", overrides)]


def _convert(key: str, kind: str, value: Any, source: str) -> Any:
    try:
        if kind.startswith("tuple"):
            items = value.split(",") if isinstance(value, str) else map(_text, _list(value))
            return tuple(item for item in map(str.strip, items) if item)  # an empty token admits any site
        if kind.startswith("Path"):
            return Path(value) if value != "" or "None" not in kind else None
        return _KINDS[kind](value)
    except (TypeError, ValueError, OverflowError) as exc:
        shown = "a value of another type" if key in _SECRETS else repr(value)
        raise ConfigError(f"{key} in {source} is {shown}; it must be {kind}") from exc


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError(value)
    return list(value)


def _integer(value: Any) -> int:
    """Convert to an integer. Raises ValueError for fractions and booleans, which `int` would accept."""
    number = int(value)
    if isinstance(value, bool) or (isinstance(value, float) and number != value):
        raise ValueError(value)
    return number


def _number(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or not math.isfinite(number):
        raise ValueError(value)
    return number


_SECRETS = frozenset(each.name for each in fields(GatewayConfig) if not each.repr)
_KINDS: dict[str, Callable[[Any], Any]] = {
    "int": _integer,
    "int | None": lambda value: None if value == "" else _integer(value),
    "float": _number,
    "str": _text,
}
