"""Route by what a gateway knows of the sites' prefix caches: Mico's way, and those of others.

Each object is one gateway's state. Those of others choose a site by themselves, and leave nothing to the
policy but the first turn of a session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from math import inf, log
from types import MappingProxyType

import numpy as np

from gateway.routing.fleet import Fleet, kv_tokens
from gateway.routing.prefixes import MAX_HOLDERS, NOTHING_CACHED, Cached, PrefixIndex
from mico.errors import CommandFailed, ExitCode
from mico.simulation.queries import Query

KEY_BLOCKS = 2
"""The blocks of a prompt that consistent hashing looks at."""
BOUND = 1.25
"""A site takes at most this times its share of the requests (consistent hashing with bounded loads)."""

TELLING_INTERVAL_S = 1.0
"""As sites tell gateways of prompts."""
CACHE_THRESHOLD, BALANCE_ABSOLUTE, BALANCE_RELATIVE = 0.3, 64, 1.5
"""The defaults of SGLang's router."""


class Affinity:
    """A gateway that knows nothing of caches. `chooses`: it takes the site from `choose`, also in bursts."""

    chooses = False

    def expected(self, query: Query, fleet: Fleet, now_s: float) -> Cached:
        """Return the shares of a prompt that sites are expected to have."""
        return NOTHING_CACHED

    def choose(self, query: Query, fleet: Fleet) -> str | None:
        """Return the site for a query, or None to let the policy decide."""
        return None

    def assigned(self, query: Query, site: str) -> None: ...

    def started(self, query: Query, site: str, now_s: float) -> None:
        """Learn that a site has computed a prompt."""

    def ended(self, query: Query, site: str, expected: Cached, cached_tokens: int) -> None:
        """Learn what a site really had."""

    def forget(self, site: str) -> None:
        """Learn that a site starts with an empty cache."""


AffinityFactory = Callable[[int], Sequence[Affinity]]
"""Makes the affinities of so many gateways."""


class PrefixAffinity(Affinity):
    """Mico's: expected tokens in the cache shorten the prefill in the estimates.

    A site tells each gateway what it computed for the others, once in TELLING_INTERVAL_S at most.
    """

    def __init__(self, others: Sequence[PrefixAffinity] = ()) -> None:
        self.index = PrefixIndex()
        self._others = others
        self._coming: dict[str, list[bytes]] = {}
        self._told_s: dict[str, float] = {}

    def expected(self, query: Query, fleet: Fleet, now_s: float) -> Cached:
        for each in fleet.sites:
            self.index.advance(each.name, each.load.computed_tokens_total, kv_tokens(each))
        for site in [each for each in self._coming if self._told_s.get(each, -inf) <= now_s]:
            self.index.record_announced(b"".join(self._coming.pop(site)), site, now_s)
            self._told_s[site] = now_s + TELLING_INTERVAL_S
        few = len(fleet.sites) <= MAX_HOLDERS + 1
        return self.index.expected(query.prefix, [each.name for each in fleet.sites] if few else ())

    def started(self, query: Query, site: str, now_s: float) -> None:
        self.index.record(query.prefix, site, now_s)
        for other in self._others:
            if other is not self:
                other._coming.setdefault(site, []).append(query.prefix.announced)

    def ended(self, query: Query, site: str, expected: Cached, cached_tokens: int) -> None:
        self.index.correct(expected, site, cached_tokens / query.prompt_tokens)

    def forget(self, site: str) -> None:
        self.index.forget(site)


class ConsistentHash(Affinity):
    """Consistent hashing of a prompt's first blocks, by speed, with bounded loads (Mirrokni et al., 2018)."""

    chooses = True

    def choose(self, query: Query, fleet: Fleet) -> str | None:
        at = fleet.figures
        speeds = at.slots / at.iteration_s
        bounds = BOUND * speeds / speeds.sum() * (at.requests.sum() + 1)
        key = query.blocks[:KEY_BLOCKS]
        ranks = [
            speed / -log(_uniform(site.name, key))
            for site, speed in zip(fleet.sites, speeds.tolist(), strict=True)
        ]
        for place in sorted(range(len(ranks)), key=lambda place: -ranks[place]):
            if at.requests[place] < max(1.0, bounds[place]):
                return fleet.sites[place].name
        return None


