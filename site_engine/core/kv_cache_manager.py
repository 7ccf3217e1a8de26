"""Allocate KV pages to requests, reusing pages from the prefix cache or keys and values from another engine.

Makes no scheduling decisions and holds no tensors.
"""

from __future__ import annotations

from site_engine.core.page_pool import PagePool, ReceivedKV
from site_engine.core.prefix_cache import Owner, PrefixTree
from site_engine.core.request import Request


class KVCacheManager:
    """Allocates, shares and frees the pages of requests.

    With `share_prefixes` tenants share cached prefixes, so that one could infer another's prompts by timing.
    """

    def __init__(
        self,
        pool: PagePool,
        prefixes: PrefixTree | None,
        received: ReceivedKV | None,
        *,
        share_prefixes: bool,
    ) -> None:
        self.pool = pool
        self.prefixes = prefixes
        self.received = received
        self._share_prefixes = share_prefixes

    def grow(self, request: Request, tokens: int) -> bool:
        """Allocate pages until a request has room for `tokens` tokens; return False if too few are left."""
        need = self.pool.pages_for(tokens) - len(request.pages)
        if need <= 0:
            return True
        if need > self.pool.available:
            return False
        if self.prefixes is not None:
            self.prefixes.evict(need - self.pool.free)
        pages = self.pool.take(need)
        if pages is None:
            return False
        request.pages += pages
        return True

    def free(self, request: Request) -> None:
        self.pool.drop(request.pages)
        request.pages = []
        request.computed = 0

    def invalidate(self, request: Request) -> None:
        """Discard what a request computed in a failed iteration, and its pages in the prefix cache."""
        if self.prefixes is not None:
            self.prefixes.forget(request.pages)
        request.computed = 0

    def share_prefix(self, request: Request) -> int:
        """Append the cached pages that continue a request's own; return the number of tokens in them.

        The last token is always computed, since its logits are needed. A request for prompt log probabilities
        shares nothing, since the logits of every token are needed.
        """
        page_size = self.pool.page_size
        if self.prefixes is None or request.sampling.prompt_logprobs or request.computed % page_size:
            return 0
        most = len(request.tokens) - 1
        pages = self.prefixes.match(request.tokens, request.pages, self._owner(request), most)
        request.pages += pages
        request.computed += len(pages) * page_size
        return len(pages) * page_size

    def insert_prefix(self, request: Request, tokens: int) -> None:
        """Insert the full pages of a request's first `tokens` tokens into the prefix cache."""
        if self.prefixes is not None:
            self.prefixes.insert(request.tokens, request.pages, self._owner(request), tokens)

    def take_received(self, request: Request) -> None:
        """Copy a moved request's received keys and values into its pages, unless the prefix cache already
        covers them or pages are short; they are then dropped.
        """
        if not request.received or self.received is None:
            return
        shared = len(request.pages)  # its prefix may be in the cache
        if request.received > request.computed and self.grow(request, request.received):
            self.received.copy_in(request.id, request.pages, shared)
            request.computed = request.received
        else:
            self.received.drop(request.id)
        request.received = 0

    def drop_received(self, request: Request) -> None:
        if request.received and self.received is not None:
            self.received.drop(request.id)

    def _owner(self, request: Request) -> Owner:
        variant = request.variant
        tenant = "" if self._share_prefixes else request.tenant
        return tenant, "" if variant is None else variant.fingerprint
