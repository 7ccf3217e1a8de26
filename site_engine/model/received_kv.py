"""Hold received keys and values of requests from other engines until the requests start here."""

from __future__ import annotations

import torch

from site_engine.model.kv_cache import KVCache


class ReceivedPages:
    """Pages by request, as `KVInbox.receive` returns them."""

    def __init__(self, kv_cache: KVCache) -> None:
        self._kv_cache = kv_cache
        self._kept: dict[str, torch.Tensor] = {}

    def put(self, request_id: str, kept: torch.Tensor) -> None:
        self._kept[request_id] = kept

    def copy_in(self, request_id: str, pages: list[int], skip: int) -> None:
        kept = self._kept.pop(request_id)
        self._kv_cache.copy_in(kept[skip:], pages[skip : len(kept)])

    def drop(self, request_id: str) -> None:
        del self._kept[request_id]
