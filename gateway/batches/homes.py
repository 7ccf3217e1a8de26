"""Assigns lines that share a prefix to the sites that have computed that prefix. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Final

from gateway.batches.capacity import SiteCapacity, assign_sites
from gateway.batches.values import Line

LOOK_AHEAD: Final = 64
"""Lines searched for one that suits the sites with room."""
MAX_GROUPS: Final = 4096
"""Maximum number of groups whose sites are remembered; the oldest are dropped."""


SPREAD_TIMES: Final = 20.0
"""A group starts at one more site when its lines have this many times the tokens of the prefix besides it."""


class _Home:
    """The sites of a group, with the tokens of the lines started there, not counting the prefix."""

    def __init__(self) -> None:
        self.sites: set[str] = set()
        self.tokens = 0.0


class Homes:
    """The sites at which lines of each group have started.

    A group stays at its sites while other lines can start elsewhere, unless its prefix is short compared with
    its lines: then computing the prefix at one more site costs less than unequal work at the sites.
    """

    def __init__(self) -> None:
        self._homes: dict[int, _Home] = {}
        self._serving = set[str]()
        self._room: dict[str, int] = {}
        self._chosen: dict[int, str] = {}  # sites of the lines just taken, by number

    def begin(self, capacities: Sequence[SiteCapacity], serving: Collection[str]) -> None:
        """Start a round that takes lines for the sites of `capacities`, some of those `serving`.

        Groups of a site that no longer serves start again at another.
        """
        self._room = {site.name: lines for site, lines in capacities}
        self._chosen = {}
        if gone := self._serving.difference(serving):
            for home in self._homes.values():
                home.sites -= gone
            self._homes = {group: home for group, home in self._homes.items() if home.sites}
        self._serving = set(serving)

    def take(self, queue: deque[Line]) -> Line | None:
        """Take the next line, or a later one whose prefix is at a site with room."""
        if not queue:
            return None
        at, site = next(
            ((at, site) for at in range(min(LOOK_AHEAD, len(queue))) if (site := self._site_for(queue[at]))),
            (0, max(self._room, key=self._room.__getitem__, default="")),
        )
        line = queue[at]
        del queue[at]
        if line.shared_tokens and site:
            self._chosen[line.number] = site
            self._room[site] -= 1
            home = self._homes.setdefault(line.group, _Home())
            home.sites.add(site)
            home.tokens += line.prompt_tokens - line.shared_tokens + line.response_tokens
            if len(self._homes) > MAX_GROUPS:
                del self._homes[next(iter(self._homes))]
        return line

    def assign(self, lines: Sequence[Line], capacities: Sequence[SiteCapacity]) -> list[str]:
        """Return the site of each taken line. Lines without a shared prefix are assigned jointly."""
        alone = [line for line in lines if line.number not in self._chosen]
        free = [
            SiteCapacity(site, self._room[site.name]) for site, _ in capacities if self._room[site.name] > 0
        ]
        sites = iter(assign_sites([line.response_tokens for line in alone], free or capacities))
        return [self._chosen.get(line.number) or next(sites) for line in lines]

    def _site_for(self, line: Line) -> str:
        """Return the site with most room for a line, among those with its prefix, or among all."""
        home = self._homes.get(line.group) if line.shared_tokens else None
        names = set(self._room)
        if home and home.tokens < SPREAD_TIMES * line.shared_tokens * len(home.sites):
            names = home.sites
        room = [(self._room.get(name, 0), name) for name in names]
        lines, site = max(room, default=(0, ""))
        return site if lines > 0 else ""
