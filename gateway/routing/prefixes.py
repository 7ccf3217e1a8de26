"""Tracks which prompt prefixes each site has computed, and so is expected to hold in its prefix cache.

A prompt is divided into blocks. The hash of a block covers all blocks before it, so two prompts share as many
hashes as their common prefix has blocks. Hashes include the tenant, as caches are not shared between tenants.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import accumulate
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from gateway.prompt import Chat, Pooling, Prompt

if TYPE_CHECKING:
    from hashlib import _Hash

HASH_BYTES: Final = 8
FIRST_BLOCK_BYTES = 64
BLOCKS_PER_SIZE = 6
"""The number of blocks of one size, before as many of twice that size. Beyond the first size, a block is at
most a quarter of the prefix that it ends.
"""
SIZES = 10  # 384 KiB in total
BLOCK_BYTES = tuple(FIRST_BLOCK_BYTES << size for size in range(SIZES) for _ in range(BLOCKS_PER_SIZE))
ENDS = tuple(accumulate(BLOCK_BYTES))
"""The end of each block, in bytes from the beginning of the prompt."""
READ_BYTES = 256
"""Only the last READ_BYTES of a block are hashed, so that a prompt of megabytes costs little more than a
short one. Inserting or removing text before them shifts them, which changes the hash. Replacing text by text
of the same length may leave the hash unchanged.
"""
SAMPLES = tuple((end - min(size, READ_BYTES), end) for size, end in zip(BLOCK_BYTES, ENDS, strict=True))
"""The range [begin, end) of bytes that is hashed of each block."""
MAX_CHARS = ENDS[-1]
"""Prompts are compared up to this length."""
MAX_PREFIXES = 2**20
"""The number of hashes kept, about 100 bytes each."""
MAX_AGE_S = 600.0
"""A hash that is not recorded again is dropped between MAX_AGE_S and twice that after its last record."""
MAX_HOLDERS = 4
"""A prefix that more sites hold is expected at every site, so that it favours none."""
HINTED_SHARE = 0.5
"""The share of a prompt that is expected at the site of its conversation if only the hint names the site."""
EPOCH_S = 5.0
"""The prefixes that a site computes within this time count as cached at the same time."""
EVICTED_AFTER = 1.5
"""Once a site has computed this many times the tokens that its cache has room for, almost nothing is left of
its earlier prefixes. Measured: docs/decisions/prefix-affinity.md.
"""
MAX_EPOCHS = 256
"""The number of epochs kept per site. Prefixes of older epochs are dropped by age only."""
LOST_SHARE = 0.5
"""A site that had less than this part of an expected prefix has evicted it and all older prefixes."""
MIN_LEARNED_BYTES = 256
"""Expectations of shorter prefixes are not corrected, as caches keep whole pages of tokens."""
TRUST_STEP = 0.2
MIN_TRUST = 0.05


class Prefix(NamedTuple):
    """The chain of hashes of a prompt's prefix, and the length of the whole prompt in bytes.

    `hint`: the hash of the conversation that the client names for the prompt, empty if it names none.
    """

    hashes: tuple[bytes, ...]
    prompt_bytes: int
    hint: bytes = b""

    @property
    def announced(self) -> bytes:
        """Return the hashes by which other gateways find the prompt's later turns."""
        return b"".join((*self.hashes[-1:], self.hint))


class Holding(NamedTuple):
    """The epoch in which a site computed a prefix: EPOCH_S from `since_s`."""

    site: str
    since_s: float


Holders = tuple[Holding, ...]
NOBODY: Holders = ()
COMMON: Holders = (Holding("", inf),)
"""The holders of a prefix that more than MAX_HOLDERS sites hold, such as a common system prompt."""


class Evidence(NamedTuple):
    """Why a site is expected to have a share of a prompt cached: it computed the prefix at `since_s`, or, if
    `hint` is not empty, it computed a prompt of the same conversation.
    """

    share: float
    since_s: float
    hint: bytes


