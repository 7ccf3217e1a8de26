"""What is in use of every quota here: reserve, top up, settle, all in memory. Does no I/O.

Who leases the slices from the database is `leases.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.domain import Caller
from gateway.errors import AboveQuota, BudgetSpent, Overloaded, TooMany
from gateway.quotas.limits import WINDOW_S, Claim, Grant, Kind, LimitId, Scope
from gateway.quotas.meter import Meter, meter_of
from gateway.quotas.shares import STANDING_PARTS

TOP_UP_TOKENS = 64
OVERDRAFT = 0.05
"""The part of a slice by which answers that have begun may exceed it before they are cut."""
AHEAD = 1.25
"""A slice wants this much of what is in use, so that it grows before it is full."""


class Full(Exception):
    """What is asked does not fit the slice held here. `elsewhere`: the quota as a whole may have room."""

    def __init__(self, held: Held, refusal: TooMany, *, elsewhere: bool) -> None:
        super().__init__(refusal.message)
        self.held = held
        self.refusal = refusal
        self.elsewhere = elsewhere


@dataclass(slots=True, eq=False)
class Held:
    """One limit and the slice of it that this replica holds. `written` is what the database has of it.

    `fair`: others have a right to what this slice wanted beyond its size when it was looked at last.
    """

    id: LimitId
    limit: int
    meter: Meter
    ceiling: int = 0
    written: int = -1
    written_used: int = 0
    elsewhere: int = 0
    unmet: int = 0
    fair: bool = False

    def room(self, now: float) -> int:
        return self.ceiling - self.meter.used(now)


@dataclass(slots=True, eq=False)
class Hold:
    """What one query holds: of every limit that binds it, one request, one place, and these tokens."""

    bound: tuple[Held, ...] = ()
    parts: list[tuple[float, int]] = field(default_factory=list)
    tokens: int = 0  # of all parts
    opened_at: float = 0.0
    settled: bool = False


class Shown(NamedTuple):
    """The tightest limit of one kind, for people and clients: of the quota as a whole, as far as is known."""

    limit: int
    remaining: int
    reset_s: float


class Quotas:
    def __init__(
        self,
        *,
        lapse: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`lapse`: whether the leases have run out and are not to be trusted; `clock` tells unix time."""
        self.replicas = 1
        self._lapse = lapse
        self._clock = clock
        self._held: dict[LimitId, Held] = {}
        self._bound: dict[tuple[Scope, str], tuple[Held, ...]] = {}

    # ---- a query

    def open(self, caller: Caller, prompt_tokens: int) -> Hold:
        """Reserve one request, one place and the prompt. Raises Full, or Overloaded when leases lapsed."""
        hold = Hold(self._binding(caller), opened_at=self._clock())
        if hold.bound and self._lapse():
            raise Overloaded("the database is away and the lease of this caller's quota has run out")
        self._take(hold, prompt_tokens, opening=True)
        return hold

    def reserve(self, hold: Hold, tokens: int) -> None:
        """Reserve what the answer will probably take, as far as a replica can have it. Raises Full."""
        even = [each.limit // self.replicas for each in hold.bound if each.id.kind is Kind.TOKENS]
        self._take(hold, min([tokens, *(max(0, most - hold.tokens) for most in even)]))

    def covers(self, hold: Hold, tokens: int) -> bool:
        """Whether the reservation covers this many, topped up where that is possible."""
        missing = tokens - hold.tokens
        if missing <= 0 or not hold.bound:
            return True
        now = self._clock()
        counted = [each for each in hold.bound if each.id.kind.counts_tokens]
        room = min((each.room(now) + int(OVERDRAFT * each.ceiling) for each in counted), default=missing)
        if room < missing:
            for each in counted:
                each.unmet += missing
            return False
        self._add(hold, min(room, max(missing, TOP_UP_TOKENS)), now)
        return True

    def settle(self, hold: Hold, tokens: int, *, refused: bool = False) -> None:
        """The query has ended: it took so many tokens. One that was refused took nothing. Once."""
        if hold.settled:
            return
        hold.settled, now = True, self._clock()
        reserved = hold.tokens
        if tokens > reserved:
            self._add(hold, tokens - reserved, now)
        self._give_back(hold, reserved - tokens, now)
        for each in hold.bound:
            if each.id.kind is Kind.QUERIES or (refused and each.id.kind is Kind.REQUESTS):
                each.meter.give_back(1, hold.opened_at, now)

    def _take(self, hold: Hold, tokens: int, *, opening: bool = False) -> None:
        now = self._clock()
        for each in hold.bound:
            need = tokens if each.id.kind.counts_tokens else int(opening)
            if need > each.room(now):
                each.unmet += need
                raise self._full(each, need, now)
        self._add(hold, tokens, now)
        for each in hold.bound:
            if opening and not each.id.kind.counts_tokens:
                each.meter.take(1, now)

    def _add(self, hold: Hold, tokens: int, now: float) -> None:
        hold.parts.append((now, tokens))
        hold.tokens += tokens
        for each in hold.bound:
            if each.id.kind.counts_tokens:
                each.meter.take(tokens, now)

    def _give_back(self, hold: Hold, tokens: int, now: float) -> None:
        """What was reserved last was needed least."""
        while tokens > 0:
            taken_at, amount = hold.parts.pop()
            back = min(tokens, amount)
            tokens -= back
            hold.tokens -= back
            for each in hold.bound:
                if each.id.kind.counts_tokens:
                    each.meter.give_back(back, taken_at, now)

    def _full(self, held: Held, need: int, now: float) -> Full:
        used = held.meter.used(now)
        elsewhere = held.limit - held.elsewhere - used >= need and held.ceiling < held.limit and not held.fair
        return Full(held, refusal_of(held, need, now), elsewhere=elsewhere)

    # ---- what is shown

    def shown(self, caller: Caller, kind: Kind) -> Shown | None:
        """The one with the least part left of the caller's limits of this kind."""
        now = self._clock()
        found = [_shown(each, now) for each in self._binding(caller) if each.id.kind is kind]
        return min(found, key=lambda each: each.remaining / max(1, each.limit), default=None)

    def in_use(self, limit_id: LimitId) -> int:
        """Here and elsewhere, as far as is known."""
        held = self._held.get(limit_id)
        return 0 if held is None else held.meter.used(self._clock()) + held.elsewhere

    def _binding(self, caller: Caller) -> tuple[Held, ...]:
        if not self._bound:
            return ()
        of_key = self._bound.get((Scope.KEY, caller.quota_id), ())
        return (*of_key, *self._bound.get((Scope.TENANT, caller.tenant), ()))

    # ---- leasing

    def learn(self, limits: Mapping[LimitId, int]) -> None:
        """The limits as they are now. What is in use of those that stay is kept."""
        self._held = {
            limit_id: self._held.get(limit_id) or Held(limit_id, limit, meter_of(limit_id.kind))
            for limit_id, limit in limits.items()
        }
        bound: dict[tuple[Scope, str], tuple[Held, ...]] = {}
        for limit_id, held in self._held.items():
            held.limit = limits[limit_id]
            held.written_used = -1  # look at it again
            subject = (limit_id.scope, limit_id.subject)
            bound[subject] = (*bound.get(subject, ()), held)
        self._bound = bound

    def restless(self) -> Iterator[LimitId]:
        """Those whose slice is not written down as it is, or may have to change."""
        now = self._clock()
        for limit_id, held in self._held.items():
            if held.unmet or held.ceiling != held.written or held.meter.used(now) != held.written_used:
                yield limit_id

    def claim(self, limit_id: LimitId) -> Claim | None:
        held, now = self._held.get(limit_id), self._clock()
        if held is None:
            return None
        used = held.meter.used(now)
        standing = held.limit // (STANDING_PARTS * self.replicas)
        want = min(held.limit, max(standing, int(used * AHEAD) + held.unmet))
        return Claim(held.ceiling, used, want, held.meter.period(now))

    def take_over(self, limit_id: LimitId, amount: int, used: int, used_at: float) -> None:
        """A slice, and what is in use of it, of the process before this one."""
        held = self._held.get(limit_id)
        if held is not None and held.written < 0 and limit_id.kind is not Kind.QUERIES:
            held.ceiling, now = amount, self._clock()
            if limit_id.kind is Kind.MONTH or used_at > now - WINDOW_S:
                held.meter.take(used, min(used_at, now))

    def granted(self, limit_id: LimitId, claim: Claim, grant: Grant) -> bool:
        """Take what is mine, and come down to what I should have: lower here first, then in the database.

        Whether there is now something to give back there.
        """
        held = self._held.get(limit_id)
        if held is None:
            return False
        used = held.meter.used(self._clock())
        held.ceiling = max(used, min(grant.target, grant.amount))
        held.ceiling = min(held.ceiling, grant.amount)
        held.written, held.written_used, held.elsewhere = grant.amount, claim.used, grant.elsewhere
        held.unmet, held.fair = 0, grant.target <= grant.amount < claim.want
        return held.ceiling < held.written

    def forget_slices(self) -> None:
        """Another process goes by this replica's name: what was leased by that name is its own now."""
        for held in self._held.values():
            held.ceiling, held.written = 0, -1


def refusal_of(held: Held, need: int, now: float) -> TooMany:
    """Names the quota and how long to wait, as far as is known here."""
    quota = f"the quota of {held.limit:,} {held.id.kind.phrase} of {held.id}"
    if need > held.limit:
        return AboveQuota(f"this query alone needs {need:,}, more than {quota}: make it smaller")
    short = need - held.room(now)
    wait_s = held.meter.until_less(short, now)
    if held.id.kind is Kind.MONTH:
        return BudgetSpent(f"{quota} is spent; the next month begins in {wait_s / 86_400:.1f} days")
    return TooMany(f"{quota} is used up; try again in {wait_s:.1f} s", retry_after_s=wait_s)


def _shown(held: Held, now: float) -> Shown:
    used = held.meter.used(now)
    remaining = max(0, held.limit - used - held.elsewhere)
    return Shown(held.limit, remaining, held.meter.until_less(used, now) if used else 0.0)
