"""Negotiate offloading: a site bids, donors are requested to release attempts, which move to the bidder.

No query runs twice: its next attempt is assigned only after the donor has confirmed the release, and under a
new attempt id. Synchronous, with one round per bidder at a time.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping
from itertools import groupby
from math import inf
from operator import attrgetter
from typing import NamedTuple, Protocol

from gateway.domain import Site
from gateway.federation.attempt import LiveAttempt
from gateway.routing.failover import MAX_MOVES
from gateway.routing.offload import Bid, Offer, Pending, Sites, offer, promising, wins

FEW, AGAIN_S = 64, 2e-4
"""Limits on recomputing offers of more than FEW attempts: only for a bidder that shares a model with the
donor, and at most once per AGAIN_S seconds times the number of attempts. Computing an offer takes about a
twentieth of that, so a site that reports continuously cannot keep the event loop busy with its backlog.
"""
ROUND_TIMEOUT_S = 2.0
"""Time after which a round is closed and its bidder may start another. A later release still takes effect."""


class Donor(Protocol):
    """The part of a link that the negotiation needs."""

    def pending(self) -> list[LiveAttempt]: ...
    def release(self, release_id: str, attempt_ids: list[str]) -> None: ...


class CrowdedSites(Sites, Protocol):
    """The part of the `Directory` that the negotiation needs."""

    def crowded(self, name: str) -> Site | None: ...


class _Round(NamedTuple):
    bidder: str
    donor: str
    attempt_ids: tuple[str, ...]
    began_s: float


class Offloading:
    """Runs the rounds of one gateway. `links` is the federation's map of links by site, which changes."""

    def __init__(
        self, links: Mapping[str, Donor], directory: CrowdedSites, clock: Callable[[], float]
    ) -> None:
        self._links = links
        self._directory = directory
        self._clock = clock
        self._rounds: dict[str, _Round] = {}  # by release id, oldest first
        self._oldest_ends_s = inf  # no open round times out before
        self._offers: dict[str, Offer] = {}  # by crowded site, of pending attempts that are in no open round
        self._changed: set[str] = set()  # donors whose offers must be recomputed
        self._again_s: dict[str, float] = {}  # by donor with many attempts: earliest time of a new offer

    def mark_changed(self, donor: str) -> None:
        """Mark a site whose load or pending attempts may have changed. As bids are frequent, each bid
        recomputes only the offers of marked sites.
        """
        self._changed.add(donor)

    def bid(self, bidder: str) -> None:
        """Request donors to release attempts that gain by moving to the bidder. Do nothing while a round of
        the bidder is open.
        """
        now_s, site = self._clock(), self._directory.site(bidder)
        offers = [each for each in self.offers(site) if _share_a_model(each.donor, site)]
        if not offers or any(asked.bidder == bidder for asked in self._rounds.values()):
            return
        bid = Bid.of(site) if site is not None else None
        donors = promising(bid, offers) if bid is not None else []
        won = wins(bidder, self._pending(donors), self._directory, now_s) if donors else []
        for donor, attempts in groupby(sorted(won, key=attrgetter("site")), key=attrgetter("site")):
            self._ask(bidder, donor, [each.attempt_id for each in attempts], now_s)

    def close_round(self, release_id: str) -> str | None:
        """Close a round and return its bidder, None if no round with this id is open."""
        asked = self._rounds.pop(release_id, None)
        if asked is None:
            return None
        self._changed.add(asked.donor)
        return asked.bidder

    def offers(self, bidder: Site | None = None) -> Collection[Offer]:
        """Return the offers of all crowded sites with movable attempts. The offers of changed sites are
        recomputed first, except that offers of many attempts may be out of date (see AGAIN_S).
        """
        if self._clock() >= self._oldest_ends_s:
            self._end_late_rounds()
        if not self._changed:
            return self._offers.values()
        asked = self._asked()
        late = {each for each in self._again_s if each in self._changed and not self._is_due(each, bidder)}
        for name in self._changed - late:
            link = self._links.get(name)
            attempts = link.pending() if link is not None else ()
            left = [each.demand for each in attempts if each.id not in asked and each.moves < MAX_MOVES]
            self._again_s.pop(name, None)
            if len(left) > FEW:
                self._again_s[name] = self._clock() + AGAIN_S * len(left)
            donor = self._directory.crowded(name) if left else None
            if donor is not None and (made := offer(donor, left)).beaten_by:
                self._offers[name] = made
            else:
                self._offers.pop(name, None)
        self._changed = late
        return self._offers.values()

    def _is_due(self, donor: str, bidder: Site | None) -> bool:
        """Return whether the offer of a donor with many attempts is to be recomputed now."""
        site = self._directory.site(donor)
        if site is not None and bidder is not None and not _share_a_model(site, bidder):
            return False
        return self._clock() >= self._again_s[donor]

    def _end_late_rounds(self) -> None:
        now_s = self._clock()
        while self._rounds:
            release_id, oldest = next(iter(self._rounds.items()))
            if now_s - oldest.began_s < ROUND_TIMEOUT_S:
                self._oldest_ends_s = oldest.began_s + ROUND_TIMEOUT_S
                return
            self.close_round(release_id)
        self._oldest_ends_s = inf

    def _asked(self) -> set[str]:
        """Return the ids of the attempts in open rounds."""
        return {each for asked in self._rounds.values() for each in asked.attempt_ids}

    def _pending(self, donors: list[str]) -> list[Pending]:
        """Return the attempts that are pending at the donors and in no open round."""
        asked = self._asked()
        return [
            Pending(attempt.id, donor, attempt.demand, attempt.moves, attempt.excluded)
            for donor in sorted(donors)
            for attempt in self._links[donor].pending()
            if attempt.id not in asked
        ]

    def _ask(self, bidder: str, donor: str, attempt_ids: list[str], now_s: float) -> None:
        release_id = uuid.uuid4().hex
        self._rounds[release_id] = _Round(bidder, donor, tuple(attempt_ids), now_s)
        self._oldest_ends_s = min(self._oldest_ends_s, now_s + ROUND_TIMEOUT_S)
        self._changed.add(donor)
        self._links[donor].release(release_id, attempt_ids)


def _share_a_model(one: Site, other: Site | None) -> bool:
    return other is not None and not one.identity.models.keys().isdisjoint(other.identity.models)
