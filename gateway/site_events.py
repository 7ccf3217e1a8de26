"""What happened lately, as sentences: sites that came, left or went quiet, what operators did, what moved."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gateway.domain import SiteState

MOST_KEPT = 200


@dataclass(frozen=True, slots=True)
class Event:
    """`at` is unix time. `kind`: state, operator, offload or failover. `who` is empty but for operators."""

    at: float
    kind: str
    site: str
    text: str
    who: str = ""
    bad: bool = False


_TEXTS = {
    SiteState.READY: ("is ready", False),
    SiteState.STALE: ("is stale: its reports stopped", True),
    SiteState.DOWN: ("is down", True),
    SiteState.DRAINING: ("drains: no new queries, running ones finish", False),
    SiteState.PAUSED: ("is paused: no new queries, what is left moves", False),
    SiteState.EJECTED: ("is ejected", True),
}


class EventLog:
    """Newest first. Bounded: the oldest go."""

    def __init__(self) -> None:
        self._kept: deque[Event] = deque(maxlen=MOST_KEPT)
        self._states: dict[str, tuple[str, SiteState]] = {}

    def add(self, event: Event) -> None:
        self._kept.append(event)

    def latest(self, most: int = MOST_KEPT) -> list[Event]:
        by_time = sorted(self._kept, key=lambda event: event.at)
        return by_time[::-1][:most]

    def states(
        self, now: float, sites: Iterable[tuple[str, str, SiteState]], why_left: Mapping[str, str]
    ) -> list[Event]:
        """(name, boot id, state) of every site that is listed, and why those that are down left.

        What changed since the last call is noted, and comes back.
        """
        seen: dict[str, tuple[str, SiteState]] = {}
        news: list[Event] = []
        for name, boot_id, state in sites:
            boot_before, before = self._states.get(name, ("", None))
            seen[name] = (boot_id, state)
            if before is None or (before is SiteState.DOWN and state is not SiteState.DOWN):
                news.append(Event(now, "state", name, "joined" if before is None else "joined again"))
            elif boot_before != boot_id:
                news.append(Event(now, "state", name, "was restarted and joined again", bad=True))
            if before is not state and not (before is None and state is SiteState.READY):
                text, bad = _TEXTS[state]
                why = f": {why_left[name]}" if state is SiteState.DOWN and name in why_left else ""
                news.append(Event(now, "state", name, text + why, bad=bad))
        self._states = seen
        self._kept.extend(news)
        return news
