"""What gateways are told of the sites: once for all gateways that have the same round trips to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, cast

from gateway.domain import Credit, LoadReport, Model, SiteIdentity
from gateway.federation.directory import Directory
from gateway.routing.fleet import Figures, Fleet, figures
from gateway.routing.offload import is_crowded, promising
from mico.simulation.specification import MODEL, PROMPT_PRICE, SiteSpec

if TYPE_CHECKING:
    from mico.simulation.gateway import Gateway, Link

NO_CREDIT = Credit()
NO_CREDITS: Mapping[str, Credit] = {}


class View:
    """The sites as some gateways know them, which get every report at the same moment.

    A report changes one fleet for all of them. What a gateway has itself assigned since is added when that
    gateway looks. `gateways` are the viewers, in the order in which they act.
    """

    def __init__(self, specs: Sequence[SiteSpec], clock: Callable[[], float]) -> None:
        self.directory = Directory()
        self.gateways: list[Gateway] = []
        self.rtt_s = {spec.name: spec.rtt_s for spec in specs}
        self.contesting: dict[int, Gateway] = {}  # whose attempts wait at crowded sites, by place
        self._specs = {spec.name: spec for spec in specs}
        self._clock = clock
        self._watching: dict[str, set[Link]] = {spec.name: set() for spec in specs}
        self._shown = NO_CREDITS
        for spec in specs:
            self.join(spec.name)

    def join(self, name: str) -> None:
        """Add an idle site, or one that was lost."""
        spec, now_s = self._specs[name], self._clock()
        self.directory.join(site_identity(spec), now_s)
        self.directory.set_rtt(name, spec.rtt_s)
        first = LoadReport(seq=1, received_s=now_s, kv_free_tokens=spec.kv_tokens, iteration=spec.cost)
        self.directory.report(name, first, NO_CREDIT)

    def watch(self, name: str, link: Link) -> None:
        """Tell a link of the reports of its site."""
        self._watching[name].add(link)

    def unwatch(self, name: str, link: Link) -> None:
        self._watching[name].discard(link)

    def fleet(self, credits: Mapping[str, Credit]) -> Fleet:
        """Return the fleet with the credits of one gateway, by site, until the next call."""
        if credits is not self._shown:
            for name in self._shown:
                if name not in credits:
                    self.directory.set_credit(name, NO_CREDIT)
            self._shown = credits
            for name, credit in credits.items():
                self.directory.set_credit(name, credit)
        return self.directory.fleet

    def credit_changed(self, credits: Mapping[str, Credit], name: str) -> None:
        """Show the credit of a gateway at one site, if it is the gateway that looks."""
        if credits is self._shown:
            self.directory.set_credit(name, credits.get(name, NO_CREDIT))

    def is_crowded(self, name: str, credit: Credit) -> bool:
        """Return whether one more query would have to wait at a site, by a gateway's own credit there."""
        fleet = self.directory.fleet
        site = fleet.sites[fleet.place(name) or 0]
        return is_crowded(cast("Figures", Figures(*zip(figures(site, credit)))), 0)

    def report(self, name: str, load: LoadReport, taken_s: float) -> None:
        """Apply a load report; it covers what had arrived at the site by `taken_s`, when it was taken.

        A site with room bids for what waits elsewhere.
        """
        self.directory.report(name, load, self._shown.get(name, NO_CREDIT))
        for link in list(self._watching[name]):
            link.reported(taken_s)
        if self.contesting and load.pending == 0 and load.running < self._specs[name].slots:
            self._bid(name)

    def _bid(self, bidder: str) -> None:
        """Let each gateway compare the bid with what waits elsewhere, if any of them can gain.

        What a gateway has assigned to the bidder makes the bid worse, so that one comparison without any of
        it ends most bids.
        """
        rivals = [gateway for _, gateway in sorted(self.contesting.items())]
        if len(rivals) > 1:
            offers = [gateway.offloading.offers() for gateway in rivals]
            fleet = self.fleet(NO_CREDITS) if bidder in self._shown else self.directory.fleet
            if not promising(bidder, chain.from_iterable(offers), fleet):
                return
        for gateway in rivals:
            gateway.offloading.bid(bidder)


def site_identity(spec: SiteSpec) -> SiteIdentity:
    model = Model(MODEL, "", 1 << 20, 0, "mico", frozenset({"chat", "resume"}))
    return SiteIdentity(
        name=spec.name,
        boot_id="",
        cloud=spec.name,
        region=spec.region or spec.name,
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
