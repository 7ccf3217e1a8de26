"""The negotiation: a site bids, donors are asked to release, what they confirm goes to the bidder.

Exactly once by construction: an attempt is assigned anew only after its site has said that it gave it up, and
under a new attempt id. Synchronous; one round per bidder at a time.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import NamedTuple, Protocol

from gateway.federation.attempt import LiveAttempt
from gateway.federation.directory import Directory
from gateway.routing.fleet import Fleet
from gateway.routing.offload import Offer, Pending, crowded, offer, promising, wins

ANSWER_WITHIN_S = 2.0
"""A donor that has not answered by then is not waited for; if it does answer, that still counts."""


class Donor(Protocol):
    """A link, as far as this negotiation needs it."""

    def pending(self) -> list[LiveAttempt]: ...
    def release(self, release_id: str, attempt_ids: list[str]) -> None: ...


class _Asked(NamedTuple):
    bidder: str
    attempt_ids: tuple[str, ...]
    asked_s: float


class Offloading:
    """`links` is the federation's own map of links by site."""

    def __init__(self, links: Mapping[str, Donor], directory: Directory, clock: Callable[[], float]) -> None:
        self._links = links
        self._directory = directory
        self._clock = clock
        self._asked: dict[str, _Asked] = {}
        # by donor that was crowded at the last look: what was worked out, and of which attempts
        self._offers: dict[str, tuple[list[LiveAttempt], Offer]] = {}

    def bid(self, bidder: str) -> None:
        """A site has room: ask for what gains by moving there, unless a round of this bidder is open."""
        now_s = self._clock()
        self._asked = {
            k: asked for k, asked in self._asked.items() if now_s - asked.asked_s < ANSWER_WITHIN_S
        }
        if any(asked.bidder == bidder for asked in self._asked.values()):
            return
        fleet = self._directory.fleet
        donors = promising(bidder, self._crowded_offers(fleet), fleet)
        won = wins(bidder, self._pending(donors), fleet, now_s) if donors else []
        for donor, attempts in groupby(sorted(won, key=_site_of), key=_site_of):
            self._ask(bidder, donor, [each.attempt_id for each in attempts], now_s)

    def answered(self, release_id: str) -> str | None:
        """Who the released attempts of this answer go to; None if nobody asked (any more)."""
        asked = self._asked.pop(release_id, None)
        return asked.bidder if asked else None

    def _crowded_offers(self, fleet: Fleet) -> Iterable[Offer]:
        """Worked out once for a site as long as nothing changes there: many may bid meanwhile."""
        before, self._offers = self._offers, {}
        full = set(crowded(fleet))
        for place in full.intersection(map(fleet.place, self._links)):
            donor = fleet.sites[place]
            attempts = self._links[donor.name].pending()
            if attempts:
                known = before.get(donor.name)
                if known is None or known[0] != attempts or known[1].donor is not donor:
                    known = attempts, offer(donor, [each.demand for each in attempts])
                self._offers[donor.name] = known
                yield known[1]

    def _pending(self, donors: list[str]) -> list[Pending]:
        """What waits there and is not being negotiated about already."""
        talked_about = {each for asked in self._asked.values() for each in asked.attempt_ids}
        return [
            Pending(attempt.id, donor, attempt.demand, attempt.moves)
            for donor in donors
            for attempt in self._links[donor].pending()
            if attempt.id not in talked_about
        ]

    def _ask(self, bidder: str, donor: str, attempt_ids: list[str], now_s: float) -> None:
        release_id = uuid.uuid4().hex
        self._asked[release_id] = _Asked(bidder, tuple(attempt_ids), now_s)
        self._links[donor].release(release_id, attempt_ids)


def _site_of(pending: Pending) -> str:
    return pending.site
