"""Build the snapshot that the page shows: sites, totals, and one sentence about the federation's state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from gateway.device import DeviceLoad
from gateway.domain import ModelState, Site, SiteState
from gateway.prices import prices_of
from gateway.routing.fleet import kv_tokens
from gateway.site_events import Event
from gateway.telemetry.history import PLOTTED_SITES, Sample
from gateway.telemetry.metrics import capacity_tokens, outstanding_tokens
from gateway.telemetry.recent import NO_WAITS, ForecastQuality, Route, SiteWaits
from gateway.telemetry.route_figures import TargetFigures

RATE_WINDOW_S = 5.0
STALE_SHOWN_AFTER_S = 2.0
"""Sites report at least once a second. The page shows silence earlier than routing acts on it."""


class SiteView(msgspec.Struct, frozen=True):
    """A site in the snapshot. Prices are in USD per million tokens; `load` is outstanding / capacity.

    `weight` is a percentage; `share` is the site's part of all output of the last seconds. `cached_share` is
    the part of the prompt tokens of the last minute that it had in its cache.
    `certificate_until` is unix time; None if our authority issued the site no certificate.
    """

    name: str
    cloud: str
    region: str
    state: SiteState
    models: list[str]  # empty in what pages are streamed
    model_count: int
    asleep: int  # of the models, those that sleep or wake
    own_bytes: int  # of memory of the variants that are awake, beside the base's; equal parts count twice
    pinned_off: list[str]
    slots: int
    running: int
    pending: int
    outstanding_tokens: int
    capacity_tokens: int
    load: float | None
    tokens_per_s: float
    output_per_s: float
    input_per_s: float
    share: float
    weight: float
    kv_used: float | None
    report_age_s: float
    ttft_p95_s: float | None
    itl_p95_s: float | None
    errors_per_min: float
    cached_share: float | None
    input_usd_per_mtok: float
    output_usd_per_mtok: float
    pool: str
    certificate_until: float | None
    devices: list[DeviceLoad] = []  # of a site that has several
    training: int = 0  # jobs of fine-tuning that it trains

    @property
    def taking(self) -> bool:
        """Return whether the site accepts new queries."""
        return self.state is SiteState.READY and self.weight > 0


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals over all sites and replicas. `ttft_p95_s` is the worst site's at the worst replica."""

    output_per_s: float
    input_per_s: float
    in_flight: int
    queued: int
    ttft_p95_s: float | None
    ttft_site: str
    errors_per_min: float
    ended_per_min: float
    headroom: float | None


@dataclass(frozen=True, slots=True)
class Banner:
    """The sentence at the top of the page. `level` is calm, degraded or critical."""

    level: str
    text: str


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of machines of one cloud: the number that serves, and the number that the load needs."""

    name: str
    machines: int
    desired: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The federation at one moment.

    `replica` built it from the queries of all `replicas`; `at` is unix time.
    """

    seq: int
    at: float
    replica: str
    replicas: list[str]
    banner: Banner
    totals: Totals
    clouds: dict[str, float]
    sites: list[SiteView]
    pools: list[Pool]
    routes: list[Route]
    model_routes: list[TargetFigures]
    quality: ForecastQuality | None
    events: list[Event]

    def encoded_for_pages(self) -> bytes:
        """Return the snapshot as JSON without the names of models: a page needs them in one dialog only."""
        sites = [msgspec.structs.replace(site, models=[]) for site in self.sites]
        return msgspec.json.encode(replace(self, sites=sites))

    def sample(self) -> Sample:
        """Return the snapshot's point in the plots."""
        known = [(site.load, site.name) for site in self.sites if site.load is not None]
        busiest = sorted(known, reverse=True)[:PLOTTED_SITES]
        totals = self.totals
        return Sample(
            at=self.at,
            output_per_s=totals.output_per_s,
            input_per_s=totals.input_per_s,
            in_flight=totals.in_flight,
            queued=totals.queued,
            ttft_p95_s=totals.ttft_p95_s,
            errors_per_min=totals.errors_per_min,
            headroom=totals.headroom,
            clouds=self.clouds,
            load={name: load for load, name in busiest},
        )


class Rate(NamedTuple):
    """Speed of one site in tokens a second."""

    output_per_s: float
    input_per_s: float


