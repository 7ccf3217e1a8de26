"""Orders in which a site can start the lines of a batch: ours, and those of other engines and of papers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import inf

from bench.support.dual_scanner import DualScanner, sampled
from bench.support.offline_chooser import Chooser
from bench.support.offline_work import Line
from gateway.batches.blend import Blend
from gateway.batches.capacity import QUEUED_SHARE
from gateway.batches.order import order, prefill_heavy
from gateway.batches.pace import work_of
from gateway.batches.values import Line as BatchLine
from gateway.batches.values import Order
from site_engine.core.request import Request
from site_engine.core.request_queue import AdmissionQueue, first_come
from site_engine.core.scheduler import Scheduler
from tests.support.line_sizes import sizes_of


class Listed(Chooser):
    """A list that is fixed before the first line starts."""

    def __init__(self, forecasts: Sequence[Line], listed: list[int]) -> None:
        super().__init__(forecasts)
        self._left = listed[::-1]

    def peek(self, scheduler: Scheduler) -> int | None:
        return self._left[-1] if self._left else None

    def taken(self, at: int) -> None:
        self._left.pop()


class LongestPrefixMatch(Chooser):
    """The waiting line with the longest cached prefix first, as SGLang (Zheng et al., 2024)."""

    def __init__(self, forecasts: Sequence[Line]) -> None:
        super().__init__(forecasts)
        self._waiting: dict[int, list[int]] = {}
        for at, line in enumerate(forecasts):
            self._waiting.setdefault(line.group, []).append(at)
        for group in self._waiting.values():
            group.reverse()
        self._begun: list[int] = []  # groups, the longest prefix last

    def peek(self, scheduler: Scheduler) -> int | None:
        if self._begun:
            return self._waiting[self._begun[-1]][-1]
        return next(iter(self._waiting.values()))[-1] if self._waiting else None

    def taken(self, at: int) -> None:
        group = self.lines[at].group
        self._waiting[group].pop()
        if group not in self._begun:
            self._begun.append(group)
        if not self._waiting[group]:
            del self._waiting[group]
            self._begun.remove(group)
        self._begun.sort(key=lambda each: self.lines[self._waiting[each][-1]].shared_tokens)


def listed(how: Order) -> Callable[[Sequence[Line]], Chooser]:
    return lambda forecasts: Listed(forecasts, order(sizes_of(forecasts), how).tolist())


CHOOSERS: dict[str, Callable[[Sequence[Line]], Chooser]] = {
    "arrival": listed(Order.FILE),
    "longest": listed(Order.LONGEST),
    "prefix": listed(Order.PREFIX),
    "prefix match": LongestPrefixMatch,
    "dual scanner": DualScanner,
}


def in_order(forecasts: Sequence[Line], how: Order, at_sites: int) -> list[BatchLine]:
    """Return the lines as a gateway has them, in the order of running."""
    return [
        BatchLine(
            at, place, "", 0, 1, each.prompt_tokens, each.response_tokens, each.group, each.shared_tokens
        )
        for place, at in enumerate(order(sizes_of(forecasts), how, at_sites).tolist())
        for each in [forecasts[at]]
    ]


def is_heavy(line: BatchLine) -> bool:
    return prefill_heavy(line.prompt_tokens, line.response_tokens)


class Waiting:
    """The lines of a batch that are not at any site, from both ends if blended, and what is left of it."""

    def __init__(self, forecasts: Sequence[Line], how: Order, at_sites: int) -> None:
        lines, self.any_order = in_order(forecasts, how, at_sites), how is Order.BLEND
        self.others = deque(line for line in lines if not (self.any_order and is_heavy(line)))
        self.heavy = deque(line for line in lines if self.any_order and is_heavy(line))
        self._running, self._work_left = Blend(), sum(map(work_of, lines))

    def next_end(self, at_sites: int, waiting: int) -> deque[BatchLine]:
        if not self.any_order:
            return self.others
        return self._running.next_end(self.others, self.heavy, at_sites, waiting)

    def started(self, line: BatchLine) -> None:
        self._running.started(line, self._work_left)

    def ended(self, line: BatchLine) -> None:
        self._running.ended(line.number)
        self._work_left -= work_of(line)

    def put_back(self, lines: Iterable[BatchLine]) -> None:
        """Put lines whose site has died before all others, in their order."""
        for line in sorted(lines, key=lambda each: -each.place):
            self._running.ended(line.number)
            (self.heavy if is_heavy(line) else self.others).appendleft(line)


class Fed:
    """The lines that a gateway sends to a site: in a fixed order or, if blended, of either kind in turn."""

    def __init__(self, forecasts: Sequence[Line], how: Order, slots: int) -> None:
        self.any_order = how is Order.BLEND
        self._most = slots + int(QUEUED_SHARE * slots)
        self._waiting = Waiting(forecasts, how, self._most)
        self.heavy = [
            self.any_order and prefill_heavy(line.prompt_tokens, line.response_tokens) for line in forecasts
        ]
        self._sent: dict[int, BatchLine] = {}

    def next(self, waiting: int) -> int | None:
        """Return the line to send now to a site where so many wait, None if it has enough or none is left."""
        if len(self._sent) >= self._most or not (end := self._waiting.next_end(self._most, waiting)):
            return None
        line = end.popleft()
        self._sent[line.number] = line
        self._waiting.started(line)
        return line.number

    def ended(self, at: int) -> None:
        self._waiting.ended(self._sent.pop(at))


class BlendedQueue(AdmissionQueue):
    """The engine's own queue, fed as the gateway feeds a site."""

    def __init__(self, forecasts: Sequence[Line], make: Callable[[int], Request], slots: int) -> None:
        super().__init__(starving_after_s=inf)
        self._make, self._fed = make, Fed(forecasts, Order.BLEND, slots)
        self._wait = 0  # after the newest start
        self._send()

    def first(self, now: float) -> Request | None:
        self._wait = len(self)
        return super().first(now)

    def settle(self, request: Request) -> None:
        super().settle(request)
        self._fed.ended(int(request.id))
        self._send()

    def _send(self) -> None:
        while (at := self._fed.next(self._wait)) is not None:
            request = self._make(at)
            request.any_order, request.prefill_heavy = True, self._fed.heavy[at]
            self.push(request)


