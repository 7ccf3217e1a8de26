"""The sites of the federation and their load: frozen `Site` values, replaced on every change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice

from gateway.domain import Credit, LoadReport, Model, Site, SiteIdentity, SiteState
from gateway.federation.model_index import ModelIndex
from gateway.federation.unreported import without_ended
from gateway.operator_orders import Standing
from gateway.prices import Prices, prices_of
from gateway.routing.fleet import NO_MODELS, Fleet, kv_tokens
from gateway.routing.offload import is_crowded
from gateway.routing.prefixes import PrefixIndex

MAX_SITES = 10_000
DOWN_KEPT_S = 86_400.0
"""How long a site that is down stays listed. Machines of a pool are replaced under new names."""
MAX_REASON_CHARS = 200


class Directory:
    """The sites of this gateway, with their states and loads. Sites that left stay listed as down, for
    operators, until DOWN_KEPT_S has passed or more than MAX_SITES are listed.

    Orders of operators are kept by site name, so that they apply again when a site rejoins.
    """

    def __init__(self) -> None:
        self._sites: dict[str, Site] = {}  # without the orders of operators
        self._down: dict[str, None] = {}  # names of sites that are down, in the order in which they left
        self._standings: Mapping[str, Standing] = {}
        self._snapshot: tuple[Site, ...] | None = None
        self._served, self._listed = ModelIndex(), ModelIndex()  # models of ready sites; of all sites
        self.down_reasons: dict[str, str] = {}  # for sites that are down or ejected, one line each
        self.unknown_messages: dict[str, int] = {}  # by site: messages of kinds unknown to this version
        self.fleet = Fleet()  # the same sites, in the form that routing reads
        self.prefixes = PrefixIndex()  # the prompt prefixes in the sites' caches

    @property
    def sites(self) -> tuple[Site, ...]:
        """Return an immutable snapshot, sorted by name."""
        if self._snapshot is None:
            self._snapshot = tuple(self._with_standing(self._sites[name]) for name in sorted(self._sites))
        return self._snapshot

    def load_of(self, name: str) -> LoadReport:
        return self._sites[name].load

    def site(self, name: str) -> Site | None:
        return self.fleet.site(name)

    def crowded(self, name: str) -> Site | None:
        """Return the site if one more query would have to wait there, None if not or if it is not listed."""
        place = self.fleet.place(name)
        return (
            self.fleet.sites[place] if place is not None and is_crowded(self.fleet.figures, place) else None
        )

    def cloud_of(self, name: str) -> str:
        """Return the cloud of a site, empty if it is not listed."""
        site = self._sites.get(name)
        return site.identity.cloud if site else ""

    def prices_of(self, name: str) -> Prices | None:
        """Return the current prices of a site, None if it is not listed."""
        site = self._sites.get(name)
        return prices_of(site.identity, site.load) if site else None

    @property
    def served(self) -> Mapping[str, Model]:
        """Return the models that ready sites serve, by id."""
        return self._served.models

    @property
    def models(self) -> Mapping[str, Model]:
        """Return the models that listed sites serve, or served before they went down, by id."""
        return self._listed.models

    def parent_of(self, model: str) -> str:
        """Return the parent of a variant, empty if the model is not a variant or is unknown."""
        known = self.models.get(model)
        return known.parent if known else ""

    def join(self, identity: SiteIdentity, now_s: float) -> None:
        """Add a site, stale until its first report: from then on it takes work."""
        before = self._sites.pop(identity.name, None)
        if before is not None and before.identity.boot_id != identity.boot_id:
            self.prefixes.forget(identity.name)
        self._down.pop(identity.name, None)
        self.down_reasons.pop(identity.name, None)
        empty = LoadReport(seq=0, received_s=now_s, kv_free_tokens=identity.kv_capacity_tokens)
        self._put(Site(identity, SiteState.STALE, empty))
        self._forget_the_oldest()

    def set_identity(self, identity: SiteIdentity) -> None:
        """Replace the description of a listed site."""
        self._put(replace(self._sites[identity.name], identity=identity))

    def forget_model(self, name: str, model: str) -> None:
        """Remove a deleted model from a site that is down, which can't report the removal itself."""
        site = self._sites.get(name)
        if site is not None and site.state is SiteState.DOWN:
            left = {id_: each for id_, each in site.identity.models.items() if id_ != model}
            self.set_identity(replace(site.identity, models=left))

    def report(self, name: str, load: LoadReport, credit: Credit) -> None:
        """Record a load report. A report that arrives out of order is dropped."""
        site = self._sites[name]
        if load.seq <= site.load.seq:
            return
        state = SiteState.READY if site.state is SiteState.STALE else site.state
        self._put(_with_load(site, state, load, credit))
        self.prefixes.advance(name, load.computed_tokens_total, kv_tokens(self._sites[name]))

    def set_credit(self, name: str, credit: Credit) -> None:
        self._count(name, self._sites[name].load, credit)

    def request_ended(self, name: str, kv_tokens: int) -> None:
        """Remove a request that has ended since from the last report. `kv_tokens`: the KV memory it freed."""
        site = self._sites[name]
        self._count(name, without_ended(site.load, kv_tokens), site.credit)

    def _count(self, name: str, load: LoadReport, credit: Credit) -> None:
        """Replace the load and credit of a listed site; its models and state are unchanged."""
        site = self._sites[name]
        self._sites[name] = changed = _with_load(site, site.state, load, credit)
        self._snapshot = None
        self.fleet.put(self._with_standing(changed))

    def set_rtt(self, name: str, rtt_s: float, clock_ahead_s: float | None = None) -> None:
        """Record a round trip time, smoothed, so that one late pong does not make a site seem distant."""
        site = self._sites[name]
        smooth = rtt_s if site.rtt_s == 0 else 0.8 * site.rtt_s + 0.2 * rtt_s
        self._put(replace(site, rtt_s=smooth, clock_ahead_s=clock_ahead_s))

    def count_unknown_message(self, name: str) -> None:
        self.unknown_messages[name] = self.unknown_messages.get(name, 0) + 1

    def set_state(self, name: str, state: SiteState) -> None:
        self._put(replace(self._sites[name], state=state))

    def eject(self, name: str, reason: str) -> None:
        """Exclude a site from routing until `restore`: its link is up, but it makes no progress."""
        if self._sites[name].state in (SiteState.READY, SiteState.STALE, SiteState.EJECTED):
            self.down_reasons[name] = reason
            self.set_state(name, SiteState.EJECTED)

    def restore(self, name: str) -> None:
        if self._sites[name].state is SiteState.EJECTED:
            self.down_reasons.pop(name, None)
            self.set_state(name, SiteState.READY)

    def is_one_of_many(self, identity: SiteIdentity) -> bool:
        """Return True if, for one of the site's models, at least as many other sites are ejected as are
        ready.

        Then all are likely overloaded, and ejecting one more would slow down the rest. Variants are not
        considered if the site serves their parent.
        """
        served = identity.models.values()
        bases = [each.id for each in served if each.parent not in identity.models]
        for model in bases:
            states = [
                each.state
                for each in self.sites
                if each.name != identity.name and model in each.identity.models
            ]
            if states.count(SiteState.READY) <= states.count(SiteState.EJECTED):
                return True
        return False

    def apply_standings(self, standings: Mapping[str, Standing]) -> None:
        """Replace the orders of operators, by site."""
        if standings == self._standings:
            return
        self._standings = dict(standings)
        self._snapshot = None
        for site in self._sites.values():
            self._index(self._with_standing(site))

    def leave(self, name: str, reason: str = "its link ended") -> None:
        """Mark a site as down. Its attempts are lost, and its last report is cleared except for its time."""
        self.down_reasons[name] = " ".join(reason.split())[:MAX_REASON_CHARS]
        site = self._sites[name]
        nothing = LoadReport(seq=site.load.seq, received_s=site.load.received_s)
        self._put(replace(site, state=SiteState.DOWN, load=nothing, credit=Credit()))
        self._down[name] = None

    def forget_gone(self, now_s: float) -> None:
        """Remove the sites that are down and last reported more than DOWN_KEPT_S ago."""
        for name in [*self._down]:
            if self._sites[name].load.received_s >= now_s - DOWN_KEPT_S:
                return
            self._forget(name)

    def _with_standing(self, site: Site) -> Site:
        """Apply the operators' orders. They can restrict a ready site, but do not make another site ready."""
        standing = self._standings.get(site.name)
        if standing is None:
            return site
        state = standing.state if site.state is SiteState.READY else site.state
        return replace(site, state=state, weight=standing.weight, pinned_off=standing.pinned_off)

    def _put(self, site: Site) -> None:
        self._sites[site.name] = site
        self._snapshot = None
        self._index(self._with_standing(site))

    def _index(self, site: Site) -> None:
        models = site.identity.models
        self._listed.put(site.name, models)
        self._served.put(site.name, models if site.state is SiteState.READY else NO_MODELS)
        self.fleet.put(site)

    def _forget_the_oldest(self) -> None:
        for name in [*islice(self._down, max(0, len(self._sites) - MAX_SITES))]:
            self._forget(name)

    def _forget(self, name: str) -> None:
        del self._sites[name], self._down[name]
        self._snapshot = None
        self.down_reasons.pop(name, None)
        self.unknown_messages.pop(name, None)
        self._listed.put(name, NO_MODELS)
        self._served.put(name, NO_MODELS)
        self.fleet.remove(name)


def _with_load(site: Site, state: SiteState, load: LoadReport, credit: Credit) -> Site:
    """Return a copy of the site with another state, load and credit, in half the time of `replace`. Called
    for every report and every assignment.
    """
    identity, rtt_s, ahead_s = site.identity, site.rtt_s, site.clock_ahead_s
    return Site(identity, state, load, credit, rtt_s, ahead_s, site.weight, site.pinned_off)
