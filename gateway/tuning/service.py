"""Defines what clients' requests need of fine-tuning: one frozen object of callables and stores."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from gateway.domain import Caller, Model
from gateway.errors import MicoError
from gateway.tuning.contents import Contents
from gateway.tuning.events import Events
from gateway.tuning.ledger import Ledger
from gateway.tuning.values import Content, Plan, TuningLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningService:
    """`served` returns what sites serve now, without the routes. `refusal` returns the error for a plan by
    which no site that the caller may use could train a model now. `remove` removes an adapter, unless
    somebody else did. `wake` has this replica look at what a client has changed.
    """

    ledger: Ledger
    events: Events
    contents: Contents
    served: Callable[[], Mapping[str, Model]]
    refusal: Callable[[Caller, str, Plan], MicoError | None]
    remove: Callable[[Content], Awaitable[bool]]
    wake: Callable[[], None]
    limits: TuningLimits
