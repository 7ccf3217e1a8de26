"""Defines what looking after jobs needs of the rest of the gateway: one frozen object."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from gateway.batches.files import Files
from gateway.domain import Caller, Site
from gateway.errors import TooMany
from gateway.federation.link import Link
from gateway.side_work import SideWork
from gateway.tuning.contents import Contents
from gateway.tuning.events import Events
from gateway.tuning.ledger import Ledger
from gateway.tuning.storing import ContentStore
from gateway.tuning.values import TuningLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningContext:
    """`links`: the sites that are linked to this replica. `forget_model` takes a model that was deleted from
    a site that is down, both by name. `caller` looks up a key by its id, without I/O; None once it is
    revoked, or where it was made elsewhere since the keys were read: `refresh_keys` reads them again, and
    raises StoreUnavailable. `charge` counts trained tokens and their cost against the quotas of the month,
    and returns the refusal once one is spent. `clock` is monotonic, `unix_time` dates what is stored.
    """

    ledger: Ledger
    events: Events
    contents: Contents
    store: ContentStore
    files: Files
    sites: Callable[[], Sequence[Site]]
    links: Callable[[], Mapping[str, Link]]
    forget_model: Callable[[str, str], None]
    caller: Callable[[str], Caller | None]
    refresh_keys: Callable[[], Awaitable[None]]
    charge: Callable[[Caller, int, int], TooMany | None]
    side_work: SideWork
    clock: Callable[[], float]
    unix_time: Callable[[], float]
    limits: TuningLimits
