"""Predict the effect of an act in numbers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from gateway.domain import SiteState
from gateway.operator_orders import Action, Verb
from gateway.telemetry.metrics import DRAIN_TARGET_S
from gateway.telemetry.snapshot import SiteView
from gateway.wording import refused_models

TIGHT = 0.15


@dataclass(frozen=True, slots=True)
class Share:
    """Expected fraction of new queries at a site, by weight and measured speed."""

    site: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Preview:
    """Predicted effect. `capacity_left` and `load` are fractions of today's capacity; None if unmeasured.

    `left` is the number of queries at the site, which would finish in `empty_in_s` at its measured speed.
    """

    text: str
    warnings: list[str]
    capacity_left: float | None
    load: float | None
    left: int
    empty_in_s: float | None
    refused_models: list[str]
    shares: list[Share]


def preview(action: Action, sites: Sequence[SiteView]) -> Preview:
    """Predict the effect of an act on a listed site."""
    site = next(each for each in sites if each.name == action.site)
    after = [applied(action, each) if each is site else each for each in sites]
    now_tokens = sum(each.capacity_tokens for each in sites if each.taking)
    left = load = None
    if now_tokens:
        left = sum(each.capacity_tokens for each in after if each.taking) / now_tokens
        load = sum(each.outstanding_tokens for each in sites if each.taking) / now_tokens
    refused = sorted(served(sites) - served(after))
    return Preview(
        text=_text(action, left, load),
        warnings=_warnings(left, load, refused),
        capacity_left=_round(left),
        load=_round(load),
        left=site.running + site.pending,
        empty_in_s=_round(site.load * DRAIN_TARGET_S if site.load is not None else None),
        refused_models=refused,
        shares=shares(sites, after),
    )


def applied(action: Action, site: SiteView) -> SiteView:
    """Return the site after the act.

    An order can hold back a ready site; it does not make a down site ready.
    """
    on_hold = site.state in (SiteState.DRAINING, SiteState.PAUSED)
    match action.verb:
        case Verb.DRAIN | Verb.PAUSE:
            verb_state = SiteState.PAUSED if action.verb is Verb.PAUSE else SiteState.DRAINING
            return replace(site, state=verb_state) if on_hold or site.state is SiteState.READY else site
        case Verb.RESUME:
            return replace(site, state=SiteState.READY) if on_hold else site
        case Verb.WEIGHT:
            return replace(site, weight=action.weight)
        case Verb.PIN_OFF:
            return replace(site, pinned_off=[*site.pinned_off, action.model])
        case Verb.UNPIN:
            return replace(site, pinned_off=[name for name in site.pinned_off if name != action.model])


def served(sites: Sequence[SiteView]) -> set[str]:
    """Return the models that any site accepts queries for."""
    return {model for site in sites if site.taking for model in set(site.models) - set(site.pinned_off)}


def shares(before: Sequence[SiteView], after: Sequence[SiteView]) -> list[Share]:
    """Return the expected shares of all sites that get queries before or after the act."""
    return [
        Share(site.name, was, will)
        for site, was, will in zip(before, _expected(before), _expected(after), strict=True)
        if was or will
    ]


def _expected(sites: Sequence[SiteView]) -> list[float]:
    weights = [site.weight * (site.capacity_tokens or 1.0) if site.taking else 0.0 for site in sites]
    total = sum(weights) or 1.0
    return [round(each / total, 4) for each in weights]


def _text(action: Action, left: float | None, load: float | None) -> str:
    act = f"{action.verb.value} {action.site}"
    if left is None or load is None:
        return f"{act}: no site has measured its speed yet, so what it costs is unknown."
    if left == 1:
        return f"{act} leaves capacity as it is; current load is {load:.0%} of it."
    gives = "leaves" if left < 1 else "gives"
    return f"{act} {gives} {left:.0%} of today's capacity; current load is {load:.0%} of that."


def _warnings(left: float | None, load: float | None, refused: Sequence[str]) -> list[str]:
    names = refused_models(refused)
    warnings = [f"No other site can serve {names} will be refused (503)."] if refused else []
    if left is None or load is None or left >= 1:
        return warnings
    if load > left:
        warnings.append(
            f"The load of {load:.0%} does not fit into {left:.0%}: expect waiting and refusals (503)."
        )
    elif left - load < TIGHT:
        warnings.append(f"Only {left - load:.0%} of today's capacity would be free.")
    return warnings


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
