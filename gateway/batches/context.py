"""Defines what running batches needs of the rest of the gateway: one frozen object."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from gateway.batches.files import Files
from gateway.batches.ledger import Ledger
from gateway.batches.values import Batch, BatchLimits
from gateway.domain import Answer, Caller, Model, Query, Site
from gateway.side_work import SideWork
from predictor.forecast import Forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchContext:
    """`models`: those that any site serves or served, with the routes to them. `knows_sites`: whether all
    have had the time to join, and any did. `model_of`: the model that answers the lines of a batch now.

    `caller` looks up a key by its id, without I/O: its owner, also after the key has expired; None once the
    key is revoked, or where it was made elsewhere since the keys were read: `refresh_keys` reads them again,
    and raises StoreUnavailable. `dispatched` returns whether the query with this id has been given to a site.
    `clock` is monotonic, `unix_time` dates what is stored.
    """

    answer: Answer
    models: Callable[[], Sequence[Model]]
    knows_sites: Callable[[], bool]
    model_of: Callable[[Batch], str]
    sites: Callable[[], Sequence[Site]]
    forecast: Callable[[Query], Awaitable[Forecast]]
    caller: Callable[[str], Caller | None]
    refresh_keys: Callable[[], Awaitable[None]]
    dispatched: Callable[[str], bool]
    files: Files
    ledger: Ledger
    side_work: SideWork
    clock: Callable[[], float]
    unix_time: Callable[[], float]
    limits: BatchLimits
