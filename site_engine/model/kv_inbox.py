"""Copy keys and values of requests to other engines of this host, directly into their device's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import NamedTuple

import torch

from site_engine.core.inbox import PLACES, InboxAddress, InboxPlace
from site_engine.core.page_pool import NULL_PAGE
from site_engine.core.request import Moved, Request
from site_engine.errors import NoMemory
from site_engine.model.descriptors import GivenDescriptor, is_given, taken
from site_engine.model.kv_cache import KVCache
from site_engine.model.shared_memory import SharedMemory

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 30
"""Limit on the bytes of one request's keys and values. Larger requests are recomputed."""
FREE_SHARE = 4
"""An inbox takes at most one part in this many of a device's free memory."""
TRIAL_PAGES = (1, 32)
"""Page counts that are copied in rehearsal: few and many pages use different kernels."""


class _Ahead(NamedTuple):
    """The first `size` pages of a request, sent while it keeps running. `pages`: the request's own list."""

    pages: list[int]
    size: int
    copied: torch.cuda.Event | None


class KVInbox:
    """Memory into which other engines write once it is open, and access to the inboxes of others.

    Must be used between iterations. A place belongs to one request until that is received; the caller that
    assigns places must ensure this.
    """

    def __init__(self, kv_cache: KVCache, share: Callable[[torch.device], SharedMemory]) -> None:
        """Create a closed inbox without memory. `share` creates the shared memory of a device."""
        self._kv_cache = kv_cache
        self._share = share
        self._copies = kv_cache.copies
        self._page_bytes = max(1, kv_cache.copies.page_bytes)
        self._address: InboxAddress | None = None
        self._others: dict[InboxAddress, torch.Tensor | None] = {}  # other inboxes; None: not reachable
        self._ahead: dict[InboxPlace, _Ahead] = {}

    def open(self) -> InboxAddress | None:
        """Let other engines of this host write here; return the address, None if that is not possible."""
        if self._address is None and self._kv_cache.is_whole and self._copies.page_bytes:
            device = self._kv_cache.device
            place_bytes = self._place_bytes()
            try:
                self._shared = self._share(device)
                descriptor, self._memory = self._shared.create(PLACES * place_bytes)
                self._given = GivenDescriptor(descriptor)
                self._side = torch.cuda.Stream() if device.type == "cuda" else None
                self._address = InboxAddress(self._given.name, place_bytes)
                self._others[self._address] = self._memory
                self._rehearse(self._address)
            except (NoMemory, OSError, RuntimeError) as exc:
                log.warning("keys and values of requests that move here are computed again: %s", exc)
                self._address = None
        return self._address

    def close(self) -> None:
        """Let no more engines open this inbox."""
        if self._address is not None:
            self._given.close()

    def meet(self, inboxes: Iterable[InboxAddress]) -> None:
        """Open the inboxes of other engines ahead of time, so that no request waits for it."""
        if self._address is not None:
            for each in inboxes:
                self._other(each)

    def send_ahead(self, request: Request, to: InboxPlace | None) -> bool:
        """Start copying the full pages of a request, which no longer change, while it keeps running; return
        whether the copy is under way, in which case the caller must call again after the next iteration.
        """
        pages, count = request.pages, request.computed // self._kv_cache.page_size
        if to in self._ahead:
            copied = self._ahead[to].copied
            return copied is not None and not copied.query()
        memory = self._way(count, to)
        if to is None or memory is None or not count or not _can_go(request):
            return False
        copied = None
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())
        with nullcontext() if self._side is None else torch.cuda.stream(self._side):
            self._copies.pack(self._kv_cache.index(pages[:count]), memory[:count])
            if self._side is not None:
                copied = self._side.record_event()
        self._ahead[to] = _Ahead(pages, count, copied)
        return True

    def send(self, request: Request, to: InboxPlace | None) -> int:
        """Queue copies of the pages that were not sent ahead, behind the device's current work; return the
        number of tokens in all pages sent, 0 if they do not fit or the inbox is not reachable.
        """
        pages, count = request.pages, -(-request.computed // self._kv_cache.page_size)
        memory = self._way(count, to)
        if to is None or memory is None or not _can_go(request):
            return 0
        ahead, first = self._ahead.get(to), 0
        if ahead is not None and ahead.pages is pages:
            first = ahead.size
        elif ahead is not None and ahead.copied is not None:
            ahead.copied.synchronize()  # a copy of pages that the request has lost since
        self._copies.pack(self._kv_cache.index(pages[first:count]), memory[first:count])
        return request.computed

    def sent(self, to: InboxPlace | None) -> None:
        """Wait until all copies to a place are complete."""
        ahead = self._ahead.pop(to, None) if to is not None else None
        if ahead is not None and ahead.copied is not None:
            ahead.copied.synchronize()
        if self._kv_cache.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def receive(self, moved: Moved) -> torch.Tensor | None:
        """Return a moved request's packed pages, for `KVCache.copy_in`, and free its place.

        Returns None if they are not in this inbox, for example if they were sent to a predecessor of this
        engine.
        """
        if moved.place is None or moved.place.inbox != self._address:
            return None
        pages = -(-moved.computed // self._kv_cache.page_size)
        place = self._place(self._memory, moved.place)
        if self._side is None:
            return place[:pages].clone()
        with torch.cuda.stream(self._side):
            kept = torch.empty_like(place)[:pages].copy_(place[:pages])  # one size, so memory is reused
        self._side.synchronize()  # waits for the copy only, not for the current step
        kept.record_stream(torch.cuda.current_stream())
        return kept

    def _rehearse(self, own: InboxAddress) -> None:
        """Send pages to this inbox itself, since the first transfer takes ten times as long."""
        place, trial = InboxPlace(own, 0), Request("rehearsal", ())
        trial.row = 0
        for count in TRIAL_PAGES:
            trial.pages = [NULL_PAGE] * min(count, own.place_bytes // self._page_bytes)
            trial.computed = len(trial.pages) * self._kv_cache.page_size
            self.send_ahead(trial, place)
            self.sent(place)
            self.send(trial, place)
            self.sent(place)
            kept = self.receive(Moved(0.0, computed=trial.computed, place=place))
            assert kept is not None, "the place is here"
            self._kv_cache.copy_in(kept, trial.pages)

    def _place_bytes(self) -> int:
        """Return the bytes of a place: whole pages, at most as many as the KV cache has."""
        most = MAX_BYTES
        if self._kv_cache.device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(self._kv_cache.device)
            most = min(most, int(free_bytes) // FREE_SHARE // PLACES)
        return max(1, min(self._kv_cache.pages, most // self._page_bytes)) * self._page_bytes

    def _place(self, memory: torch.Tensor, place: InboxPlace) -> torch.Tensor:
        begin = place.number * place.inbox.place_bytes
        return memory[begin : begin + place.inbox.place_bytes].view(-1, self._page_bytes)

    def _way(self, pages: int, to: InboxPlace | None) -> torch.Tensor | None:
        """Return the memory of a place, or None if it is not reachable or `pages` pages do not fit."""
        if to is None or self._address is None or pages * self._page_bytes > to.inbox.place_bytes:
            return None
        memory = self._other(to.inbox)
        return None if memory is None else self._place(memory, to)

    def _other(self, inbox: InboxAddress) -> torch.Tensor | None:
        """Return the bytes of an inbox, None if not reachable. Opening one closes those of ended engines."""
        if inbox not in self._others:
            known = [each for each in self._others if each != self._address]
            for other in [each for each in known if not is_given(each.name)]:
                gone = self._others.pop(other)
                if gone is not None:
                    self._shared.close(gone)
            try:
                self._others[inbox] = self._shared.open(taken(inbox.name), PLACES * inbox.place_bytes)
            except (NoMemory, OSError, RuntimeError) as exc:  # e.g. devices without peer access
                log.warning("keys and values of requests that move are computed again: %s", exc)
                self._others[inbox] = None
        return self._others[inbox]


def _can_go(request: Request) -> bool:
    """Return whether another engine can continue from a copy of a request's keys and values."""
    unread_prompt = request.sampling.prompt_logprobs and request.first_token_s is None
    return request.row >= 0 and not unread_prompt
