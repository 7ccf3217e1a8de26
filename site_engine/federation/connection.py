"""A gateway replica as its site sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from site_engine.federation.attempts import Attempts
from site_engine.federation.report_pace import ReportPace
from site_engine.messages import Model, Welcome
from site_engine.messages import ReportPace as AskedPace

if TYPE_CHECKING:
    from site_engine.federation.bulk import Bulk

MAX_GRACE_S = 600.0
MAX_HEARTBEAT_S = 60.0
READS_STALLS = 2
"""The protocol from which on a gateway knows `stalled_s`; an older one would take the report for fresh."""
PINGS_RARELY = 3
"""The protocol from which on a gateway may ping a site more rarely than it wants to hear of it."""


def of_everyone(models: tuple[Model, ...]) -> tuple[Model, ...]:
    """Return the models that are no tenant's alone."""
    return tuple(each for each in models if not each.tenant)


@dataclass(slots=True, eq=False)
class Connection:
    """A gateway replica as this site sees it, over several streams if one breaks."""

    gateway: str
    attempts: Attempts
    reports: ReportPace
    wake: Callable[[], None]
    counting: set[str] = field(default_factory=set)  # counts that its gateway waits for
    linked: bool = True
    displaced: bool = False  # another stream to this replica has taken its place
    lost_s: float = 0.0
    grace_s: float = 0.0
    heartbeat_s: float = 0.0  # the gateway says something as often
    protocol: int = 1
    reads_prefixes: bool = False
    reads_models: bool = False
    reads_held: bool = False
    tunes: bool = False
    reported_s: float = 0.0  # when it was last sent a report
    sign_s: float = 0.0  # or a sign of life in the place of one
    bulk: Bulk | None = None  # calls beside the stream, while one is up
    hello_is_old: bool = (
        False  # it names other models than are served now, and the gateway knows Hello's only
    )
    has_bid: bool = False
    bid_s: float = float("-inf")

    def welcomed(self, welcome: Welcome, wake: Callable[[], None], now: float) -> None:
        """Begin a stream with what its gateway says of itself."""
        self.linked, self.wake, self.grace_s = True, wake, min(welcome.grace_s, MAX_GRACE_S)
        self.heartbeat_s = welcome.heartbeat_s
        self.has_bid = self.hello_is_old = False
        self.protocol, self.reads_prefixes = welcome.protocol, welcome.reads_prefixes
        self.reads_models, self.reads_held = welcome.reads_models, welcome.reads_held
        self.tunes = welcome.tunes
        self.reported_s = self.sign_s = now
        self.reports.agree(AskedPace())

    def paced(self, pace: AskedPace) -> None:
        self.reports.agree(pace)
        if 0 < pace.heartbeat_s <= MAX_HEARTBEAT_S:  # false for NaN, too
            self.heartbeat_s = pace.heartbeat_s

    def admitted(self) -> None:
        """Note a request that the last figures do not count."""
        self.drop_report()
        self.reports.admitted()

    def ended(self, requests: int) -> None:
        """Note requests that the last figures still count."""
        self.drop_report()
        self.reports.ended(requests)

    def drop_report(self) -> None:
        """Drop a report that waits to be sent, since what it counts has changed. A gateway takes messages in
        their order: it would count a request again of which it has the end, and no longer one whose Accepted
        it has.
        """
        if self.attempts.outbox.drop_load():
            self.reports.forget()

    def visible(self, models: tuple[Model, ...]) -> tuple[Model, ...]:
        """Return the models that the gateway is told of."""
        return models if self.tunes else of_everyone(models)

    def withdraw_bid(self) -> None:
        self.has_bid = False
        self.attempts.outbox.bid(None)

    @property
    def is_idle(self) -> bool:
        """Return whether the gateway waits for nothing, neither for an attempt nor for a count."""
        return not self.counting and not self.attempts.attempt_ids()
