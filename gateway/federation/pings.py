"""Ping one site, to measure its round trip time and clock offset, and to check that it reads messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from gateway.federation.outbox import Outbox
from wire import federation_pb2 as pb

PING = "ping"
MAX_CLOCK_AHEAD_S = 1e10
MAX_UNANSWERED_PINGS = 8
"""The number of unanswered pings that ends a link: a site that reports load but answers none does not read.
"""


class RoundTrip(NamedTuple):
    """A measured round trip. `clock_ahead_s`: the offset of the site's wall clock from this one, None if the
    site reports no plausible time.
    """

    rtt_s: float
    clock_ahead_s: float | None


class Pings:
    def __init__(self, outbox: Outbox, clock: Callable[[], float]) -> None:
        self._outbox = outbox
        self._clock = clock
        self.nonce = 0  # nonce of the last ping
        self.unanswered: dict[int, float] = {}  # time of each ping, by nonce

    def send(self) -> str | None:
        """Send a ping unless one is still in the outbox. Return the reason to end the link if
        MAX_UNANSWERED_PINGS are unanswered, else None.
        """
        if len(self.unanswered) >= MAX_UNANSWERED_PINGS:
            return f"it has answered none of {MAX_UNANSWERED_PINGS} pings"
        if PING not in self._outbox:
            self.nonce += 1
            self.unanswered[self.nonce] = self._clock()
            self._outbox.put(pb.GatewayMessage(ping=pb.Ping(nonce=self.nonce)), PING)
        return None

    def answered(self, message: pb.Pong, heard_s: float) -> RoundTrip | None:
        """Return the round trip of a pong received at `heard_s`, None for an unknown nonce. Earlier pings
        count as answered, too.
        """
        sent_s = self.unanswered.get(message.nonce)
        if sent_s is None:
            return None
        self.unanswered = {nonce: s for nonce, s in self.unanswered.items() if nonce > message.nonce}
        rtt_s = heard_s - sent_s
        ahead_s = message.unix_s - (time.time() - rtt_s / 2)
        known = message.unix_s and abs(ahead_s) < MAX_CLOCK_AHEAD_S  # false for NaN, too
        return RoundTrip(rtt_s, ahead_s if known else None)
