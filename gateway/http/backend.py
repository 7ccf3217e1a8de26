"""Defines the interface of the HTTP edge to the rest of the gateway: one frozen object of callables."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from litestar.types import Receive, Scope

from gateway.domain import Answer, Caller, Model, Query
from gateway.errors import NoSite
from gateway.http.body import BodyReader
from gateway.http.rate_headers import QuotaLookup, no_quota
from gateway.ids import hex_ids
from gateway.routing.model_routes import ModelRoute
from gateway.security.login_limiter import LoginLimiter

T = TypeVar("T")


class Readiness(NamedTuple):
    """Whether the gateway is ready. `reason` explains it to operators."""

    ready: bool
    reason: str


async def _no_such_key(secret: str) -> None:
    """Return None: the default for gateways that keep all keys in memory."""


async def _counts_nothing(_: Query) -> int:
    raise NoSite("no site counts tokens here")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The functions and settings that the HTTP edge uses.

    `count` returns the number of tokens of a prompt. `models` returns the models that sites serve now, and
    `routes` as models. `known_models` adds the models of sites that are down; requests are checked against
    it. Until `fleet_complete` returns True, sites may still be joining and models may be missing.
    `authenticate` works in memory and in constant time. `look_up_key` may query the database for a key that
    `authenticate` does not know. `quota_status` returns the quota shown in the rate limit headers.

    `clock` is monotonic, `unix_time` dates responses. A stream that has waited `first_byte_s` seconds for its
    first token is opened without it, so that no load balancer cuts it. After that, a comment is sent whenever
    the stream has been silent for `keep_alive_s` seconds.
    """

    answer: Answer
    count: Callable[[Query], Awaitable[int]] = _counts_nothing
    models: Callable[[], Sequence[Model]]
    known_models: Callable[[], Sequence[Model]] = tuple
    fleet_complete: Callable[[], bool] = lambda: True
    routes: Callable[[], Mapping[str, ModelRoute]] = dict
    authenticate: Callable[[str], Caller | None]
    look_up_key: Callable[[str], Awaitable[Caller | None]] = _no_such_key
    quota_status: QuotaLookup = no_quota
    ready: Callable[[], Readiness]
    version: str
    clock: Callable[[], float] = time.monotonic
    unix_time: Callable[[], float] = time.time
    new_id: Callable[[], str] = field(default_factory=hex_ids)
    login_limiter: LoginLimiter = field(default_factory=LoginLimiter)  # counts failures to authenticate
    bodies: BodyReader = field(default_factory=BodyReader)
    timeout_s: float = 600.0
    body_limit_bytes: int = 8 * 1024 * 1024
    keep_alive_s: float = 15.0
    first_byte_s: float = 45.0

    async def read_json(
        self, scope: Scope, receive: Receive, caller: Caller, read: Callable[[dict[str, object]], T]
    ) -> T:
        """Return the result of `read` for the caller's JSON object. Raises as `BodyReader.read_json` does."""
        return await self.bodies.read_json(scope, receive, caller.tenant, self.body_limit_bytes, read)
