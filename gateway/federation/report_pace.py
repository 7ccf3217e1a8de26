"""Controls how exact and how frequent the reports and pings of one site are: less so in a larger fleet.

Otherwise a gateway of a large fleet would spend most of its time on reports. The effect on decisions is
measured in docs/decisions/report-pace.md.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

from gateway.federation.outbox import Outbox
from wire import federation_pb2 as pb

LINKS_PER_SECOND, MAX_EVERY_S = 250, 4
"""The interval of reports of a site without changes: one more second per LINKS_PER_SECOND links, MAX_EVERY_S
seconds at most.
"""
LINKS_TWICE_OFF = 500
"""The number of links from which the error bound of reports is doubled, and multiplied by RARELY_OFF for
sites that are not in this gateway's share.
"""
RARELY_OFF = 16
"""At this factor the error bound is the whole site, which reports almost as rarely as without changes and
does not bid for work.
"""
FEW_SITES = 27
"""The sites of a model that fewer sites serve report often to all gateways."""
LINKS_PER_PING, MAX_PING_HEARTBEATS = 250, 5
"""The heartbeats per ping: one more per LINKS_PER_PING links, MAX_PING_HEARTBEATS at most."""


def ping_heartbeats(links: int) -> int:
    """Return the number of heartbeats between two pings of a site, for a fleet of `links`."""
    return min(MAX_PING_HEARTBEATS, 1 + links // LINKS_PER_PING)


def quiet_report_every_s(links: int) -> int:
    """Return the seconds between two reports of a site without changes, for a fleet of `links`."""
    return min(MAX_EVERY_S, 1 + links // LINKS_PER_SECOND)


@lru_cache(maxsize=1 << 14)
def in_share(site: str, gateway: str, gateways: tuple[str, ...]) -> bool:
    """Return whether a gateway is in the half of all gateways to which a site reports often: those with the
    least hashes of both names.

    A gateway that joins or leaves changes few shares: rendezvous hashing (Thaler and Ravishankar, 1998).
    """

    def place(name: str) -> bytes:
        return blake2b(f"{name} {site}".encode(), digest_size=8).digest()

    own = place(gateway)
    return 2 * sum(place(each) < own for each in gateways) < max(1, len(gateways))


class ReportPace:
    """The report pace of one site. `is_kept`: whether the site supports ReportPace; older ones do not."""

    def __init__(self, outbox: Outbox, *, is_kept: bool) -> None:
        self.times_off = self.every_s = self.ping_heartbeats = 1
        self._told = 1, 1, 1
        self._outbox = outbox
        self._is_kept = is_kept

    @property
    def quiet_s(self) -> float:
        """Return the seconds by which the next report may be later than in a small fleet."""
        return self.every_s - 1.0

    def adapt(self, links: int, heartbeat_s: float, *, in_share: bool) -> None:
        """Send the site the pace for a fleet of `links`, if it differs from the last one sent."""
        off = 1 if links < LINKS_TWICE_OFF else 2 if in_share else RARELY_OFF
        every_s, heartbeats = quiet_report_every_s(links), ping_heartbeats(links)
        if self._is_kept and (off, every_s, heartbeats) != self._told:
            self._told = off, every_s, heartbeats
            self.times_off, self.every_s, self.ping_heartbeats = self._told
            pace = pb.ReportPace(times_off=off, every_s=every_s, heartbeat_s=heartbeats * heartbeat_s)
            self._outbox.put(pb.GatewayMessage(report_pace=pace))