class Cached(NamedTuple):
    """How much of a prompt is expected in the cache of each site. `elsewhere` applies to sites not named.

    The values are shares of the prompt, 0 to 1, from `PrefixIndex.expected`, and tokens from `times`.
    """

    by_site: Mapping[str, float]
    elsewhere: float = 0.0
    evidence: Mapping[str, Evidence] = MappingProxyType({})

    def at(self, site: str) -> float:
        """Return the share, or the tokens, expected at a site."""
        return self.by_site.get(site, self.elsewhere)

    def times(self, tokens: float) -> Cached:
        """Convert the shares to tokens of a prompt of `tokens`."""
        if not self.by_site:
            return NOTHING_CACHED
        by_site = {site: share * tokens for site, share in self.by_site.items()}
        return Cached(by_site, self.elsewhere * tokens, self.evidence)


NOTHING_CACHED = Cached(MappingProxyType({}))


def prefix_of(prompt: Prompt, tenant: str, model: str, hint: str = "") -> Prefix:
    """Return the prefix of a prompt. All gateways compute the same hashes. `hint`: the client's name of the
    conversation, or empty.
    """
    hasher = _salted(tenant, model).copy()
    data, prompt_bytes = _canonical(prompt)
    hashes = []
    for begin, end in SAMPLES[: bisect_right(ENDS, len(data))]:
        hasher.update(data[begin:end])
        hashes.append(hasher.digest()[:HASH_BYTES])
    return Prefix(tuple(hashes), prompt_bytes, _hint_hash(tenant, model, hint) if hint else b"")


def _hint_hash(tenant: str, model: str, hint: str) -> bytes:
    hasher = _salted(tenant, model).copy()
    hasher.update(b"\0hint\0" + hint.encode(errors="surrogatepass"))
    return hasher.digest()[:HASH_BYTES]


@lru_cache(maxsize=1024)
def _salted(tenant: str, model: str) -> _Hash:
    return sha256(f"{tenant}\0{model}\0".encode())


