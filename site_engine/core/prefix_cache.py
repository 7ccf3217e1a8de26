"""Share the KV pages of common prefixes: a radix tree with one full page of tokens per node.

The tree holds one reference to each of its pages. A page is inserted as soon as its computation is planned:
an iteration writes all keys and values before it reads any, so requests of the same iteration may share the
page. A request that holds a page of the tree holds all its ancestors. Hence no page in use descends from a
page that only the tree holds, and the last tree page of a request identifies the whole path.

The key of each first page contains its owner, a tenant and a variant. Tenants do not share pages, since
prefill time reveals whether a prefix was cached; variants compute different keys and values. A variant is
named by the fingerprint of its contents, so that other contents loaded under an old name match no stale page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from site_engine.core.page_pool import PagePool

STALE_PER_NODE = 4  # outdated entries of the eviction heap before it is rebuilt


Owner = tuple[str, str]
"""A tenant, and the fingerprint of a variant, empty for the base."""
NOBODY: Owner = ("", "")
Key = tuple[int | Owner, ...]


class _Node:
    __slots__ = ("children", "key", "page", "parent", "used")

    def __init__(self, page: int, key: Key, parent: _Node | None) -> None:
        self.page = page
        self.key = key
        self.parent = parent
        self.children: dict[Key, _Node] = {}
        self.used = 0


class PrefixTree:
    """Finds cached pages for requests and evicts unused pages, least recently used first."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._page_size = pool.page_size
        self._root = _Node(0, (), None)
        self._nodes: dict[int, _Node] = {}  # by page
        self._unused: list[
            tuple[int, int, _Node]
        ] = []  # (tick when last used, page, node); entries may be outdated
        self._tick = 0
        pool.on_idle = self._on_idle

    def __len__(self) -> int:
        return len(self._nodes)

    def match(
        self,
        tokens: Sequence[int],
        held: Sequence[int] = (),
        owner: Owner = NOBODY,
        first: int | None = None,
    ) -> list[int]:
        """Return the pages of the longest cached prefix beyond those `held`, and add a reference to each.

        Only the `first` tokens are looked up; None looks up all. The time depends on the pages found, not on
        those held, since a long prompt is looked up once per chunk.
        """
        node = self._nodes.get(held[-1]) if held else self._root
        pages: list[int] = []
        if node is not None:
            for key in self._keys(tokens, owner, len(held), len(tokens) if first is None else first):
                child = node.children.get(key)
                if child is None:
                    break
                pages.append(child.page)
                node = child
        self._pool.share(pages)
        return pages

    def insert(
        self, tokens: Sequence[int], pages: Sequence[int], owner: Owner = NOBODY, first: int | None = None
    ) -> None:
        """Insert the full pages of a request's `first` tokens (None for all), up to the first page whose
        contents the tree already has in a page of another request.
        """
        first = len(tokens) if first is None else first
        full = min(len(pages), first // self._page_size)
        known = full
        while known and pages[known - 1] not in self._nodes:
            known -= 1
        node = self._nodes[pages[known - 1]] if known else self._root
        for key, page in zip(self._keys(tokens, owner, known, first), pages[known:full], strict=False):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = self._nodes[page] = _Node(page, key, node)
                self._pool.cache(page)
            elif child.page != page:
                return
            node = child

    def evict(self, count: int) -> None:
        """Free `count` pages that only the tree holds. The pool's `idle` must be at least `count`."""
        while count > 0:
            used, _, node = heappop(self._unused)
            stale = node.used != used or self._nodes.get(node.page) is not node
            if stale or node.children or self._pool.references(node.page) > 1:
                continue
            self._cut(node)
            count -= 1

    def forget(self, pages: Iterable[int]) -> None:
        """Remove pages and their descendants from the tree."""
        for page in pages:
            node = self._nodes.get(page)
            if node is not None:
                subtree = [node]
                for one in subtree:  # grows during the loop: parents before children
                    subtree.extend(one.children.values())
                for one in reversed(subtree):
                    self._cut(one)

    def clear(self) -> None:
        self.forget([child.page for child in self._root.children.values()])

    def _cut(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        del self._nodes[node.page]
        self._pool.uncache(node.page)
        if parent is not self._root and not parent.children and self._pool.references(parent.page) == 1:
            heappush(self._unused, (parent.used, parent.page, parent))

    def _keys(self, tokens: Sequence[int], owner: Owner, pages: int, first: int) -> Iterator[Key]:
        """Yield the keys of the full pages of the `first` tokens, from page index `pages` on."""
        size = self._page_size
        for at in range(pages * size, first - size + 1, size):
            page = tuple(tokens[at : at + size])
            yield page if at else (owner, *page)

    def _on_idle(self, page: int) -> None:
        node = self._nodes[page]
        self._tick += 1
        node.used = self._tick
        heappush(self._unused, (node.used, page, node))
        if len(self._unused) > STALE_PER_NODE * len(self._nodes) + 64:
            self._unused = [(one.used, one.page, one) for one in self._nodes.values() if not one.children]
            heapify(self._unused)
