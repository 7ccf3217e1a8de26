"""Remember which sites computed the beginnings of which prompts, and so hold them in their caches.

A prompt is cut into blocks, and each block's hash covers all before it: two prompts share as many hashes as
their common beginning has blocks. The hashes of tenants differ, as their caches do.
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
"""Blocks of one size, then as many of twice that size: beyond the first size, a block is at most a quarter of
the beginning that it ends.
"""
SIZES = 10  # 384 KiB in all
BLOCK_BYTES = tuple(FIRST_BLOCK_BYTES << size for size in range(SIZES) for _ in range(BLOCKS_PER_SIZE))
ENDS = tuple(accumulate(BLOCK_BYTES))
"""The bytes up to the end of each block."""
READ_BYTES = 256
"""Of a longer block only its last bytes are hashed, so that a prompt of megabytes costs little more than a
short one. Text that is inserted or removed before them moves them, and so changes the hash; a replacement of
the same length may not.
"""
SAMPLES = tuple((end - min(size, READ_BYTES), end) for size, end in zip(BLOCK_BYTES, ENDS, strict=True))
"""The bytes [begin, end) of each block that are hashed."""
MAX_CHARS = ENDS[-1]
"""Prompts are compared up to this length."""
MAX_PREFIXES = 2**20
"""Remembered hashes, about 100 bytes each."""
MAX_AGE_S = 600.0
"""An entry that was of no use for this long is forgotten, within twice the time."""
MAX_HOLDERS = 4
"""A beginning that more sites hold is expected at every site, so that it favours none."""
HINTED_SHARE = 0.5
"""The part of a prompt that is expected at the site of its conversation if only a hint names it."""
EPOCH_S = 5.0
"""What a site computes within this time counts as cached at the same time."""
EVICTED_AFTER = 1.5
"""Once a site has computed this many times the tokens that its cache has room for, next to nothing is left of
what it had before. Measured: docs/decisions/prefix-affinity.md.
"""
MAX_EPOCHS = 256
"""Of a site; an older one is forgotten by its age alone."""
LOST_SHARE = 0.5
"""A site that had less than this part of what was expected has evicted it, and with it all older prefixes."""
MIN_LEARNED_BYTES = 256
"""Less than this is not learned from: caches keep whole pages of tokens."""
TRUST_STEP = 0.2
MIN_TRUST = 0.05


class Prefix(NamedTuple):
    """A prompt's beginning as a chain of hashes, and the length of the whole prompt.

    `hint`: the hash of the conversation that the client says the prompt belongs to; empty if it says nothing.
    """

    hashes: tuple[bytes, ...]
    prompt_bytes: int
    hint: bytes = b""

    @property
    def announced(self) -> bytes:
        """Return the hashes by which other gateways find the prompt's later turns."""
        return b"".join((*self.hashes[-1:], self.hint))


class Holding(NamedTuple):
    """What a site computed within EPOCH_S from `since_s`."""

    site: str
    since_s: float


Holders = tuple[Holding, ...]
NOBODY: Holders = ()
COMMON: Holders = (Holding("", inf),)
"""The holders of what more than MAX_HOLDERS sites hold, like a system prompt that all queries share."""


class Evidence(NamedTuple):
    """Why a site is expected to have a share of a prompt: it computed that at `since_s`, or, where it is not
    empty, `hint` says so.
    """

    share: float
    since_s: float
    hint: bytes


class Cached(NamedTuple):
    """How much of a prompt is expected in the cache of each site; `elsewhere` is for those not named.

    Shares of the prompt, from 0 to 1, as `PrefixIndex.expected` returns them; its tokens after `times`.
    """

    by_site: Mapping[str, float]
    elsewhere: float = 0.0
    evidence: Mapping[str, Evidence] = MappingProxyType({})

    def at(self, site: str) -> float:
        """Return the share or the tokens that are expected at a site."""
        return self.by_site.get(site, self.elsewhere)

    def times(self, tokens: float) -> Cached:
        """Return the shares as tokens of a prompt of so many."""
        if not self.by_site:
            return NOTHING_CACHED
        by_site = {site: share * tokens for site, share in self.by_site.items()}
        return Cached(by_site, self.elsewhere * tokens, self.evidence)


NOTHING_CACHED = Cached(MappingProxyType({}))


