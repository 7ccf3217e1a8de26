"""Report sites to simulated gateways, once for all gateways that have the same round trips to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gateway.domain import Credit, LoadReport, Model, Site, SiteIdentity, SiteState
from gateway.federation.directory import Directory
from gateway.federation.unreported import without_ended
from gateway.routing.fleet import Figures, Fleet, figures
from gateway.routing.offload import Bid, has_to_wait, promising
from mico.simulation.specification import MODEL, PROMPT_PRICE, SiteSpec

if TYPE_CHECKING:
    from mico.simulation.gateway import Gateway, Link

NO_CREDIT = Credit()
_waiting_figures = itemgetter(
    *(Figures._fields.index(each) for each in ("too_many", "kv_room_tokens", "kv_each_tokens"))
)


class Assigned(NamedTuple):
    """A site with what one gateway has assigned to it since its report, and its column of `Figures`."""

    site: Site
    column: tuple[float, ...]


class GatewayFleet(Fleet):
    """The fleet as one gateway at a time knows it: as the sites reported it, with that gateway's assignments.

    `show` chooses the gateway. It copies only the columns that have changed since, and those in which the
    gateway before had assignments.
    """

    def __init__(self, reported: Fleet) -> None:
        super().__init__()
        self._reported = reported
        self._places, self._serving, self._asleep = reported._places, reported._serving, reported._asleep
        self._remaining, self.sites = reported._remaining, reported.sites.copy()
        self._values = np.empty_like(reported._values)
        self._stale = set(range(len(self.sites)))
        self._shown: Mapping[str, Assigned] = {}
        self._assigned: set[int] = set()  # places of `_shown`

    def changed(self, name: str) -> None:
        """Note that a site has reported, or that what is assigned to it changed."""
        self._stale.add(self._places[name])

    def show(self, assigned: Mapping[str, Assigned]) -> None:
        """Show what the sites reported, and what a gateway has `assigned` since, in its own mapping."""
        reported, stale = self._reported, self._stale
        if assigned is not self._shown:
            stale |= self._assigned
            stale.update(self._places[name] for name in assigned)
            self._shown = assigned
        if not stale:
            return
        reported_figures = reported.figures  # computes what is outdated
        added = {place: each for place in stale if (each := assigned.get(reported.sites[place].name))}
        copied = [place for place in stale if place not in added]
        for place in copied:
            self.sites[place] = reported.sites[place]
        self._values[:, copied] = reported._values[:, copied]
        for place, each in added.items():
            self.sites[place] = each.site
        if added:
            self._values[:, list(added)] = np.array([each.column for each in added.values()]).T
        self._assigned.difference_update(copied)
        self._assigned.update(added)
        stale.clear()
        if self._figures is None:
            self._figures = Figures(*self._values[:, : len(reported_figures.slots)])


class View:
    """The sites as some gateways know them, which get every report at the same moment.

    A report changes one fleet for all of them. What a gateway has itself assigned since is added when that
    gateway looks.
    """

    def __init__(self, specs: Sequence[SiteSpec], clock: Callable[[], float]) -> None:
        self.directory = Directory()
        self.rtt_s = {spec.name: spec.rtt_s for spec in specs}
        self.contesting: dict[int, Gateway] = {}  # whose attempts wait at crowded sites, by number
        self._specs = {spec.name: spec for spec in specs}
        self._clock = clock
        self._watching: dict[str, set[Link]] = {spec.name: set() for spec in specs}
        for spec in specs:
            self._join(spec)
        self._fleet = GatewayFleet(self.directory.fleet)

    def _join(self, spec: SiteSpec) -> None:
        now_s = self._clock()
        self.directory.join(site_identity(spec), now_s)
        self.directory.set_rtt(spec.name, spec.rtt_s)
        first = LoadReport(seq=1, received_s=now_s, kv_free_tokens=spec.kv_tokens, iteration=spec.cost)
        self.directory.report(spec.name, first, NO_CREDIT)

    def join(self, name: str) -> None:
        """Add a site that was lost; it is idle."""
        self._join(self._specs[name])
        self._fleet.changed(name)

    def leave(self, name: str) -> None:
        """Mark a site as lost."""
        self.directory.leave(name)
        self._fleet.changed(name)

    def drain(self, name: str) -> None:
        """Give a site no more work."""
        self.directory.set_state(name, SiteState.DRAINING)
        self._fleet.changed(name)

    def watch(self, name: str, link: Link) -> None:
        """Tell a link of the reports of its site."""
        self._watching[name].add(link)

    def unwatch(self, name: str, link: Link) -> None:
        self._watching[name].discard(link)

    def fleet(self, gateway: Gateway) -> Fleet:
        """Return the fleet as one gateway knows it now."""
        self._fleet.show(gateway.assigned)
        return self._fleet

    def assigned(self, gateway: Gateway, name: str, credit: Credit, ended_tokens: Sequence[int]) -> None:
        """Note what a gateway has assigned to a site since its report, and the KV of what it saw end."""
        if credit.requests or ended_tokens:
            fleet = self.directory.fleet
            reported = fleet.sites[fleet.place(name) or 0]
            site = replace(reported, load=reduce(without_ended, ended_tokens, reported.load), credit=credit)
            gateway.assigned[name] = Assigned(site, figures(site, credit))
        else:
            gateway.assigned.pop(name, None)
        self._fleet.changed(name)

    def crowded(self, gateway: Gateway, name: str) -> Site | None:
        """Return a site where one more query of a gateway would have to wait, None if it would not."""
        if (assigned := gateway.assigned.get(name)) is not None:
            return assigned.site if has_to_wait(*_waiting_figures(assigned.column)) else None
        return self.directory.crowded(name)

    def report(self, name: str, load: LoadReport, taken_s: float) -> None:
        """Apply a load report; it covers what had arrived at the site by `taken_s`, when it was taken.

        A site with room bids for what waits elsewhere.
        """
        self.directory.report(name, load, NO_CREDIT)
        self._fleet.changed(name)
        for link in list(self._watching[name]):
            link.reported(taken_s)
        if self.contesting and load.pending == 0 and load.running < self._specs[name].slots:
            self._bid(name)

    def _bid(self, bidder: str) -> None:
        """Let the gateways compare the bid with what waits elsewhere.

        What a gateway has assigned to the bidder makes the bid worse, so that comparisons without any of it
        end most bids.
        """
        reported = self.directory.site(bidder)
        bid = Bid.of(reported) if reported is not None else None
        if bid is None:
            return
        rivals = [gateway for _, gateway in sorted(self.contesting.items())]
        offers = [(gateway, gateway.offloading.offers()) for gateway in rivals]
        for gateway, each in offers:
            if each and promising(bid, each):
                gateway.offloading.bid(bidder)


def site_identity(spec: SiteSpec) -> SiteIdentity:
    model = Model(MODEL, "", 1 << 20, 0, "mico", frozenset({"chat", "resume"}))
    return SiteIdentity(
        name=spec.name,
        boot_id="",
        cloud=spec.name,
        region=spec.region or spec.name,
        pool=spec.region,
        models={MODEL: model},
        slots=spec.slots,
        kv_capacity_tokens=spec.kv_tokens,
        input_usd_per_mtok=PROMPT_PRICE * spec.usd_per_mtok,
        output_usd_per_mtok=spec.usd_per_mtok,
    )


def views_of(specs: Sequence[SiteSpec], gateways: int, clock: Callable[[], float]) -> list[View]:
    """Return the view of each gateway; gateways with the same round trips share one."""
    shared: dict[tuple[float, ...], View] = {}
    found = []
    for number in range(gateways):
        seen = [spec.seen_by(number) for spec in specs]
        rtts_s = tuple(spec.rtt_s for spec in seen)
        if rtts_s not in shared:
            shared[rtts_s] = View(seen, clock)
        found.append(shared[rtts_s])
    return found
