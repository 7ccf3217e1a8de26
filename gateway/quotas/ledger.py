"""The usage of every quota on this replica: reserve, top up and settle, all in memory. Does no I/O.

Does not lease the slices from the database: `leases.py` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.domain import Caller
from gateway.errors import AboveQuota, BadRequest, BudgetSpent, Overloaded, TooMany
from gateway.prices import dollars
from gateway.quotas.limits import WINDOW_S, Claim, Grant, Kind, LimitId, Scope, Unit
from gateway.quotas.meter import Meter, meter_of

MEASURED = (Unit.TOKENS, Unit.NANO_USD)
TOP_UP_TOKENS = 64
OVERDRAFT = 0.05
"""The part of a slice by which answers that have begun may exceed it before they are cut."""
FRESH_S = 1.0
"""Time for which the last round's news of other replicas counts: two rounds."""
LIMITS_PER_TURN = 1_000
"""Limits that are replaced before the event loop turns to others: some milliseconds."""
RETRY_AFTER_S = 1.0
"""Time until a slice that is too small may have grown."""


class SliceFull(Exception):
    """A reservation does not fit the slice leased here. `may_grow`: the slice could become large enough."""

    def __init__(self, refusal: TooMany, *, may_grow: bool) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.may_grow = may_grow


@dataclass(slots=True, eq=False)
class LeasedLimit:
    """One limit and the slice of it that this replica has leased.

    Of the slice, `ceiling` may be used; `written` and `written_used` are the figures in the database;
    `written` is -1 where they are to be written anew. `elsewhere` is in use at other replicas, `reachable`
    the largest slice that they leave, both as of `settled_at` in the month `settled_period`. `unmet` did not
    fit since then: what waits is counted anew after each round. `asked`: the want in the database includes
    what did not fit. `reserved` is the part of the use here that queries in progress may give back.
    """

    id: LimitId
    limit: int
    meter: Meter
    unit: Unit = field(init=False)  # of its kind, at hand: each query asks dozens of times
    ceiling: int = 0
    written: int = -1
    written_used: int = 0
    elsewhere: int = 0
    reachable: int = 0
    settled_at: float = float("-inf")
    settled_period: int = 0
    unmet: int = 0
    asked: bool = False
    reserved: int = 0
    active: bool = False  # looked at in each round

    def __post_init__(self) -> None:
        self.unit = self.id.kind.unit

    def room(self, now: float) -> int:
        return self.ceiling - self.meter.used(now)

    def used_anywhere(self, now: float) -> int:
        """Return the usage at all replicas. News of the others is forgotten when it can't count any more."""
        if self.id.kind.is_monthly:
            counts = self.meter.period(now) == self.settled_period
        else:
            counts = now - self.settled_at < WINDOW_S
        return self.meter.used(now) + (self.elsewhere if counts else 0)


@dataclass(slots=True, eq=False)
class Held:
    """What one query holds of one unit: parts, each with the time at which it was taken, and their sum."""

    parts: list[tuple[float, int]] = field(default_factory=list)
    total: int = 0


@dataclass(slots=True, eq=False)
class Reservation:
    """The share of one query in every limit that binds it: one request, one place, tokens and money."""

    bound: tuple[LeasedLimit, ...] = ()
    held: Mapping[Unit, Held] = field(default_factory=lambda: {unit: Held() for unit in MEASURED})
    opened_at: float = 0.0
    settled: bool = False

    @property
    def tokens(self) -> int:
        return self.held[Unit.TOKENS].total

    def counts(self, unit: Unit) -> bool:
        """Return whether a limit of this unit binds the query."""
        return any(each.unit is unit for each in self.bound)


class QuotaStatus(NamedTuple):
    """The tightest limit of one kind, for people and clients: of the quota as a whole, as far as is known."""

    limit: int
    remaining: int
    reset_s: float


