"""Operators' orders for sites, and the resulting standing of a site. Pure values; times are unix seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from gateway.domain import SiteState

SERVICE, WEIGHT, MODEL = "service", "weight", "model "
"""The subjects of orders. A site has at most one order per subject. A model's name follows `MODEL`."""
MAX_REASON_CHARS = 300


class Verb(StrEnum):
    DRAIN = "drain"
    PAUSE = "pause"
    RESUME = "resume"
    WEIGHT = "weight"
    PIN_OFF = "pin-off"
    UNPIN = "unpin"


@dataclass(frozen=True, slots=True)
class Standing:
    """All orders for a site together. `state` is READY, DRAINING or PAUSED. The defaults mean no order."""

    state: SiteState = SiteState.READY
    weight: float = 1.0
    pinned_off: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Action:
    """One action of an operator. `weight` is a percentage. `for_s`: the duration in seconds; 0 means until
    another action lifts it. `within_s`: how long running queries stay at a paused site before they move.
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
    """An order, active until it is lifted or `until_at` has passed. Queries move at `move_at`, if set."""

    site: str
    subject: str
    value: str
    who: str
    reason: str
    given_at: float
    until_at: float | None = None
    move_at: float | None = None

    def is_active(self, now: float) -> bool:
        return self.until_at is None or now < self.until_at


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One entry of the audit log: who did what to which site and why, and the values before and after."""

    id: str
    at: float
    who: str
    site: str
    action: str
    reason: str
    before: str
    after: str
    until_at: float | None = None


def clean_reason(text: str) -> str:
    """Return the reason as it is stored and shown: one printable line of at most MAX_REASON_CHARS."""
    return "".join(filter(str.isprintable, " ".join(text.split())))[:MAX_REASON_CHARS].strip()


def subject_of(action: Action) -> str:
    if action.verb is Verb.WEIGHT:
        return WEIGHT
    return MODEL + action.model if action.verb in (Verb.PIN_OFF, Verb.UNPIN) else SERVICE


def order_of(action: Action, who: str, now: float) -> Order | None:
    """Return the order that replaces the one on the action's subject, None if the action only lifts it."""
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
    """Return the standing of every site that has an active order."""
    found: dict[str, Standing] = {}
    for order in orders:
        if order.is_active(now):
            found[order.site] = _apply(found.get(order.site, Standing()), order)
    return found


def _apply(standing: Standing, order: Order) -> Standing:
    if order.subject == SERVICE:
        state = SiteState.PAUSED if order.value == Verb.PAUSE else SiteState.DRAINING
        return replace(standing, state=state)
    if order.subject == WEIGHT:
        return replace(standing, weight=float(order.value) / 100)
    return replace(standing, pinned_off=standing.pinned_off | {order.subject.removeprefix(MODEL)})
