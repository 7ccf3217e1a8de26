"""Count the usage of a limit on this replica, within its window. Pure; times are monotonic seconds."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from math import ceil, inf
from typing import Protocol

from gateway.quotas.limits import WINDOW_S, Kind


class Meter(Protocol):
    def used(self, now: float) -> int: ...

    def take(self, amount: int, now: float) -> None: ...

    def give_back(self, amount: int, taken_at: float, now: float) -> None:
        """Return an unused amount that was taken at `taken_at`."""

    def until_less(self, amount: int, now: float) -> float:
        """Return the seconds until the usage is lower by at least `amount`, if nothing more is taken."""

    def period(self, now: float) -> int:
        """Return the month that is counted, 0 if the meter is not monthly."""


class Minute:
    """Counts the last 60 seconds, by the second. `used` is never less than the usage in that time."""

    def __init__(self) -> None:
        self._seconds: dict[int, int] = {}  # amount by second, ascending
        self._total = 0
        self._newest = 0
        self._oldest_ends = inf  # when the oldest second expires

    def used(self, now: float) -> int:
        while self._oldest_ends <= now:
            self._total -= self._seconds.pop(next(iter(self._seconds)))
            self._oldest_ends = next(iter(self._seconds), inf) + 1 + WINDOW_S
        return self._total

    def take(self, amount: int, now: float) -> None:
        second = self._newest = max(int(now), self._newest)  # keeps the order
        self._seconds[second] = self._seconds.get(second, 0) + amount
        self._total += amount
        if self._oldest_ends == inf:
            self._oldest_ends = second + 1 + WINDOW_S

    def give_back(self, amount: int, taken_at: float, now: float) -> None:
        self.used(now)
        second: int | None = int(taken_at)
        if second not in self._seconds:
            second = next((each for each in self._seconds if each >= taken_at), None)
        if second is None or int(taken_at) + 1 + WINDOW_S <= now:
            return
        amount = min(amount, self._seconds[second])
        self._seconds[second] -= amount
        self._total -= amount

    def until_less(self, amount: int, now: float) -> float:
        stays, until = self._total - amount, None
        for second, taken in reversed(self._seconds.items()):  # newest first, as most callers ask for all
            if stays < 0:
                break
            until, stays = second, stays - taken
        return WINDOW_S if until is None else max(0.0, until + 1 + WINDOW_S - now)

    def period(self, now: float) -> int:
        return 0


class Concurrent:
    """Counts the queries in progress."""

    RETRY_AFTER_S = 1.0

    def __init__(self) -> None:
        self._live = 0

    def used(self, now: float) -> int:
        return self._live

    def take(self, amount: int, now: float) -> None:
        self._live += amount

    def give_back(self, amount: int, taken_at: float, now: float) -> None:
        self._live -= amount

    def until_less(self, amount: int, now: float) -> float:
        return self.RETRY_AFTER_S

    def period(self, now: float) -> int:
        return 0


class Month:
    """Counts since the first of the month in UTC, as determined by `unix_time`."""

    def __init__(self, unix_time: Callable[[], float]) -> None:
        self._unix_time = unix_time
        self._began = float("-inf")
        self._month = month_of(unix_time())
        self._total = 0

    def used(self, now: float) -> int:
        unix_time = self._unix_time()
        if not month_start(self._month) <= unix_time < month_start(self._month + 1):
            if (month := month_of(unix_time)) > self._month:
                self._began, self._total = now, 0
            self._month = month  # if the clock was set back, the usage is kept
        return self._total

    def take(self, amount: int, now: float) -> None:
        self._total = self.used(now) + amount

    def give_back(self, amount: int, taken_at: float, now: float) -> None:
        used = self.used(now)
        if taken_at >= self._began:
            self._total = max(0, used - amount)

    def until_less(self, amount: int, now: float) -> float:
        return ceil(month_start(self._month + 1) - self._unix_time())

    def period(self, now: float) -> int:
        self.used(now)
        return self._month


def month_of(unix_time: float) -> int:
    day = datetime.fromtimestamp(unix_time, UTC)
    return day.year * 12 + day.month - 1


@cache
def month_start(month: int) -> float:
    """Return the unix time at which a month begins."""
    return datetime(month // 12, month % 12 + 1, 1, tzinfo=UTC).timestamp()


def meter_of(kind: Kind, unix_time: Callable[[], float]) -> Meter:
    if kind is Kind.QUERIES:
        return Concurrent()
    return Month(unix_time) if kind.is_monthly else Minute()
