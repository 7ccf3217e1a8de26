"""Summarize the federation's state in one sentence: what is wrong, where, at what cost and when it clears."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.domain import SiteState
from gateway.telemetry.metrics import DRAIN_TARGET_S
from gateway.telemetry.snapshot import Banner, SiteView, Totals
from gateway.wording import MAX_NAMED, first_few, refused_models, several

HOT_LOAD = 0.9
CRITICAL_ERROR_SHARE = 0.05
NOTABLE_ERROR_SHARE = 0.01


def banner(sites: Sequence[SiteView], totals: Totals) -> Banner:
    """Return the level (calm, degraded or critical) and the sentence."""
    critical = _critical(sites, totals)
    degraded = _degraded(sites, totals)
    if critical or degraded:
        level = "critical" if critical else "degraded"
        parts = (*critical, *degraded, *_headroom(totals, "{:.0%} of the remaining capacity is free."))
        return Banner(level, f"{level.capitalize()}: {' '.join(parts)}")
    ready = several(sum(site.state is SiteState.READY for site in sites), "site")
    running = several(totals.in_flight, "query", "queries")
    parts = (f"{ready} ready", f"{running} in flight", *_headroom(totals, "{:.0%} of token capacity free"))
    return Banner("calm", f"All well: {', '.join(parts)}.")


def _headroom(totals: Totals, text: str) -> list[str]:
    return [] if totals.headroom is None else [text.format(totals.headroom)]


def _critical(sites: Sequence[SiteView], totals: Totals) -> list[str]:
    if not sites:
        return ["no site has joined, so every query is refused."]
    wanted = {model for site in sites for model in site.models}
    served = {model for site in sites if site.taking for model in set(site.models) - set(site.pinned_off)}
    lost = sorted(wanted - served)
    found = [f"no site can serve {refused_models(lost)} are refused."] if lost else []
    if totals.ended_per_min and totals.errors_per_min / totals.ended_per_min > CRITICAL_ERROR_SHARE:
        found.append(_errors_text(totals))
    return found


def _degraded(sites: Sequence[SiteView], totals: Totals) -> list[str]:
    found = []
    for state, text in (
        (SiteState.DOWN, "down"),
        (SiteState.STALE, "stale"),
        (SiteState.DRAINING, "draining"),
        (SiteState.PAUSED, "paused"),
        (SiteState.EJECTED, "ejected"),
    ):
        if named := [site for site in sites if site.state is state]:
            found.append(f"{_names(named)} {text}{_silence(named, state)}{_remaining(named, state)}.")
    hot = sorted((site for site in sites if site.taking), key=lambda site: -(site.load or 0.0))
    found += [_hot_text(site) for site in hot[:MAX_NAMED] if (site.load or 0.0) >= HOT_LOAD]
    share = totals.errors_per_min / totals.ended_per_min if totals.ended_per_min else 0.0
    if NOTABLE_ERROR_SHARE < share <= CRITICAL_ERROR_SHARE:
        found.append(_errors_text(totals))
    return found


def _hot_text(site: SiteView) -> str:
    work_s = (site.load or 0.0) * DRAIN_TARGET_S
    return (
        f"{site.name} at {site.load:.0%} of token capacity, {site.pending} queued; "
        f"worked off in {work_s:.0f} s if nothing more comes."
    )


def _silence(sites: Sequence[SiteView], state: SiteState) -> str:
    if state not in (SiteState.DOWN, SiteState.STALE):
        return ""
    longest_s = max(site.report_age_s for site in sites)
    return f", silent for {longest_s:.0f} s" if longest_s < 100 else f", silent for {longest_s / 60:.0f} min"


def _remaining(sites: Sequence[SiteView], state: SiteState) -> str:
    if state not in (SiteState.DRAINING, SiteState.PAUSED):
        return ""
    left = sum(site.running + site.pending for site in sites)
    work_s = max(site.load or 0.0 for site in sites) * DRAIN_TARGET_S
    return f", {left} left, empty in about {work_s:.0f} s" if left else ", empty"


def _errors_text(totals: Totals) -> str:
    ended = several(totals.ended_per_min, "query", "queries")
    return f"{totals.errors_per_min:.0f} of {ended} failed in the last minute."


def _names(sites: Sequence[SiteView]) -> str:
    return first_few([site.name for site in sites])