class Rates:
    """Computes each site's tokens a second from the differences of its totals over the last seconds."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[str, float, int, int]]] = {}

    def observe(self, sites: Sequence[Site], now_s: float) -> dict[str, Rate]:
        self._seen = {site.name: self._seen.get(site.name, deque(maxlen=30)) for site in sites}
        return {site.name: self._rate(site, now_s) for site in sites}

    def _rate(self, site: Site, now_s: float) -> Rate:
        """Return the rate. A restarted site counts from zero again, so its older totals are dropped."""
        seen, load, boot_id = self._seen[site.name], site.load, site.identity.boot_id
        if site.state is SiteState.DOWN or load.seq == 0:
            seen.clear()
            return Rate(0.0, 0.0)
        if seen and (seen[-1][0] != boot_id or load.tokens_total < seen[-1][2]):
            seen.clear()
        seen.append((boot_id, now_s, load.tokens_total, load.prompt_tokens_total))
        while len(seen) > 2 and seen[1][1] <= now_s - RATE_WINDOW_S:
            seen.popleft()
        _, then_s, output, prompt = seen[0]
        passed_s = max(1e-9, now_s - then_s)
        if len(seen) == 1:
            return Rate(0.0, 0.0)
        return Rate(
            round((load.tokens_total - output) / passed_s, 2),
            round((load.prompt_tokens_total - prompt) / passed_s, 2),
        )


def shown_state(site: Site, now_s: float) -> SiteState:
    """Return the state to display: stale if the figures are old, since the load is unknown then."""
    silent = now_s - site.load.received_s > STALE_SHOWN_AFTER_S + site.load.quiet_s
    return SiteState.STALE if silent and site.state is not SiteState.DOWN else site.state


def view(
    site: Site,
    rate: Rate,
    waits: SiteWaits,
    all_output_per_s: float,
    now_s: float,
    *,
    certificate_until: float,
) -> SiteView:
    identity, load = site.identity, site.load
    outstanding, capacity = outstanding_tokens(site), capacity_tokens(site)
    kv, prices = kv_tokens(site), prices_of(identity, load)
    down = site.state is SiteState.DOWN
    return SiteView(
        name=site.name,
        cloud=identity.cloud,
        region=identity.region,
        state=shown_state(site, now_s),
        models=sorted(identity.models),
        model_count=len(identity.models),
        asleep=sum([each.state is not ModelState.READY for each in identity.models.values()]),
        own_bytes=sum(
            [each.own_bytes for each in identity.models.values() if each.state is ModelState.READY]
        ),
        pinned_off=sorted(site.pinned_off),
        slots=identity.slots,
        running=load.running,
        pending=load.pending + site.credit.requests,
        outstanding_tokens=round(outstanding),
        capacity_tokens=round(capacity),
        load=round(outstanding / capacity, 4) if capacity > 0 and not down else None,
        tokens_per_s=round(load.tokens_per_s, 1),
        output_per_s=rate.output_per_s,
        input_per_s=rate.input_per_s,
        share=_share(rate, all_output_per_s),
        weight=round(site.weight * 100, 1),
        kv_used=round(1 - load.kv_free_tokens / kv, 4) if kv and not down else None,
        report_age_s=_report_age_s(site, now_s),
        ttft_p95_s=waits.ttft_p95_s,
        itl_p95_s=waits.itl_p95_s,
        errors_per_min=waits.errors_per_min,
        cached_share=round(waits.cached_tokens / waits.prompt_tokens, 4) if waits.prompt_tokens else None,
        input_usd_per_mtok=round(prices.input_usd_per_mtok, 4),
        output_usd_per_mtok=round(prices.output_usd_per_mtok, 4),
        pool=identity.pool,
        certificate_until=certificate_until if certificate_until > 0 else None,
        devices=list(load.devices),
        training=0 if down else load.training,
    )


def no_certificate(site: str) -> float:
    """Return -inf: no certificate was issued to any site."""
    return float("-inf")


class _Seen(NamedTuple):
    """A view, and all that it was built from but the time and the other sites."""

    site: Site
    rate: Rate
    waits: SiteWaits
    view: SiteView


class SiteViews:
    """Builds the views of all sites. Of a site of which nothing is new, only what time changes is."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def build(
        self,
        sites: Sequence[Site],
        rates: Mapping[str, Rate],
        waits: Mapping[str, SiteWaits],
        now_s: float,
        certificate_until: Callable[[str], float] = no_certificate,
    ) -> list[SiteView]:
        output_per_s = sum(rate.output_per_s for rate in rates.values())
        seen = {}
        for site in sites:
            name = site.name
            rate, site_waits = rates[name], waits.get(name, NO_WAITS)
            until = certificate_until(name)
            known = self._seen.get(name)
            if known is not None and known[:3] == (site, rate, site_waits):
                shown = msgspec.structs.replace(
                    known.view,
                    state=shown_state(site, now_s),
                    share=_share(rate, output_per_s),
                    report_age_s=_report_age_s(site, now_s),
                    certificate_until=until if until > 0 else None,
                )
            else:
                shown = view(site, rate, site_waits, output_per_s, now_s, certificate_until=until)
            seen[name] = _Seen(site, rate, site_waits, shown)
        self._seen = seen
        return [each.view for each in seen.values()]


def _share(rate: Rate, all_output_per_s: float) -> float:
    return round(rate.output_per_s / all_output_per_s, 4) if all_output_per_s else 0.0


def _report_age_s(site: Site, now_s: float) -> float:
    return round(max(0.0, now_s - site.load.received_s), 2)


def totals(sites: Sequence[SiteView], failed_per_min: float, ended_per_min: float) -> Totals:
    worst = max(sites, key=lambda site: site.ttft_p95_s or -1.0, default=None)
    return Totals(
        output_per_s=round(sum(site.output_per_s for site in sites), 2),
        input_per_s=round(sum(site.input_per_s for site in sites), 2),
        in_flight=sum(site.running + site.pending for site in sites),
        queued=sum(site.pending for site in sites),
        ttft_p95_s=worst.ttft_p95_s if worst else None,
        ttft_site=worst.name if worst and worst.ttft_p95_s is not None else "",
        errors_per_min=failed_per_min,
        ended_per_min=ended_per_min,
        headroom=headroom(sites),
    )


def headroom(sites: Sequence[SiteView]) -> float | None:
    """Return the free part of the capacity of all sites that accept work; None if unmeasured."""
    taking = [site for site in sites if site.taking]
    capacity = sum(site.capacity_tokens for site in taking)
    if not capacity:
        return None
    return round(max(0.0, 1 - sum(site.outstanding_tokens for site in taking) / capacity), 4)


def by_cloud(sites: Sequence[SiteView]) -> dict[str, float]:
    found: dict[str, float] = {}
    for site in sites:
        found[site.cloud] = round(found.get(site.cloud, 0.0) + site.output_per_s, 2)
    return found
