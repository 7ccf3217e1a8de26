"""How exact and how frequent the reports of one site are, and how frequent its pings: the more sites a
gateway has, the less so.

Else a gateway of a large fleet would do little but read them. How much worse decisions are: measured in
docs/decisions/report-pace.md.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

from gateway.federation.outbox import Outbox
from wire import federation_pb2 as pb

LINKS_PER_SECOND, MAX_EVERY_S = 250, 4
"""With so many more links, a site without news may be quiet for a second more."""
LINKS_TWICE_OFF = 500
"""From so many links on, reports may be off by twice as much; those of sites that are not in this gateway's
share, by `RARELY_OFF` times as much.
"""
RARELY_OFF = 16
"""By the whole site, which then reports almost as seldom as without news, and bids for no work."""
FEW_SITES = 27
"""Gateways hear often of all sites of a model that fewer have."""
LINKS_PER_PING, MAX_PING_HEARTBEATS = 250, 5
"""With so many more links, one more heartbeat passes between two pings."""


def ping_heartbeats(links: int) -> int:
    """Return the heartbeats from one ping of a site to the next in a fleet with so many links."""
    return min(MAX_PING_HEARTBEATS, 1 + links // LINKS_PER_PING)


def quiet_report_every_s(links: int) -> int:
    """Return the seconds from one report of a site without news to the next in a fleet with so many links."""
    return min(MAX_EVERY_S, 1 + links // LINKS_PER_SECOND)


@lru_cache(maxsize=1 << 14)
def in_share(site: str, gateway: str, gateways: tuple[str, ...]) -> bool:
    """Return whether a gateway is of the half of all that a site reports to often: those with the least
    hashes of both names.

    A gateway that comes or goes changes few shares: rendezvous hashing (Thaler and Ravishankar, 1998).
    """

    def place(name: str) -> bytes:
        return blake2b(f"{name} {site}".encode(), digest_size=8).digest()

    own = place(gateway)
    return 2 * sum(place(each) < own for each in gateways) < max(1, len(gateways))


class ReportPace:
    """`is_kept`: whether the site can be told; an older one goes on as it began."""

    def __init__(self, outbox: Outbox, *, is_kept: bool) -> None:
        self.times_off = self.every_s = self.ping_heartbeats = 1
        self._told = 1, 1, 1
        self._outbox = outbox
        self._is_kept = is_kept

    @property
    def quiet_s(self) -> float:
        """Return by how much later than in a small fleet the next report may come."""
        return self.every_s - 1.0

    def adapt(self, links: int, heartbeat_s: float, *, in_share: bool) -> None:
        """Tell the site the pace of a fleet with so many links, unless it has been told."""
        off = 1 if links < LINKS_TWICE_OFF else 2 if in_share else RARELY_OFF
        every_s, heartbeats = quiet_report_every_s(links), ping_heartbeats(links)
        if self._is_kept and (off, every_s, heartbeats) != self._told:
            self._told = off, every_s, heartbeats
            self.times_off, self.every_s, self.ping_heartbeats = self._told
            pace = pb.ReportPace(times_off=off, every_s=every_s, heartbeat_s=heartbeats * heartbeat_s)
            self._outbox.put(pb.GatewayMessage(report_pace=pace))
