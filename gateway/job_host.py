"""Describes the replica that batches and fine-tuning jobs run on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from gateway.domain import Caller
from gateway.query.context import QueryContext
from gateway.side_work import SideWork


class JobHost(NamedTuple):
    """The database, the queries and the keys of a replica, for work that outlives the request that began it.

    `caller` returns the caller of a key by the key's id, although the key may have expired, and None for a
    key that is unknown or revoked.
    """

    database_url: str
    replica: str
    query_context: QueryContext
    caller: Callable[[str], Caller | None]
    refresh_keys: Callable[[], Awaitable[None]]
    unix_time: Callable[[], float]
    side_work: SideWork
