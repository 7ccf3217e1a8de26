"""How exact and how frequent the reports of one site are: the more sites a gateway has, the less so.

Else a gateway of a large fleet would do little but read reports. How much worse decisions are: measured in
docs/decisions/report-pace.md.
"""

from __future__ import annotations

from gateway.federation.outbox import Outbox
from wire import federation_pb2 as pb

LINKS_PER_SECOND, MAX_EVERY_S = 250, 4
"""With so many more links, a site without news may be quiet for a second more."""
LINKS_TWICE_OFF = 500
"""From so many links on, reports may be off by twice as much."""


class ReportPace:
    """`is_kept`: whether the site knows such a pace; an older one goes on as in a small fleet."""

    def __init__(self, outbox: Outbox, *, is_kept: bool) -> None:
        self.times_off = self.every_s = 1
        self._outbox = outbox
        self._is_kept = is_kept

    @property
    def quiet_s(self) -> float:
        """Return by how much later than in a small fleet the next report may come."""
        return self.every_s - 1.0

    def adapt(self, links: int) -> None:
        """Tell the site the pace of a fleet with so many links, unless it has been told."""
        off = 2 if links >= LINKS_TWICE_OFF else 1
        every_s = min(MAX_EVERY_S, 1 + links // LINKS_PER_SECOND)
        if self._is_kept and (off, every_s) != (self.times_off, self.every_s):
            self.times_off, self.every_s = off, every_s
            pace = pb.ReportPace(times_off=off, every_s=every_s)
            self._outbox.put(pb.GatewayMessage(report_pace=pace))
