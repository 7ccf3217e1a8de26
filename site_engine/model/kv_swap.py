"""Swap the keys and values of preempted requests to host memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from site_engine.core.load import IterationCost
from site_engine.model.kv_cache import KVCache

TRIAL_PAGES = 64


class HostSwap:
    """Holds at most `tokens` tokens; `worth(tokens)` decides whether copying beats computing again."""

    def __init__(self, kv_cache: KVCache, tokens: int, worth: Callable[[int], bool]) -> None:
        self.used_tokens = 0
        self._kv_cache = kv_cache
        self._limit_tokens = tokens
        self._worth = worth
        self._kept: dict[str, torch.Tensor] = {}

    def swap_out(self, request_id: str, pages: list[int], tokens: int) -> bool:
        room = len(pages) * self._kv_cache.page_size
        if not pages or self.used_tokens + room > self._limit_tokens or not self._worth(tokens):
            return False
        self._kept[request_id] = self._kv_cache.copy_out(pages)
        self.used_tokens += room
        return True

    def put(self, request_id: str, kept: torch.Tensor) -> None:
        """Keep what another engine has copied out, beyond the limit, too."""
        self._kept[request_id] = kept
        self.used_tokens += len(kept) * self._kv_cache.page_size

    def swap_in(self, request_id: str, pages: list[int], skip: int) -> None:
        kept = self._kept[request_id]
        self._kv_cache.copy_in(kept[skip:], pages[skip : len(kept)])
        self.drop(request_id)

    def drop(self, request_id: str) -> None:
        self.used_tokens -= len(self._kept.pop(request_id)) * self._kv_cache.page_size


def host_swap(
    kv_cache: KVCache,
    tokens: int,
    cost: Callable[[], IterationCost],
    token_budget: int,
    clock: Callable[[], float],
) -> HostSwap:
    """Return room for `tokens` tokens, used where it saves time by the engine's `cost` of an iteration."""
    copy_s = copy_seconds_per_token(kv_cache, clock) if tokens else 0.0

    def worth(tokens: int) -> bool:
        """Return whether copying both ways takes less time than computing all tokens again in chunks."""
        now = cost()
        again_s = tokens * (now.per_token_s + now.per_kv_token_s * tokens / (2 * token_budget))
        return 2 * tokens * copy_s < again_s

    return HostSwap(kv_cache, tokens, worth)


def copy_seconds_per_token(kv_cache: KVCache, clock: Callable[[], float]) -> float:
    """Measure copying some pages out and in again, after a warm-up; return seconds per token."""
    pages = list(range(1, min(TRIAL_PAGES, kv_cache.pages) + 1))
    for _ in range(2):
        began = clock()
        kv_cache.copy_in(kv_cache.copy_out(pages), pages)
        seconds = clock() - began
    return seconds / (len(pages) * kv_cache.page_size)
