"""The reservation that most engines make: a request holds the 90% quantile of its length until it ends."""

from __future__ import annotations

from site_engine.core.page_pool import PagePool
from site_engine.core.request import Request
from site_engine.core.request_queue import forecast
from site_engine.core.reserve import Reservation


class HeldToTheEnd(Reservation):
    """Takes the place of the scheduler's own `reservation`, to compare the two."""

    def __init__(self, pool: PagePool) -> None:
        super().__init__(pool, forecast, lambda: 1)
        self._held: dict[Request, int] = {}  # pages

    def fits(self, request: Request) -> bool:
        if not self._held:
            return True
        missing = 0
        for each, pages in self._held.items():
            if len(each.pages) >= pages:
                self._held[each] = self._pages_of(each)
            missing += max(0, self._held[each] - len(each.pages))
        return self._pages_of(request) - len(request.pages) <= self._pool.available - missing

    def start(self, request: Request) -> None:
        super().start(request)
        self._held[request] = self._pages_of(request)

    def leave(self, request: Request) -> None:
        super().leave(request)
        del self._held[request]

    def _pages_of(self, request: Request) -> int:
        return self._pool.pages_for(len(request.tokens) + request.p90_remaining())
