"""Keep recent events as sentences: sites that joined, left or went silent, operators' acts, query moves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from gateway.domain import SiteState

MAX_EVENTS = 200
OPERATOR = "operator"
"""The `kind` of events that are acts of operators."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event.

    `at` is unix time; `kind` is state, operator, offload or failover; `who` is set for operators only.
    """

    at: float
    kind: str
    site: str
    text: str
    who: str = ""
    bad: bool = False


_time = attrgetter("at")
_TEXTS = {
    SiteState.READY: ("is ready", False),
    SiteState.STALE: ("is stale: its reports stopped", True),
    SiteState.DOWN: ("is down", True),
    SiteState.DRAINING: ("drains: no new queries, running ones finish", False),
    SiteState.PAUSED: ("is paused: no new queries, what is left moves", False),
    SiteState.EJECTED: ("is ejected: no queries until it works again", True),
}


class EventLog:
    """The newest MAX_EVENTS acts of operators and MAX_EVENTS other events, neither displacing the others."""

    def __init__(self) -> None:
        self._kept: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._acts: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._states: dict[str, tuple[str, SiteState]] = {}

    def add(self, event: Event) -> None:
        kept = self._acts if event.kind == OPERATOR else self._kept
        kept.append(event)

    def newest(self, limit: int = MAX_EVENTS) -> list[Event]:
        """Return up to `limit` events, newest first. Acts of operators are at most half of them, or more if
        there are too few other events.
        """
        acts = sorted(self._acts, key=_time)[::-1][: max(limit // 2, limit - len(self._kept))]
        return sorted((*self._kept, *acts), key=_time)[::-1][:limit]

    def record_states(
        self, now: float, sites: Iterable[tuple[str, str, SiteState]], down_reasons: Mapping[str, str]
    ) -> list[Event]:
        """Record the state changes since the last call as events, and return them.

        `sites` yields (name, boot id, state) of every listed site. `down_reasons`: by name, the reasons why
        sites are down or ejected.
        """
        seen: dict[str, tuple[str, SiteState]] = {}
        changes: list[Event] = []
        for name, boot_id, state in sites:
            boot_before, before = self._states.get(name, ("", None))
            seen[name] = (boot_id, state)
            if before is None or (before is SiteState.DOWN and state is not SiteState.DOWN):
                changes.append(Event(now, "state", name, "joined" if before is None else "joined again"))
            elif boot_before != boot_id:
                changes.append(Event(now, "state", name, "was restarted and joined again", bad=True))
            if before is not state and not (before is None and state is SiteState.READY):
                text, bad = _TEXTS[state]
                has_reason = state in (SiteState.DOWN, SiteState.EJECTED) and name in down_reasons
                why = f": {down_reasons[name]}" if has_reason else ""
                changes.append(Event(now, "state", name, text + why, bad=bad))
        self._states = seen
        self._kept.extend(changes)
        return changes
