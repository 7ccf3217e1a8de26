"""The usage of every quota on this replica: reserve, top up and settle, all in memory. Does no I/O.

Does not lease the slices from the database: `leases.py` does.
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
HEADROOM = 1.25
"""A slice wants this much of what is in use, so that it grows before it is full."""


class SliceFull(Exception):
    """A reservation does not fit the slice leased here. `elsewhere`: the quota as a whole may have room."""

    def __init__(self, leased: LeasedLimit, refusal: TooMany, *, elsewhere: bool) -> None:
        super().__init__(refusal.message)
        self.leased = leased
        self.refusal = refusal
        self.elsewhere = elsewhere


@dataclass(slots=True, eq=False)
class LeasedLimit:
    """One limit and the slice of it that this replica has leased.

    Of the slice, `ceiling` may be used; `written` and `written_used` are the figures in the database, -1
    where they are to be written anew. `elsewhere` is in use at other replicas, `unmet` was refused since the
    last round. `fair`: in the last round, the other replicas had a right to what this slice wanted beyond its
    size.
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
class Reservation:
    """The share of one query in every limit that binds it: one request, one place, and these tokens."""

    bound: tuple[LeasedLimit, ...] = ()
    parts: list[tuple[float, int]] = field(default_factory=list)
    tokens: int = 0  # of all parts
    opened_at: float = 0.0
    settled: bool = False


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
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`lapsed`: whether the leases have run out and are not to be trusted. `clock` returns unix time."""
        self.replicas = 1
        self._lapsed = lapsed
        self._clock = clock
        self._limits: dict[LimitId, LeasedLimit] = {}
        self._bound: dict[tuple[Scope, str], tuple[LeasedLimit, ...]] = {}

    # ---- a query

    def open(self, caller: Caller, prompt_tokens: int) -> Reservation:
        """Reserve one request, one place and the prompt. Raises SliceFull; Overloaded if leases lapsed."""
        reservation = Reservation(self._binding(caller), opened_at=self._clock())
        if reservation.bound and self._lapsed():
            raise Overloaded("the database is away and the lease of this caller's quota has run out")
        self._take(reservation, prompt_tokens, opening=True)
        return reservation

    def reserve(self, reservation: Reservation, tokens: int) -> None:
        """Reserve the expected length of the answer, at most an even share of a replica. Raises SliceFull."""
        even = [each.limit // self.replicas for each in reservation.bound if each.id.kind is Kind.TOKENS]
        self._take(reservation, min([tokens, *(max(0, share - reservation.tokens) for share in even)]))

    def covers(self, reservation: Reservation, tokens: int) -> bool:
        """Return whether the reservation covers this many tokens, topped up where that is possible."""
        missing = tokens - reservation.tokens
        if missing <= 0 or not reservation.bound:
            return True
        now = self._clock()
        counted = [each for each in reservation.bound if each.id.kind.counts_tokens]
        room = min((each.room(now) + int(OVERDRAFT * each.ceiling) for each in counted), default=missing)
        if room < missing:
            for each in counted:
                each.unmet += missing
            return False
        self._add(reservation, min(room, max(missing, TOP_UP_TOKENS)), now)
        return True

    def settle(self, reservation: Reservation, tokens: int, *, refused: bool = False) -> None:
        """Replace the reservation by the tokens used, at the end of the query; a refused one counts as no
        request.

        Does nothing the second time.
        """
        if reservation.settled:
            return
        reservation.settled, now = True, self._clock()
        reserved = reservation.tokens
        if tokens > reserved:
            self._add(reservation, tokens - reserved, now)
        self._give_back(reservation, reserved - tokens, now)
        for each in reservation.bound:
            if each.id.kind is Kind.QUERIES or (refused and each.id.kind is Kind.REQUESTS):
                each.meter.give_back(1, reservation.opened_at, now)

    def _take(self, reservation: Reservation, tokens: int, *, opening: bool = False) -> None:
        now = self._clock()
        for each in reservation.bound:
            need = tokens if each.id.kind.counts_tokens else int(opening)
            if need > each.room(now):
                each.unmet += need
                raise self._full(each, need, now)
        self._add(reservation, tokens, now)
        for each in reservation.bound:
            if opening and not each.id.kind.counts_tokens:
                each.meter.take(1, now)

    def _add(self, reservation: Reservation, tokens: int, now: float) -> None:
        reservation.parts.append((now, tokens))
        reservation.tokens += tokens
        for each in reservation.bound:
            if each.id.kind.counts_tokens:
                each.meter.take(tokens, now)

    def _give_back(self, reservation: Reservation, tokens: int, now: float) -> None:
        """Return tokens, those reserved last first: they were needed least."""
        while tokens > 0:
            taken_at, amount = reservation.parts.pop()
            back = min(tokens, amount)
            tokens -= back
            reservation.tokens -= back
            for each in reservation.bound:
                if each.id.kind.counts_tokens:
                    each.meter.give_back(back, taken_at, now)

    def _full(self, leased: LeasedLimit, need: int, now: float) -> SliceFull:
        free = leased.limit - leased.elsewhere - leased.meter.used(now)
        elsewhere = free >= need and leased.ceiling < leased.limit and not leased.fair
        return SliceFull(leased, refusal_of(leased, need, now), elsewhere=elsewhere)

    # ---- shown to people and clients

    def status(self, caller: Caller, kind: Kind) -> QuotaStatus | None:
        """Return the limit of this kind with the least part left, of those that bind the caller."""
        now = self._clock()
        found = [_status(each, now) for each in self._binding(caller) if each.id.kind is kind]
        return min(found, key=lambda each: each.remaining / max(1, each.limit), default=None)

    def in_use(self, limit_id: LimitId) -> int:
        """Return the usage here and elsewhere, as far as is known."""
        leased = self._limits.get(limit_id)
        return 0 if leased is None else leased.meter.used(self._clock()) + leased.elsewhere

    def _binding(self, caller: Caller) -> tuple[LeasedLimit, ...]:
        if not self._bound:
            return ()
        of_key = self._bound.get((Scope.KEY, caller.quota_id), ())
        return (*of_key, *self._bound.get((Scope.TENANT, caller.tenant), ()))

    # ---- leasing

    def set_limits(self, limits: Mapping[LimitId, int]) -> None:
        """Replace the limits. The usage of those that stay is kept."""
        self._limits = {
            limit_id: self._limits.get(limit_id) or LeasedLimit(limit_id, limit, meter_of(limit_id.kind))
            for limit_id, limit in limits.items()
        }
        bound: dict[tuple[Scope, str], tuple[LeasedLimit, ...]] = {}
        for limit_id, leased in self._limits.items():
            leased.limit = limits[limit_id]
            leased.written_used = -1  # settle it in the next round
            subject = (limit_id.scope, limit_id.subject)
            bound[subject] = (*bound.get(subject, ()), leased)
        self._bound = bound

    def unsettled(self) -> Iterator[LimitId]:
        """Yield the limits whose slice differs from the database, or may have to change."""
        now = self._clock()
        for limit_id, leased in self._limits.items():
            written = leased.ceiling == leased.written and leased.meter.used(now) == leased.written_used
            if leased.unmet or not written:
                yield limit_id

    def claim(self, limit_id: LimitId) -> Claim | None:
        """Return what this replica asks of a limit, None if the limit is gone."""
        leased, now = self._limits.get(limit_id), self._clock()
        if leased is None:
            return None
        used = leased.meter.used(now)
        standing = leased.limit // (STANDING_PARTS * self.replicas)
        want = min(leased.limit, max(standing, int(used * HEADROOM) + leased.unmet))
        return Claim(leased.ceiling, used, want, leased.meter.period(now))

    def restore(self, limit_id: LimitId, amount: int, used: int, used_at: float) -> None:
        """Take over a slice, and its usage, from the process before this one."""
        leased = self._limits.get(limit_id)
        if leased is not None and leased.written < 0 and limit_id.kind is not Kind.QUERIES:
            leased.ceiling, now = amount, self._clock()
            if limit_id.kind is Kind.MONTH or used_at > now - WINDOW_S:
                leased.meter.take(used, min(used_at, now))

    def apply_grant(self, limit_id: LimitId, claim: Claim, grant: Grant) -> bool:
        """Take the granted slice, and shrink towards its target: first here, then in the database.

        Return whether there is now something to give back in the database.
        """
        leased = self._limits.get(limit_id)
        if leased is None:
            return False
        used = leased.meter.used(self._clock())
        leased.ceiling = min(grant.amount, max(used, min(grant.target, grant.amount)))
        leased.written, leased.written_used, leased.elsewhere = grant.amount, claim.used, grant.elsewhere
        leased.unmet, leased.fair = 0, grant.target <= grant.amount < claim.want
        return leased.ceiling < leased.written

    def forget_slices(self) -> None:
        """Drop every slice: another process has this replica's name, and what was leased by it is its own
        now.
        """
        for leased in self._limits.values():
            leased.ceiling, leased.written = 0, -1


def refusal_of(leased: LeasedLimit, need: int, now: float) -> TooMany:
    """Return an error that names the quota and the time to wait, as far as is known here."""
    quota = f"the quota of {leased.limit:,} {leased.id.kind.phrase} of {leased.id}"
    if need > leased.limit:
        return AboveQuota(f"this query alone needs {need:,}, more than {quota}: make it smaller")
    short = need - leased.room(now)
    wait_s = leased.meter.until_less(short, now)
    if leased.id.kind is Kind.MONTH:
        return BudgetSpent(f"{quota} is spent; the next month begins in {wait_s / 86_400:.1f} days")
    return TooMany(f"{quota} is used up; try again in {wait_s:.1f} s", retry_after_s=wait_s)


def _status(leased: LeasedLimit, now: float) -> QuotaStatus:
    used = leased.meter.used(now)
    remaining = max(0, leased.limit - used - leased.elsewhere)
    return QuotaStatus(leased.limit, remaining, leased.meter.until_less(used, now) if used else 0.0)