class ChosenQueue(AdmissionQueue):
    """A queue of one tenant's lines of which `chooser` says which is next."""

    def __init__(self, chooser: Chooser, make: Callable[[int], Request]) -> None:
        super().__init__(first_come, inf)
        self.scheduler: Scheduler | None = None
        self._chooser, self._make = chooser, make
        self._made: dict[int, Request] = {}

    def __len__(self) -> int:
        return self._chooser.peek(self._scheduler_()) is not None

    def first(self, now: float) -> Request | None:
        at = self._chooser.peek(self._scheduler_())
        if at is None:
            return None
        if at not in self._made:
            self._made = {at: self._make(at)}
        return self._made[at]

    def take(self, request: Request) -> None:
        request.charged = 1.0  # so that its end is told
        self._chooser.taken(int(request.id))

    def settle(self, request: Request) -> None:
        self._chooser.ended(int(request.id))

    def _scheduler_(self) -> Scheduler:
        assert self.scheduler is not None
        return self.scheduler


SAMPLED = "sampled scanner"
ORDERS = (*CHOOSERS, SAMPLED, "blend")


def queue_of(
    name: str,
    lines: Sequence[Line],
    forecasts: Sequence[Line],
    make: Callable[[int], Request],
    slots: int,
) -> AdmissionQueue:
    """Return the queue of a site in which lines wait in an order. `lines` have their true lengths."""
    if name == "blend":
        return BlendedQueue(forecasts, make, slots)
    if name == SAMPLED:
        first, known = sampled(lines)
        return ChosenQueue(DualScanner(known, first), make)
    return ChosenQueue(CHOOSERS[name](forecasts), make)
