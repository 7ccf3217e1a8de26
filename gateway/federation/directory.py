"""Which sites there are and how busy they are: frozen `Site` values, replaced on every change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from gateway.domain import Credit, LoadReport, Model, Site, SiteIdentity, SiteState, Standing
from gateway.routing.fleet import Fleet

MAX_SITES = 10_000
WHY_CHARS = 200
EVERY_STATE = tuple(SiteState)


class Directory:
    """Sites that left stay listed as down, so that an operator sees them, until `MAX_SITES` push them out.

    What operators said is kept by name, so that it outlives a site's going and coming.
    """

    def __init__(self) -> None:
        self._sites: dict[str, Site] = {}  # as the sites are by themselves
        self._standings: Mapping[str, Standing] = {}
        self._snapshot: tuple[Site, ...] | None = None
        self._of_states: dict[tuple[SiteState, ...], Mapping[str, Model]] = {}
        self.why_left: dict[str, str] = {}  # of those that are down, one line each
        self.fleet = Fleet()  # the same sites as deciding reads them

    @property
    def sites(self) -> tuple[Site, ...]:
        """An immutable picture of now, by name."""
        if self._snapshot is None:
            self._snapshot = tuple(self._under_orders(self._sites[name]) for name in sorted(self._sites))
        return self._snapshot

    def cloud_of(self, name: str) -> str:
        """Empty of a site that is not listed."""
        site = self._sites.get(name)
        return site.identity.cloud if site else ""

    @property
    def served(self) -> Mapping[str, Model]:
        """Every model that a site which is ready serves, by id."""
        return self._models((SiteState.READY,))

    @property
    def models(self) -> Mapping[str, Model]:
        """Every model that a listed site serves, or served before it went down, by id."""
        return self._models(EVERY_STATE)

    def _models(self, states: tuple[SiteState, ...]) -> Mapping[str, Model]:
        """A model has the features that any of its sites gives it. Asked by every query, so it is kept."""
        if states in self._of_states:
            return self._of_states[states]
        found: dict[str, Model] = {}
        for site in self.sites:
            for id_, model in site.identity.models.items() if site.state in states else ():
                before = found.get(id_, model).features
                whole = model.features >= before
                found[id_] = model if whole else replace(model, features=model.features | before)
        self._of_states[states] = models = MappingProxyType(found)
        return models

    def join(self, identity: SiteIdentity, now_s: float) -> None:
        """A site is here; it takes work from its first report on."""
        self._sites.pop(identity.name, None)
        self.why_left.pop(identity.name, None)
        empty = LoadReport(seq=0, received_s=now_s, kv_free_tokens=identity.kv_capacity_tokens)
        self._put(Site(identity, SiteState.STALE, empty))
        self._forget_the_oldest()

    def report(self, name: str, load: LoadReport, credit: Credit) -> None:
        """A newer report; one that arrives out of order is dropped."""
        site = self._sites[name]
        if load.seq <= site.load.seq:
            return
        state = SiteState.READY if site.state is SiteState.STALE else site.state
        self._put(_told(site, state, load, credit))

    def credit(self, name: str, credit: Credit) -> None:
        site = self._sites[name]
        self._put(_told(site, site.state, site.load, credit))

    def measured(self, name: str, rtt_s: float, clock_ahead_s: float | None = None) -> None:
        """Round trips, smoothed: one late pong does not move a site away."""
        site = self._sites[name]
        smooth = rtt_s if site.rtt_s == 0 else 0.8 * site.rtt_s + 0.2 * rtt_s
        self._put(replace(site, rtt_s=smooth, clock_ahead_s=clock_ahead_s))

    def state(self, name: str, state: SiteState) -> None:
        self._put(replace(self._sites[name], state=state))

    def ordered(self, standings: Mapping[str, Standing]) -> None:
        """All that operators want now, by site; it replaces what they wanted before."""
        if standings == self._standings:
            return
        self._standings = dict(standings)
        self._snapshot = None
        self._of_states.clear()
        for site in self._sites.values():
            self.fleet.put(self._under_orders(site))

    def leave(self, name: str, why: str = "its link ended") -> None:
        """It is down: what ran there is lost, and its last report is true no more, but for its age."""
        self.why_left[name] = " ".join(why.split())[:WHY_CHARS]
        site = self._sites[name]
        nothing = LoadReport(seq=site.load.seq, received_s=site.load.received_s)
        self._put(replace(site, state=SiteState.DOWN, load=nothing, credit=Credit()))

    def _under_orders(self, site: Site) -> Site:
        """An order holds back a site that is ready; it makes none ready that is not."""
        standing = self._standings.get(site.name)
        if standing is None:
            return site
        state = standing.state if site.state is SiteState.READY else site.state
        return replace(site, state=state, weight=standing.weight, pinned_off=standing.pinned_off)

    def _put(self, site: Site) -> None:
        before = self._sites.get(site.name)
        self._sites[site.name] = site
        self._snapshot = None
        if before is None or before.state is not site.state or before.identity is not site.identity:
            self._of_states.clear()
        self.fleet.put(self._under_orders(site))

    def _forget_the_oldest(self) -> None:
        down = [name for name, site in self._sites.items() if site.state is SiteState.DOWN]
        for name in down[: max(0, len(self._sites) - MAX_SITES)]:
            del self._sites[name]
            self.why_left.pop(name, None)
            self._of_states.clear()
            self.fleet.remove(name)


def _told(site: Site, state: SiteState, load: LoadReport, credit: Credit) -> Site:
    """As `replace` in half the time: every report and every assignment passes here."""
    identity, rtt_s, ahead_s = site.identity, site.rtt_s, site.clock_ahead_s
    return Site(identity, state, load, credit, rtt_s, ahead_s, site.weight, site.pinned_off)
