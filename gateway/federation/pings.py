"""Ping one site: to know how far away it is, how its clock goes, and whether it reads what is sent to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from gateway.federation.outbox import Outbox
from wire import federation_pb2 as pb

PING = "ping"
MAX_CLOCK_AHEAD_S = 1e10
MAX_UNANSWERED_PINGS = 8
"""A site that reports load but answers no ping does not read what is sent to it."""


class RoundTrip(NamedTuple):
    """`clock_ahead_s`: of the site's wall clock against ours; None: it says nothing that can be true."""

    rtt_s: float
    clock_ahead_s: float | None


class Pings:
    def __init__(self, outbox: Outbox, clock: Callable[[], float]) -> None:
        self._outbox = outbox
        self._clock = clock
        self.nonce = 0  # of the last ping
        self.unanswered: dict[int, float] = {}  # when each was made

    def send(self) -> str | None:
        """Send a ping, unless one waits to be sent; return why the link must end if none is answered."""
        if len(self.unanswered) >= MAX_UNANSWERED_PINGS:
            return f"it has answered none of {MAX_UNANSWERED_PINGS} pings"
        if PING not in self._outbox:
            self.nonce += 1
            self.unanswered[self.nonce] = self._clock()
            self._outbox.put(pb.GatewayMessage(ping=pb.Ping(nonce=self.nonce)), PING)
        return None

    def answered(self, message: pb.Pong, heard_s: float) -> RoundTrip | None:
        """Take an answer, and with it the pings before as answered; None: it answers none of those sent."""
        sent_s = self.unanswered.get(message.nonce)
        if sent_s is None:
            return None
        self.unanswered = {nonce: s for nonce, s in self.unanswered.items() if nonce > message.nonce}
        rtt_s = heard_s - sent_s
        ahead_s = message.unix_s - (time.time() - rtt_s / 2)
        known = message.unix_s and abs(ahead_s) < MAX_CLOCK_AHEAD_S  # false for NaN, too
        return RoundTrip(rtt_s, ahead_s if known else None)