def _canonical(prompt: Prompt) -> tuple[bytes, int]:
    """Return the first bytes of a prompt and the length of the whole prompt in bytes. The order is that of
    chat templates, with tools before messages.
    """
    if isinstance(prompt, Pooling):
        return b"", 0  # pooling inputs have no common prefix
    if isinstance(prompt, str):
        return _encoded(prompt[:MAX_CHARS], len(prompt))
    if not isinstance(prompt, Chat):
        ids = array("I", prompt[: MAX_CHARS // 4])
        return ids.tobytes(), ids.itemsize * len(prompt)
    parts = [prompt.tools_json, prompt.template_kwargs_json]
    for message in prompt.messages:
        parts += (message.role, message.name, message.reasoning, message.tool_calls_json)
        parts.append(message.content if message.images is None else message.images.content_json)
    chars = sum(map(len, parts)) + len(parts) - 1
    if chars > MAX_CHARS:
        parts = _beginning(parts)
    return _encoded("\0".join(parts), chars)


def _beginning(parts: Iterable[str]) -> list[str]:
    """Truncate parts, which are joined by one character, to MAX_CHARS in total."""
    kept, left = [], MAX_CHARS
    for part in parts:
        if left <= 0:
            break
        kept.append(part[:left])
        left -= len(part) + 1
    return kept


def _encoded(text: str, chars: int) -> tuple[bytes, int]:
    """Return the text in UTF-8, and the approximate length in bytes of the whole prompt of `chars`."""
    data = text.encode(errors="surrogatepass")
    return data, len(data) if len(text) == chars else len(data) * chars // len(text)


class _SiteCache:
    """The state of the prefix cache of one site. Prefixes computed up to `lost_s` are evicted."""

    __slots__ = ("_ends", "alone", "computed_tokens", "holding", "lost_s", "trust")

    def __init__(self, site: str, now_s: float) -> None:
        self.trust = 1.0
        self.lost_s = -inf
        self.computed_tokens = 0  # by the site since its start; 0: unknown
        self._ends: deque[tuple[float, int]] = deque(maxlen=MAX_EPOCHS)
        """The beginning of each epoch, and `computed_tokens` at its end."""
        self.begin_epoch(site, now_s)

    def begin_epoch(self, site: str, now_s: float) -> None:
        self.holding = Holding(site, now_s)
        self.alone: Holders = (self.holding,)

    def extend_epoch(self) -> None:
        """Set the current epoch's count of computed tokens, as its end so far."""
        if self._ends and self._ends[-1][0] == self.holding.since_s:
            self._ends.pop()
        self._ends.append((self.holding.since_s, self.computed_tokens))

    def advance(self, computed_tokens: int, room_tokens: int) -> None:
        """Record the site's count of computed tokens, and mark the epochs that it has evicted as lost."""
        if not self.computed_tokens:
            self._ends.clear()  # recorded while the count was unknown
        self.computed_tokens = computed_tokens
        evicted_tokens = computed_tokens - EVICTED_AFTER * room_tokens
        while self._ends and self._ends[0][1] < evicted_tokens:
            self.lost_s = max(self.lost_s, self._ends.popleft()[0])

    def lose(self) -> None:
        """Mark all prefixes as lost, after a restart of the site."""
        self.lost_s, self.computed_tokens = self.holding.since_s, 0


class PrefixIndex:
    """Maps hashes to the sites that hold them, bounded in number and age. Not thread-safe.

    There are two generations. New entries go to the younger one. When that is full or old, it becomes the
    older one, and the previous older one is dropped. Caches are assumed to be LRU: prefixes from before a
    site computed EVICTED_AFTER times the tokens that it has room for count as evicted. The cached tokens that
    sites report correct the expectations: `trust` is the smoothed share of an expectation that came true, and
    prefixes older than an evicted one count as evicted, too.
    """

    def __init__(self, max_prefixes: int = MAX_PREFIXES, max_age_s: float = MAX_AGE_S) -> None:
        self._max_young = max_prefixes // 2
        self._max_age_s = max_age_s
        self._began_s = 0.0
        self._young: dict[bytes, Holders] = {}
        self._old: dict[bytes, Holders] = {}
        self._caches: dict[str, _SiteCache] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def record(self, prefix: Prefix, site: str, now_s: float) -> None:
        """Record that a site has computed a prompt."""
        cache = self._cache_of(site, len(prefix.hashes) + 1, now_s)
        self._put(reversed(prefix.hashes), cache)
        if prefix.hint:
            self._put((prefix.hint,), cache)

    def record_announced(self, announced: bytes, site: str, now_s: float) -> None:
        """Record the prompts that a site has computed for other gateways, `Prefix.announced` of each."""
        hashes = [announced[at : at + HASH_BYTES] for at in range(0, len(announced), HASH_BYTES)]
        cache = self._cache_of(site, len(hashes), now_s)
        for each in hashes:
            self._put((each,), cache)

    def expected(self, prefix: Prefix, sites: Sequence[str] = ()) -> Cached:
        """Return the share of a prompt that each site is expected to have cached.

        `sites`: the sites that may answer, if so few that all can be known as holders, else empty. A prefix
        that all of them hold favours none, like a prefix of more than MAX_HOLDERS holders.
        """
        if not self._caches:
            return NOTHING_CACHED
        held, common_bytes = self._held(prefix)
        if sites and all(site in held for site in sites):
            common_bytes = max(common_bytes, min(held[site][0] for site in sites))
            held = {site: each for site, each in held.items() if each[0] > common_bytes}
        if not held:
            return NOTHING_CACHED
        per_byte = 1.0 / prefix.prompt_bytes
        shares, evidence, elsewhere = {}, {}, common_bytes * per_byte
        for site, (end, since_s, hint) in held.items():
            share = end * per_byte
            shares[site] = max(elsewhere, share * self._caches[site].trust)
            if end >= MIN_LEARNED_BYTES:
                evidence[site] = Evidence(share, since_s, hint)
        return Cached(shares, elsewhere, evidence)

    def advance(self, site: str, computed_tokens: int, room_tokens: int) -> None:
        """Update the tokens that a site has computed since its start, and the room of its cache in tokens.

        0 means unknown, and is ignored.
        """
        cache = self._caches.get(site)
        if cache is not None and room_tokens > 0 and computed_tokens > cache.computed_tokens:
            cache.advance(computed_tokens, room_tokens)

    def correct(self, expected: Cached, site: str, found: float) -> None:
        """Correct the expectation of a site by the share of the prompt that it found in its cache."""
        evidence, cache = expected.evidence.get(site), self._caches.get(site)
        if evidence is None or cache is None:
            return
        came_true = min(1.0, found / evidence.share)
        if evidence.hint:
            if came_true < LOST_SHARE:
                self._young[evidence.hint] = COMMON  # from now on the hint favours no site
            return
        if came_true < LOST_SHARE:
            cache.lost_s = max(cache.lost_s, evidence.since_s)
        cache.trust = max(MIN_TRUST, cache.trust + TRUST_STEP * (came_true - cache.trust))

    def forget(self, site: str) -> None:
        """Mark all prefixes of a site as evicted, after its restart."""
        if cache := self._caches.get(site):
            cache.lose()

    def _held(self, prefix: Prefix) -> tuple[dict[str, tuple[float, float, bytes]], float]:
        """Return the longest prefix of each site, as its bytes, its epoch's start and the hint if only the
        hint names the site, and the bytes of the common prefix.
        """
        held: dict[str, tuple[float, float, bytes]] = {}
        common_bytes = 0.0
        for end, holders in self._held_differently(prefix.hashes):
            if holders is COMMON:
                common_bytes = end  # and so are all shorter ones
                break
            for holding in holders:
                if holding.site not in held and self._is_kept(holding):
                    held[holding.site] = (end, holding.since_s, b"")
        if prefix.hint:
            hinted_bytes = HINTED_SHARE * prefix.prompt_bytes
            for holding in self._holders(prefix.hint):
                if self._is_kept(holding) and held.get(holding.site, (0.0,))[0] < hinted_bytes:
                    held[holding.site] = (hinted_bytes, holding.since_s, prefix.hint)
        return held, common_bytes

    def _held_differently(self, hashes: Sequence[bytes]) -> Iterator[tuple[int, Holders]]:
        """Yield the length in bytes and the holders of the longest known prefix, then of each shorter one
        whose holders differ from those of the one before.

        A site that holds a prefix holds all shorter ones, so a binary search finds where the holders change,
        with few lookups in the large map. A prefix announced by another gateway is missed if it lies between
        two prefixes with the same holders.
        """
        at, holders = len(hashes), NOBODY
        while at and not holders:
            at -= 1
            holders = self._holders(hashes[at])
        if holders:
            yield ENDS[at], holders
        while at and (of_first := self._holders(hashes[0])) is not holders:
            low, lower = 0, of_first  # differs from that of `at`; `low` goes up to the last that differs
            while at - low > 1:
                middle = (low + at) // 2
                if (between := self._holders(hashes[middle])) is holders:
                    at = middle
                else:
                    low, lower = middle, between
            at, holders = low, lower
            yield ENDS[at], holders

    def _holders(self, hashed: bytes) -> Holders:
        return self._young.get(hashed) or self._old.get(hashed) or NOBODY

    def _is_kept(self, holding: Holding) -> bool:
        """Return whether a prefix of this epoch is still in the site's cache, as far as is known."""
        cache = self._caches.get(holding.site)
        return cache is not None and holding.since_s > cache.lost_s

    def _cache_of(self, site: str, new: int, now_s: float) -> _SiteCache:
        """Return the cache of a site in the current epoch, after making room for `new` more hashes."""
        if now_s - self._began_s > self._max_age_s or len(self._young) + new > self._max_young:
            self._caches = {k: v for k, v in self._caches.items() if v.holding.since_s >= self._began_s}
            self._old, self._young, self._began_s = self._young, {}, now_s
        cache = self._caches.get(site)
        if cache is None:
            cache = self._caches[site] = _SiteCache(site, now_s)
        elif now_s - cache.holding.since_s > EPOCH_S or cache.holding.since_s <= cache.lost_s:
            cache.begin_epoch(site, now_s)
        cache.extend_epoch()
        return cache

    def _put(self, hashes: Iterable[bytes], cache: _SiteCache) -> None:
        """Add a site to the holders of hashes, longest prefix first. Stop at one that it is known to hold."""
        young, old, now, alone = self._young, self._old, cache.holding, cache.alone
        before: Holders | None = None
        after = alone
        for each in hashes:
            holders = young.get(each)
            if holders is None:
                holders = old.get(each)
            elif holders is alone or holders is COMMON or now in holders:
                return  # and so are all shorter ones
            if holders is not before:  # equal holders share one object, which lookups compare by identity
                before, after = holders, alone if holders is None else self._with(holders, cache)
            young[each] = after

    def _with(self, holders: Holders, cache: _SiteCache) -> Holders:
        if holders is COMMON:
            return COMMON
        now = cache.holding
        others = tuple(each for each in holders if each.site != now.site and self._is_kept(each))
        if not others:
            return cache.alone
        return (*others, now) if len(others) < MAX_HOLDERS else COMMON
