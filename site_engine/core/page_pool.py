"""Allocate KV pages: free lists and reference counts.

The keys and values are in `model/kv_cache.py`. Page 0 is never allocated, since padding reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

NULL_PAGE = 0


class PoolObserver(Protocol):
    """Notified of all pages that are allocated or freed. The debug mode uses it to poison freed pages."""

    def taken(self, pages: list[int]) -> None: ...
    def freed(self, pages: list[int]) -> None: ...


class ReceivedKV(Protocol):
    """Keys and values received with requests from other engines that have not started here."""

    def copy_in(self, request_id: str, pages: list[int], skip: int) -> None:
        """Copy a request's received keys and values into `pages` except the first `skip`, then drop them."""
        ...

    def drop(self, request_id: str) -> None: ...


class PagePool:
    """A pool of reference-counted pages of `page_size` tokens each. Its size can change.

    The initial pages are the pool's own; `move_end` adds and removes extra pages after them. Extra pages are
    allocated only when no own page is free, so that few are in use when they must be removed.
    """

    def __init__(self, pages: int, page_size: int, observer: PoolObserver | None = None) -> None:
        if pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs at least one page of one token, got {pages} of {page_size}")
        self.page_size = page_size
        self.capacity = self._own = pages
        self._references = [0] * (pages + 1)
        self._free = list(range(pages, NULL_PAGE, -1))
        self._free_extra: list[int] = []  # pages after number `_own`
        self._cached = bytearray(pages + 1)
        self._observer = observer
        self.idle = 0  # pages that only the prefix cache references
        self.on_idle: Callable[[int], None] = lambda page: None

    @property
    def free(self) -> int:
        return len(self._free) + len(self._free_extra)

    @property
    def used(self) -> int:
        return self.capacity - self.free

    @property
    def extra(self) -> int:
        """Return the number of extra pages."""
        return self.capacity - self._own

    @property
    def available(self) -> int:
        """Return the number of pages that are free or can be evicted from the prefix cache."""
        return self.free + self.idle

    def references(self, page: int) -> int:
        return self._references[page]

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int] | None:
        """Allocate `count` pages with one reference each; return None if fewer are free."""
        if count > self.free:
            return None
        pages = [(self._free or self._free_extra).pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        if self._observer is not None:
            self._observer.taken(pages)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            if self._references[page] == 0:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._references[page] += 1
            self.idle -= self._cached[page] and self._references[page] == 2

    def cache(self, page: int) -> None:
        """Add the prefix cache's own reference to a page that is in use."""
        self.share((page,))
        self._cached[page] = 1

    def uncache(self, page: int) -> None:
        self.idle -= self._references[page] == 1
        self._cached[page] = 0
        self.drop((page,))

    def drop(self, pages: Iterable[int]) -> None:
        """Release one reference per page. Pages without references become free."""
        freed = []
        for page in pages:
            if self._references[page] == 0:
                raise ValueError(f"page {page} is free and cannot be dropped")
            self._references[page] -= 1
            if self._references[page] == 0:
                freed.append(page)
            elif self._references[page] == 1 and self._cached[page]:
                self.idle += 1
                self.on_idle(page)
        for page in freed:
            (self._free if page <= self._own else self._free_extra).append(page)
        if self._observer is not None and freed:
            self._observer.freed(freed)

    def move_end(self, pages: int) -> None:
        """Make page number `pages` the last page of the pool.

        Raises ValueError if it precedes the last own page or if a page after it is in use.
        """
        if pages < self._own or any(self._references[pages + 1 :]):
            raise ValueError(f"the end cannot move from page {self.capacity} to {pages}")
        more = max(0, pages + 1 - len(self._references))
        self._references += [0] * more
        self._cached += bytes(more)
        kept = [page for page in self._free_extra if page <= pages]
        self._free_extra = [*range(pages, self.capacity, -1), *kept]
        self.capacity = pages