class QuotaLedger:
    def __init__(
        self,
        *,
        lapsed: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        """`lapsed`: whether the leases have run out and are not to be trusted.

        `clock` is monotonic; `unix_time`, the same at all replicas, says which month it is.
        """
        self.replicas = 1
        self._lapsed = lapsed
        self._clock = clock
        self._unix_time = unix_time
        self._limits: dict[LimitId, LeasedLimit] = {}
        self._active: list[LeasedLimit] = []  # those in use, or that differ from the database
        self._bound: dict[tuple[Scope, str], tuple[LeasedLimit, ...]] = {}

    # ---- a query

    def open(self, caller: Caller, prompt_tokens: int) -> Reservation:
        """Reserve one request, one place and the prompt. Raises SliceFull; Overloaded if leases lapsed."""
        reservation = Reservation(self._binding(caller), opened_at=self._clock())
        if reservation.bound and self._lapsed():
            raise Overloaded("the database is away and the lease of this caller's quota has run out")
        self._take(reservation, {Unit.QUERIES: 1, Unit.TOKENS: prompt_tokens, Unit.NANO_USD: 0})
        return reservation

    def check_together(self, caller: Caller, queries: int) -> None:
        """Raise BadRequest if one request asks for more queries at once than may ever run at once."""
        for each in self._binding(caller) if queries > 1 else ():
            if each.id.kind is Kind.QUERIES and 0 < each.limit < queries:
                quota = f"the quota of {each.id.kind.phrase(each.limit)} of {each.id}"
                raise BadRequest(f"{queries} prompts in one request are more than {quota}", param="prompt")

    def reserve(self, reservation: Reservation, tokens: int, nano_usd: int = 0) -> None:
        """Reserve the expected length of the answer, at most an even share of a replica, and its cost with
        the prompt. Raises SliceFull.
        """
        even = [each.limit // self.replicas for each in reservation.bound if each.id.kind is Kind.TOKENS]
        tokens = min([tokens, *(max(0, share - reservation.tokens) for share in even)])
        self._take(reservation, {Unit.QUERIES: 0, Unit.TOKENS: tokens, Unit.NANO_USD: nano_usd})

    def cover(self, reservation: Reservation, tokens: int, nano_usd: int = 0) -> None:
        """Top the reservation up to this many tokens and this cost at least. Raises SliceFull."""
        held, now = reservation.held, self._clock()
        missing = {
            Unit.TOKENS: tokens - held[Unit.TOKENS].total,
            Unit.NANO_USD: nano_usd - held[Unit.NANO_USD].total,
        }
        if max(missing.values()) <= 0:
            return
        short = [each for each in reservation.bound if missing.get(each.unit, 0) > 0]
        free = [(each, each.room(now) + int(OVERDRAFT * each.ceiling)) for each in short]
        needs = [(each, missing[each.unit], room) for each, room in free]
        if any(room < need for _, need, room in needs):
            raise self._full(needs, now)
        for unit, need in missing.items():
            if need > 0:
                least = TOP_UP_TOKENS if unit is Unit.TOKENS else need
                rooms = (room for each, room in free if each.unit is unit)
                self._add(reservation, unit, min([max(need, least), *rooms]), now)

    def settle(
        self, reservation: Reservation, tokens: int, nano_usd: int = 0, *, refused: bool = False
    ) -> None:
        """Replace the reservation by the tokens used and their cost, at the end of the query; a refused one
        counts as no request.

        Does nothing the second time.
        """
        if reservation.settled:
            return
        reservation.settled, now = True, self._clock()
        for unit, used in ((Unit.TOKENS, tokens), (Unit.NANO_USD, nano_usd)):
            reserved = reservation.held[unit].total
            if used > reserved:
                self._add(reservation, unit, used - reserved, now)
            self._give_back(reservation, unit, reserved - used, now)
        for each in reservation.bound:
            if each.unit is not Unit.QUERIES:
                each.reserved -= reservation.held[each.unit].total
            if each.id.kind is Kind.QUERIES or (refused and each.id.kind is Kind.REQUESTS):
                each.meter.give_back(1, reservation.opened_at, now)

    def charge(self, caller: Caller, tokens: int, nano_usd: int) -> TooMany | None:
        """Count tokens that were used outside of any query, and their cost, against the month alone.

        Returns the refusal of the first quota that is spent by now, whatever queries in progress give back of
        what they have reserved here; None if there is none.
        """
        now, amounts = self._clock(), {Unit.TOKENS: tokens, Unit.NANO_USD: nano_usd}
        monthly = [each for each in self._binding(caller) if each.id.kind.is_monthly]
        for each in monthly:
            each.meter.take(amounts[each.unit], now)
            self._activate(each)
        spent = [each for each in monthly if each.used_anywhere(now) - each.reserved >= each.limit]
        return refusal_of(spent[0], 0, now, used_up=True) if spent else None

    def _take(self, reservation: Reservation, amounts: Mapping[Unit, int]) -> None:
        now = self._clock()
        needs = [(each, amounts[each.unit], each.room(now)) for each in reservation.bound]
        for _, need, room in needs:
            if need > room:
                raise self._full(needs, now)
        for unit in MEASURED:
            if amounts[unit]:
                self._add(reservation, unit, amounts[unit], now)
        if amounts[Unit.QUERIES]:
            for each in reservation.bound:
                if each.unit is Unit.QUERIES:
                    each.meter.take(1, now)
                    self._activate(each)

    def _add(self, reservation: Reservation, unit: Unit, amount: int, now: float) -> None:
        held = reservation.held[unit]
        held.parts.append((now, amount))
        held.total += amount
        for each in reservation.bound:
            if each.unit is unit:
                each.meter.take(amount, now)
                each.reserved += amount
                self._activate(each)

    def _give_back(self, reservation: Reservation, unit: Unit, amount: int, now: float) -> None:
        """Return a part, what was reserved last first: it was needed least."""
        held = reservation.held[unit]
        while amount > 0:
            taken_at, part = held.parts.pop()
            back = min(amount, part)
            amount -= back
            held.total -= back
            for each in reservation.bound:
                if each.unit is unit:
                    each.meter.give_back(back, taken_at, now)
                    each.reserved -= back

    def _full(self, needs: Sequence[tuple[LeasedLimit, int, int]], now: float) -> SliceFull:
        """Note what does not fit, in all limits alike: none is to shrink while the query waits for another.

        `needs`: limits, with what is needed and what is free. Returns the error for the first that is full.
        """
        for each, need, _ in needs:
            each.unmet += need
            self._activate(each)
        leased, need, _ = next(full for full in needs if full[1] > full[2])
        wanted = leased.meter.used(now) + need
        fresh = now - leased.settled_at <= FRESH_S
        may_grow = leased.ceiling < leased.limit >= wanted and (not fresh or wanted <= leased.reachable)
        kept = wanted - leased.reserved if leased.id.kind.is_monthly else wanted
        used_up = kept > leased.limit - (leased.elsewhere if fresh else 0)
        return SliceFull(refusal_of(leased, need, now, used_up=used_up), may_grow=may_grow)

    # ---- shown to people and clients

    def status(self, caller: Caller, kind: Kind) -> QuotaStatus | None:
        """Return the limit of this kind with the least part left, of those that bind the caller."""
        found = [each for each in self._binding(caller) if each.id.kind is kind]
        if not found:
            return None
        now = self._clock()
        if len(found) == 1:
            return _status(found[0], now)
        return min(
            [_status(each, now) for each in found], key=lambda each: each.remaining / max(1, each.limit)
        )

    def in_use(self, limit_id: LimitId) -> int:
        """Return the usage here and elsewhere, as far as is known."""
        leased = self._limits.get(limit_id)
        return 0 if leased is None else leased.used_anywhere(self._clock())

    def _binding(self, caller: Caller) -> tuple[LeasedLimit, ...]:
        if not self._bound:
            return ()
        of_key = self._bound.get((Scope.KEY, caller.quota_id), ())
        return (*of_key, *self._bound.get((Scope.TENANT, caller.tenant), ()))

    # ---- leasing

    def set_limits(self, limits: Mapping[LimitId, int]) -> None:
        """Replace the limits. The usage of those that stay is kept; those that change are settled next."""
        for _ in self.replace_limits(limits):
            pass

    def replace_limits(self, limits: Mapping[LimitId, int]) -> Iterator[None]:
        """Replace the limits, and yield after every LIMITS_PER_TURN of them."""
        for number, gone in enumerate([limit_id for limit_id in self._limits if limit_id not in limits], 1):
            self._bind(gone, without=self._limits.pop(gone))
            if number % LIMITS_PER_TURN == 0:
                yield
        for number, (limit_id, limit) in enumerate(limits.items(), 1):
            if number % LIMITS_PER_TURN == 0:
                yield
            leased = self._limits.get(limit_id)
            if leased is None:
                leased = LeasedLimit(limit_id, limit, meter_of(limit_id.kind, self._unix_time))
                self._limits[limit_id] = leased
                self._bind(limit_id, leased)
                self._activate(leased)
            elif leased.limit != limit:
                leased.limit, leased.written = limit, -1
                self._activate(leased)

    def _bind(self, limit_id: LimitId, *new: LeasedLimit, without: LeasedLimit | None = None) -> None:
        subject = (limit_id.scope, limit_id.subject)
        bound = tuple(each for each in self._bound.pop(subject, ()) if each is not without) + new
        if bound:
            self._bound[subject] = bound

    def unsettled(self) -> list[LimitId]:
        """Return the limits whose slice differs from the database, or may have to change."""
        now, active, found = self._clock(), self._active, list[LimitId]()
        self._active = []
        for leased in active:
            used, leased.active = leased.meter.used(now), False
            written = leased.ceiling == leased.written and used == leased.written_used
            settled = written and not (leased.unmet or leased.asked)
            if self._limits.get(leased.id) is leased and (used or not settled):
                self._activate(leased)
                if not settled:
                    found.append(leased.id)
        return found

    def _activate(self, leased: LeasedLimit) -> None:
        if not leased.active:
            leased.active = True
            self._active.append(leased)

    def claim(self, limit_id: LimitId) -> Claim | None:
        """Return what this replica asks of a limit, None if it is gone. Asks once for what did not fit."""
        leased, now = self._limits.get(limit_id), self._clock()
        if leased is None:
            return None
        self._activate(leased)
        used = leased.meter.used(now)
        want = min(leased.limit, used + leased.unmet)
        leased.asked, leased.unmet = leased.unmet > 0, 0
        return Claim(leased.ceiling, used, want, leased.meter.period(now))

    def restore(self, limit_id: LimitId, amount: int, used: int, age_s: float) -> None:
        """Take over a slice, and its usage of `age_s` seconds ago, from the process before this one."""
        leased = self._limits.get(limit_id)
        if leased is not None and leased.written < 0 and limit_id.kind is not Kind.QUERIES:
            leased.ceiling = amount
            if limit_id.kind.is_monthly or age_s < WINDOW_S:
                leased.meter.take(used, self._clock() - max(0.0, age_s))

    def apply_grant(self, limit_id: LimitId, claim: Claim, grant: Grant) -> bool:
        """Take the granted slice, and shrink towards its target: first here, then in the database.

        Return whether there is now something to give back in the database.
        """
        leased = self._limits.get(limit_id)
        if leased is None:
            return False
        now = self._clock()
        leased.ceiling = min(grant.amount, max(leased.meter.used(now), grant.target))
        leased.written, leased.written_used = grant.amount, claim.used
        leased.elsewhere, leased.reachable, leased.settled_at = grant.elsewhere, grant.reachable, now
        leased.settled_period = claim.period
        return leased.ceiling < leased.written

    def write_anew(self) -> None:
        """Settle every slice in the next round: what the database has of them is of another time."""
        for leased in self._limits.values():
            if leased.written >= 0:
                leased.written = -1
                self._activate(leased)

    def forget_slices(self) -> None:
        """Drop every slice, and of a month what the database counts: both are another's now, that of a
        process with this replica's name or of the replicas that are gone.
        """
        now = self._clock()
        for leased in self._limits.values():
            if leased.id.kind.is_monthly:
                leased.meter.give_back(leased.written_used, leased.settled_at, now)
            leased.ceiling, leased.written, leased.written_used = 0, -1, 0
            self._activate(leased)


def refusal_of(leased: LeasedLimit, need: int, now: float, *, used_up: bool) -> TooMany:
    """Return an error that names the quota and the time to wait, as far as is known here.

    `used_up`: the quota as a whole is, and not only the slice leased here.
    """
    kind = leased.id.kind
    quota = f"the quota of {kind.phrase(leased.limit)} of {leased.id}"
    if need > leased.limit == 0:
        return AboveQuota(f"{quota} allows nothing")
    if need > leased.limit:
        alone = dollars(need) if kind is Kind.BUDGET else f"{need:,}"
        return AboveQuota(f"this query alone needs {alone}, more than {quota}: make it smaller")
    if not used_up:
        return TooMany(
            f"{quota} is reserved by queries in progress or by replicas; try again in {RETRY_AFTER_S:g} s",
            retry_after_s=RETRY_AFTER_S,
        )
    short = need - leased.room(now)
    wait_s = leased.meter.until_less(short, now)
    if leased.id.kind.is_monthly:
        return BudgetSpent(f"{quota} is spent; the next month begins in {wait_s / 86_400:.1f} days")
    return TooMany(f"{quota} is used up; try again in {wait_s:.1f} s", retry_after_s=wait_s)


def _status(leased: LeasedLimit, now: float) -> QuotaStatus:
    used = leased.meter.used(now)
    remaining = max(0, leased.limit - leased.used_anywhere(now))
    return QuotaStatus(leased.limit, remaining, leased.meter.until_less(used, now) if used else 0.0)
