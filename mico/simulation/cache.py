"""The prefix cache of a simulated site: the engine's own page pool and prefix tree, by ids of blocks.

A block of a prompt is one page, and its id stands for its tokens, so that hits and evictions are those of the
engine with pages of that size. Tokens in blocks that are not full, or that no later prompt can have, are
counted by the site and hold no page.
"""

from __future__ import annotations

from mico.simulation.row import Row
from site_engine.core.page_pool import PagePool
from site_engine.core.prefix_cache import PrefixTree


class SiteCache:
    """The pages of one site's running rows, and of the prefixes it keeps as long as there is room."""

    def __init__(self, kv_tokens: int, block_tokens: int) -> None:
        self.pool = PagePool(max(1, kv_tokens // block_tokens), 1)
        self.tree = PrefixTree(self.pool)
        self._kv_tokens, self._block_tokens = kv_tokens, block_tokens
        self._held = 0  # pages of rows, each counted for every row that holds it

    @property
    def shared_tokens(self) -> int:
        """Return the tokens that rows count more than once, because they share their pages."""
        return (self._held - (self.pool.used - self.pool.idle)) * self._block_tokens

    def share(self, row: Row, computed: int) -> int:
        """Take the cached pages that follow the `computed` tokens of a row; return their tokens.

        The last token is always computed, as in the engine.
        """
        if not row.blocks or computed % self._block_tokens:
            return 0
        known = row.blocks[: (len(row.tokens) - 1) // self._block_tokens]
        pages = self.tree.match(known, row.pages, (row.tenant, ""))
        row.pages += pages
        self._held += len(pages)
        return len(pages) * self._block_tokens

    def extend(self, row: Row, computed: int) -> None:
        """Take pages for the full blocks of the first `computed` tokens of a row, to be found by others."""
        need = min(computed // self._block_tokens, len(row.blocks)) - len(row.pages)
        if need <= 0 or need > self.pool.available:
            return
        self.tree.evict(need - self.pool.free)
        row.pages += self.pool.take(need) or ()
        self._held += need
        self.tree.insert(row.blocks, row.pages, (row.tenant, ""))

    def drop(self, row: Row) -> None:
        """Release the pages of a row; those in the tree stay until their room is needed."""
        self.pool.drop(row.pages)
        self._held -= len(row.pages)
        row.pages = []

    def make_room(self, row_tokens: int) -> None:
        """Evict what does not fit beside the rows, which count `row_tokens`."""
        idle_tokens = self._kv_tokens - (row_tokens - self.shared_tokens)
        excess = self.pool.idle - max(0, idle_tokens // self._block_tokens)
        self.tree.evict(excess)
