"""What running batches needs of the rest of the gateway: one frozen object."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

from gateway.batches.files import Files
from gateway.batches.ledger import Ledger
from gateway.batches.values import BatchLimits
from gateway.domain import Caller, Query, Site
from gateway.http.backend import Backend
from predictor.forecast import Forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """`known_models`: those that any site serves or served; none as long as sites may still be joining.
    `caller` looks a key up by its id, without I/O: who it let in, also after its time; None once revoked.
    `dispatched`: whether a query, by its id, has been given to a site by now.
    """

    backend: Backend
    files: Files
    ledger: Ledger
    sites: Callable[[], Sequence[Site]]
    known_models: Callable[[], Collection[str]]
    forecast: Callable[[Query], Awaitable[Forecast]]
    caller: Callable[[str], Caller | None]
    dispatched: Callable[[str], bool]
    limits: BatchLimits = field(default_factory=BatchLimits)