def _uniform(site: str, key: tuple[int, ...]) -> float:
    digest = blake2b(repr((site, key)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest) + 1) / (2**64 + 1)


class SessionStickiness(Affinity):
    """A session stays where the policy put its first turn, with crowding in full. All gateways know, as by a
    cookie.
    """

    chooses = True

    def __init__(self, sites: dict[int, str]) -> None:
        self._sites = sites

    def choose(self, query: Query, fleet: Fleet) -> str | None:
        return self._sites.get(query.session)

    def assigned(self, query: Query, site: str) -> None:
        self._sites.setdefault(query.session, site)


class ApproximateTree(Affinity):
    """An approximate prefix tree for each site and a balance threshold, as SGLang's router.

    While the most loaded site has over `absolute` requests more than the least loaded, and BALANCE_RELATIVE
    times as many, the least loaded gets the query; else the site that got the longest prefix of it, if that
    is more than CACHE_THRESHOLD of the prompt, or the one that got the fewest different blocks.
    """

    chooses = True

    def __init__(self, absolute: int = BALANCE_ABSOLUTE) -> None:
        self._absolute = absolute
        self._blocks: dict[str, set[int]] = {}
        self._loads: dict[str, int] = {}

    def choose(self, query: Query, fleet: Fleet) -> str | None:
        names = [site.name for site in fleet.sites]
        loads = [self._loads.get(name, 0) for name in names]
        if max(loads) - min(loads) > self._absolute and max(loads) > BALANCE_RELATIVE * min(loads):
            return names[int(np.argmin(loads))]
        matches = [self._matched(name, query.blocks) for name in names]
        if max(matches) > CACHE_THRESHOLD * len(query.blocks):
            return names[int(np.argmax(matches))]
        return min(names, key=lambda name: len(self._blocks.get(name, ())))

    def _matched(self, site: str, blocks: Sequence[int]) -> int:
        known = self._blocks.get(site, ())
        return next((at for at, block in enumerate(blocks) if block not in known), len(blocks))

    def assigned(self, query: Query, site: str) -> None:
        self._loads[site] = self._loads.get(site, 0) + 1
        self._blocks.setdefault(site, set()).update(query.blocks)

    def ended(self, query: Query, site: str, expected: Cached, cached_tokens: int) -> None:
        self._loads[site] -= 1


def without_affinity(gateways: int) -> Sequence[Affinity]:
    return [Affinity() for _ in range(gateways)]


def _prefixes(gateways: int) -> Sequence[Affinity]:
    all_of_them: list[PrefixAffinity] = []
    all_of_them += [PrefixAffinity(all_of_them) for _ in range(gateways)]
    return all_of_them


def _untold_prefixes(gateways: int) -> Sequence[Affinity]:
    return [PrefixAffinity() for _ in range(gateways)]


def _consistent_hash(gateways: int) -> Sequence[Affinity]:
    return [ConsistentHash() for _ in range(gateways)]


def _sessions(gateways: int) -> Sequence[Affinity]:
    sites: dict[int, str] = {}
    return [SessionStickiness(sites) for _ in range(gateways)]


def _trees(absolute: int, gateways: int) -> Sequence[Affinity]:
    return [ApproximateTree(absolute) for _ in range(gateways)]


AFFINITIES: Mapping[str, AffinityFactory] = MappingProxyType(
    {
        "prefix": _prefixes,
        "untold": _untold_prefixes,
        "none": without_affinity,
        "hash": _consistent_hash,
        "session": _sessions,
        "tree": partial(_trees, BALANCE_ABSOLUTE),
    }
)


def affinity(name: str) -> AffinityFactory:
    """Return the affinity of a name; `tree:8` is a tree with another threshold. Raises CommandFailed."""
    kind, _, absolute = name.partition(":")
    if kind == "tree" and absolute.isdecimal():
        return partial(_trees, int(absolute))
    if name not in AFFINITIES:
        raise CommandFailed(
            f"there is no affinity {name!r}",
            tip=f"choose of {', '.join(AFFINITIES)}, tree:ABOVE",
            exit_code=ExitCode.WRONG_USAGE,
        )
    return AFFINITIES[name]
