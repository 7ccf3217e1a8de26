"""What operators order of sites, and what that makes of a site. Pure values; times are unix seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from gateway.domain import SiteState, Standing

SERVICE, WEIGHT, MODEL = "service", "weight", "model "
"""Subjects of orders: a site has at most one order of each, and `MODEL` takes a model's name behind it."""
REASON_CHARS = 300


class Verb(StrEnum):
    DRAIN = "drain"
    PAUSE = "pause"
    RESUME = "resume"
    WEIGHT = "weight"
    PIN_OFF = "pin-off"
    UNPIN = "unpin"


@dataclass(frozen=True, slots=True)
class Action:
    """One act of an operator. `weight` is a percentage; `for_s` 0 means until somebody says otherwise;
    `within_s` is how long a pause leaves what runs at its site before it moves.
    """

    verb: Verb
    site: str
    reason: str
    weight: float = 100.0
    model: str = ""
    for_s: float = 0.0
    within_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Order:
    """What stands until it is lifted or `until_at` has passed."""

    site: str
    subject: str
    value: str
    who: str
    reason: str
    given_at: float
    until_at: float | None = None
    move_at: float | None = None

    def stands(self, now: float) -> bool:
        return self.until_at is None or now < self.until_at


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the audit: who did what to which site, why, what it was before and is now."""

    id: str
    at: float
    who: str
    site: str
    action: str
    reason: str
    before: str
    after: str
    until_at: float | None = None


def reason_of(text: str) -> str:
    """As it is kept and shown: one line of so many characters, and nothing that a database can't keep."""
    return "".join(filter(str.isprintable, " ".join(text.split())))[:REASON_CHARS].strip()


def subject_of(action: Action) -> str:
    if action.verb is Verb.WEIGHT:
        return WEIGHT
    return MODEL + action.model if action.verb in (Verb.PIN_OFF, Verb.UNPIN) else SERVICE


def order_of(action: Action, who: str, now: float) -> Order | None:
    """The order that an act puts in the place of the one on its subject; None where it only lifts that."""
    if action.verb in (Verb.RESUME, Verb.UNPIN) or (action.verb is Verb.WEIGHT and action.weight >= 100):
        return None
    values = {Verb.WEIGHT: f"{action.weight:g}", Verb.PIN_OFF: "off"}
    return Order(
        site=action.site,
        subject=subject_of(action),
        value=values.get(action.verb, action.verb.value),
        who=who,
        reason=action.reason,
        given_at=now,
        until_at=now + action.for_s if action.for_s else None,
        move_at=now + action.within_s if action.verb is Verb.PAUSE else None,
    )


def standings(orders: Iterable[Order], now: float) -> dict[str, Standing]:
    """What all orders that stand now make of each site."""
    found: dict[str, Standing] = {}
    for order in orders:
        if order.stands(now):
            found[order.site] = _with(found.get(order.site, Standing()), order)
    return found


def _with(standing: Standing, order: Order) -> Standing:
    if order.subject == SERVICE:
        state = SiteState.PAUSED if order.value == Verb.PAUSE else SiteState.DRAINING
        return replace(standing, state=state)
    if order.subject == WEIGHT:
        return replace(standing, weight=float(order.value) / 100)
    return replace(standing, pinned_off=standing.pinned_off | {order.subject.removeprefix(MODEL)})
