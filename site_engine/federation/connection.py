"""A gateway replica as its site sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from site_engine.federation.attempts import Attempts


@dataclass(slots=True, eq=False)
class Connection:
    """A gateway replica as this site sees it, over several streams if one breaks."""

    gateway: str
    attempts: Attempts
    wake: Callable[[], None]
    counting: set[str] = field(default_factory=set)  # counts that its gateway waits for
    linked: bool = True
    displaced: bool = False  # another stream to this replica has taken its place
    lost_s: float = 0.0
    grace_s: float = 0.0
    draining: bool = False  # at the request of this gateway
    protocol: int = 1
    reads_prefixes: bool = False
    reads_models: bool = False
    reads_held: bool = False
    hello_is_old: bool = (
        False  # it names other models than are served now, and the gateway knows Hello's only
    )
    has_bid: bool = False
    bid_s: float = float("-inf")

    def withdraw_bid(self) -> None:
        self.has_bid = False
        self.attempts.outbox.bid(None)

    @property
    def is_idle(self) -> bool:
        """Return whether the gateway waits for nothing, neither for an attempt nor for a count."""
        return not self.counting and not self.attempts.attempt_ids()
