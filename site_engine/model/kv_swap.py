"""Keys and values of preempted requests, kept in the computer's own memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from site_engine.model.kv_cache import KVCache

TRIAL_PAGES = 64


class HostSwap:
    """At most `tokens` tokens; takes what `worth` finds cheaper to copy twice than to compute again."""

    def __init__(self, arena: KVCache, tokens: int, worth: Callable[[int], bool]) -> None:
        self.used_tokens = 0
        self._arena = arena
        self._limit_tokens = tokens
        self._worth = worth
        self._kept: dict[str, list[torch.Tensor]] = {}

    def take_out(self, request_id: str, pages: list[int], tokens: int) -> bool:
        room = len(pages) * self._arena.page_size
        if not pages or self.used_tokens + room > self._limit_tokens or not self._worth(tokens):
            return False
        self._kept[request_id] = self._arena.copy_out(pages)
        self.used_tokens += room
        return True

    def swap_in(self, request_id: str, pages: list[int], skip: int) -> None:
        kept = self._kept[request_id]
        count = kept[0].shape[0]
        self._arena.copy_in([one[skip:] for one in kept], pages[skip:count])
        self.drop(request_id)

    def drop(self, request_id: str) -> None:
        self.used_tokens -= self._kept.pop(request_id)[0].shape[0] * self._arena.page_size


def copy_seconds_per_token(arena: KVCache, clock: Callable[[], float]) -> float:
    """Measured: some pages out and in again. The second round counts, the first one warms up."""
    pages = list(range(1, min(TRIAL_PAGES, arena.keys[0].shape[0] - 1) + 1))
    for _ in range(2):
        began = clock()
        arena.copy_in(arena.copy_out(pages), pages)
        seconds = clock() - began
    return seconds / (len(pages) * arena.page_size)
