"""Hand keys and values of requests to other engines of this host: straight into memory of their device."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from site_engine.core.inbox import PLACES, InboxAddress, InboxPlace
from site_engine.core.request import Moved
from site_engine.errors import NoMemory
from site_engine.model.descriptors import GivenDescriptor, is_given, taken
from site_engine.model.kv_cache import KVCache
from site_engine.model.shared_memory import SharedMemory

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 28
"""Of a request. Its move would hold up others for long; more is computed again."""


class KVInbox:
    """Memory into which other engines write, once it is open, and the way into that of others.

    Has to be used between iterations. A place is one request's until it was received: whoever gives places
    away sees to that.
    """

    def __init__(self, kv_cache: KVCache, share: Callable[[torch.device], SharedMemory]) -> None:
        """Make a closed inbox, without memory; `share` makes what a device shares."""
        self._kv_cache = kv_cache
        self._share = share
        self._rooms = [in_words(room) for room in (*kv_cache.keys, *kv_cache.values)]
        self._page_bytes = max(1, sum(room[0].nbytes for room in self._rooms))
        self._place_pages = max(1, min(kv_cache.pages, MAX_BYTES // self._page_bytes))
        self._address: InboxAddress | None = None
        self._others: dict[InboxAddress, torch.Tensor | None] = {}  # memory of other engines; None: no way

    def open(self) -> InboxAddress | None:
        """Let other engines of this host write here; None if nothing can be handed over so."""
        if self._address is None and self._kv_cache.is_whole and self._rooms:
            device = self._kv_cache.device
            place_bytes = self._place_pages * self._page_bytes
            try:
                self._shared = self._share(device)
                descriptor, self._memory = self._shared.create(PLACES * place_bytes)
                self._given = GivenDescriptor(descriptor)
            except (NoMemory, OSError, RuntimeError) as exc:
                log.warning("keys and values of requests that move here are computed again: %s", exc)
                return None
            self._side = torch.cuda.Stream() if device.type == "cuda" else None
            self._address = InboxAddress(self._given.name, place_bytes)
        return self._address

    def close(self) -> None:
        """Let no further engines write here."""
        if self._address is not None:
            self._given.close()

    def send(self, pages: list[int], to: InboxPlace | None) -> bool:
        """Copy pages into another engine's inbox; return False if they do not fit, or there is no way."""
        if to is None or self._address is None or to.inbox.place_bytes != self._address.place_bytes:
            return False
        memory = self._other(to.inbox) if len(pages) <= self._place_pages else None
        if memory is None:
            return False
        index = torch.tensor(pages, dtype=torch.long, device=self._kv_cache.device)
        at = to.number * to.inbox.place_bytes
        for room in self._rooms:
            end = at + len(pages) * room[0].nbytes
            torch.index_select(room, 0, index, out=memory[at:end].view(room.dtype).view(len(pages), -1))
            at = end
        if self._side is not None:
            torch.cuda.current_stream().synchronize()
        return True

    def receive(self, moved: Moved) -> list[torch.Tensor] | None:
        """Return what `KVCache.copy_in` takes of a request that came, whose place is free then.

        None: nothing of it is here, perhaps since it was sent to an engine that was here before.
        """
        if moved.place is None or moved.place.inbox != self._address:
            return None
        pages = -(-moved.computed // self._kv_cache.page_size)
        begin = moved.place.number * moved.place.inbox.place_bytes
        used = self._memory[begin : begin + pages * self._page_bytes]
        if self._side is None:
            return self._tensors(used.clone())
        with torch.cuda.stream(self._side):
            kept = used.clone()
        self._side.synchronize()  # not the step that runs meanwhile
        kept.record_stream(torch.cuda.current_stream())
        return self._tensors(kept)

    def _tensors(self, contents: torch.Tensor) -> list[torch.Tensor]:
        """Return the contents of a place as tensors, one for each room: `[pages, page, kv_heads, dim]`."""
        pages, found, at = len(contents) // self._page_bytes, [], 0
        for room in (*self._kv_cache.keys, *self._kv_cache.values):
            end = at + pages * room[0].nbytes
            found.append(contents[at:end].view(room.dtype).view(pages, *room.shape[1:]))
            at = end
        return found

    def _other(self, inbox: InboxAddress) -> torch.Tensor | None:
        """Return the bytes of an inbox; when a new one is opened, give up those of engines that are gone."""
        if inbox not in self._others:
            for other in [each for each in self._others if not is_given(each.name)]:
                gone = self._others.pop(other)
                if gone is not None:
                    self._shared.close(gone)
            try:
                self._others[inbox] = self._shared.open(taken(inbox.name), PLACES * inbox.place_bytes)
            except (NoMemory, OSError, RuntimeError) as exc:  # devices without a way from one to the other
                log.warning("keys and values of requests that move are computed again: %s", exc)
                self._others[inbox] = None
        return self._others[inbox]


def in_words(room: torch.Tensor) -> torch.Tensor:
    """Return pages as rows of the widest numbers that they are whole ones of: fewer are copied faster."""
    rows = room.view(torch.uint8).flatten(1)
    for dtype in (torch.int64, torch.int32, torch.int16):
        if rows.shape[1] % dtype.itemsize == 0:
            return rows.view(dtype)
    return rows