def prefix_of(prompt: Prompt, tenant: str, model: str, hint: str = "") -> Prefix:
    """Return the chain of a prompt. The hashes are the same in every gateway. `hint`: the client's name of
    the conversation.
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
    """Return the beginning of a prompt in the order in which templates write it, functions before turns, and
    the length of the whole in bytes.
    """
    if isinstance(prompt, Pooling):
        return b"", 0  # its inputs have nothing in common
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
    """Return the first MAX_CHARS of parts, one character between each two."""
    kept, left = [], MAX_CHARS
    for part in parts:
        if left <= 0:
            break
        kept.append(part[:left])
        left -= len(part) + 1
    return kept


def _encoded(text: str, chars: int) -> tuple[bytes, int]:
    """Return the beginning of a text of `chars` in UTF-8, and about the length of the whole."""
    data = text.encode(errors="surrogatepass")
    return data, len(data) if len(text) == chars else len(data) * chars // len(text)


class _SiteCache:
    """What is known of the cache of one site. What it computed until `lost_s` is no longer there."""

    __slots__ = ("_ends", "alone", "computed_tokens", "holding", "lost_s", "trust")

    def __init__(self, site: str, now_s: float) -> None:
        self.trust = 1.0
        self.lost_s = -inf
        self.computed_tokens = 0  # since the site started; 0: unknown
        self._ends: deque[tuple[float, int]] = deque(maxlen=MAX_EPOCHS)
        """The beginning of each epoch, and `computed_tokens` at its end."""
        self.begin_epoch(site, now_s)

    def begin_epoch(self, site: str, now_s: float) -> None:
        self.holding = Holding(site, now_s)
        self.alone: Holders = (self.holding,)

    def extend_epoch(self) -> None:
        """Note the count of computed tokens: the epoch does not end before it."""
        if self._ends and self._ends[-1][0] == self.holding.since_s:
            self._ends.pop()
        self._ends.append((self.holding.since_s, self.computed_tokens))

    def advance(self, computed_tokens: int, room_tokens: int) -> None:
        """Record the site's count of computed tokens; take for lost what has been evicted by it."""
        if not self.computed_tokens:
            self._ends.clear()  # at unknown counts
        self.computed_tokens = computed_tokens
        evicted_tokens = computed_tokens - EVICTED_AFTER * room_tokens
        while self._ends and self._ends[0][1] < evicted_tokens:
            self.lost_s = max(self.lost_s, self._ends.popleft()[0])

    def lose(self) -> None:
        """Take all for lost: the site has started anew."""
        self.lost_s, self.computed_tokens = self.holding.since_s, 0


class PrefixIndex:
    """Which sites hold which hashes, bounded in number and age. Not thread-safe.

    Two generations: new entries go to the younger; when it is full or old, it becomes the older, and what was
    that is forgotten. Caches evict the least recently used first: what a site had before it computed
    EVICTED_AFTER times the tokens that it has room for counts as evicted. Its reports of what it really had
    correct the expectations: `trust` is the part of them that came true, and what is older than a prefix that
    was evicted counts as evicted, too.
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
        """Record that a site has computed prompts for other gateways: `Prefix.announced` of each."""
        hashes = [announced[at : at + HASH_BYTES] for at in range(0, len(announced), HASH_BYTES)]
        cache = self._cache_of(site, len(hashes), now_s)
        for each in hashes:
            self._put((each,), cache)

    def expected(self, prefix: Prefix, sites: Sequence[str] = ()) -> Cached:
        """Return the share of a prompt that each site is expected to have.

        `sites`: those that may answer, where they are few enough for all of them to be known as holders. What
        all of them hold favours none, as if more than MAX_HOLDERS held it.
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
        """Learn how many tokens a site has computed since it started, and has room for; 0 is unknown."""
        cache = self._caches.get(site)
        if cache is not None and room_tokens > 0 and computed_tokens > cache.computed_tokens:
            cache.advance(computed_tokens, room_tokens)

    def correct(self, expected: Cached, site: str, found: float) -> None:
        """Learn the share that a site really had of a prompt."""
        evidence, cache = expected.evidence.get(site), self._caches.get(site)
        if evidence is None or cache is None:
            return
        came_true = min(1.0, found / evidence.share)
        if evidence.hint:
            if came_true < LOST_SHARE:
                self._young[evidence.hint] = COMMON  # such a hint tells nothing
            return
        if came_true < LOST_SHARE:
            cache.lost_s = max(cache.lost_s, evidence.since_s)
        cache.trust = max(MIN_TRUST, cache.trust + TRUST_STEP * (came_true - cache.trust))

    def forget(self, site: str) -> None:
        """Forget what a site computed: it has started anew."""
        if cache := self._caches.get(site):
            cache.lose()

    def _held(self, prefix: Prefix) -> tuple[dict[str, tuple[float, float, bytes]], float]:
        """Return the bytes that each site holds, since when, and the hint where that alone says so; and the
        bytes that are common.
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
        """Yield the length in bytes and the holders of the longest beginning that is known, then of each
        shorter one whose holders differ from those of the one before.

        A site that holds a beginning holds all shorter ones, so a binary search finds where holders change:
        a lookup in a map of a million takes longer than a comparison. A beginning that another gateway
        announced, between two with the same holders, is not found.
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
        """Return whether what a site has computed then is still in its cache, as far as known."""
        cache = self._caches.get(holding.site)
        return cache is not None and holding.since_s > cache.lost_s

    def _cache_of(self, site: str, new: int, now_s: float) -> _SiteCache:
        """Return the cache of a site, in the epoch of now, once there is room for so many new entries."""
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
        """Add a site to the holders of hashes, the longest first, until one of which it is known already."""
        young, old, now, alone = self._young, self._old, cache.holding, cache.alone
        before: Holders | None = None
        after = alone
        for each in hashes:
            holders = young.get(each)
            if holders is None:
                holders = old.get(each)
            elif holders is alone or holders is COMMON or now in holders:
                return  # and so it is of all shorter ones
            if holders is not before:  # equal holders are one object, by which a lookup compares them
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
