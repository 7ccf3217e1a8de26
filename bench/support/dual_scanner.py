"""The order of BlendServe (Zhao et al., 2024): groups by density, taken from both ends of one list.

Its steps, each no less kind to it than the paper: a hundredth of the lines is run first, and from then on the
means of their lengths, by group, are all that it knows; groups are sorted by density, and the lines in them;
a group is split as long as a hundredth of its work pays for computing its beginning again; memory is divided
between both ends by their densities. Several sites get lists of equal work and density.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from bench.support.offline_chooser import Chooser
from bench.support.offline_work import H200, Line
from site_engine.core.scheduler import Scheduler

SAMPLED_SHARE = 0.01
SPLIT_SHARE = 0.01


class Part(NamedTuple):
    """Lines that run one after another, and their seconds of computing and of reading memory."""

    lines: list[int]
    compute_s: float
    memory_s: float

    @property
    def density(self) -> float:
        return self.compute_s / self.memory_s


def sampled(lines: Sequence[Line], seed: int = 0) -> tuple[list[int], list[Line]]:
    """Return which lines run first, and all with the lengths that are known once those have ended."""
    rnd = random.Random(seed)
    first = sorted(rnd.sample(range(len(lines)), max(1, round(SAMPLED_SHARE * len(lines)))))
    of_group: dict[int, list[int]] = {}
    for at in first:
        of_group.setdefault(lines[at].group, []).append(lines[at].response_tokens)
    of_all = fmean(lines[at].response_tokens for at in first)
    means = {group: round(fmean(lengths)) for group, lengths in of_group.items()}
    known = [line._replace(response_tokens=means.get(line.group, round(of_all))) for line in lines]
    for at in first:
        known[at] = lines[at]
    return first, known


def parts_of(lines: Sequence[Line], which: Sequence[int]) -> list[Part]:
    """Return the parts of the prefix tree, the most dense first."""
    groups: dict[int, list[int]] = {}
    for at in which:
        groups.setdefault(lines[at].group, []).append(at)
    parts = [part for its in groups.values() for part in _split(lines, its)]
    return sorted(parts, key=lambda part: -part.density)


def _split(lines: Sequence[Line], its: list[int]) -> list[Part]:
    """Split a group, its lines by density, as often as SPLIT_SHARE of its work allows."""
    alone = {at: H200.least([lines[at]]) for at in its}
    ranked = sorted(its, key=lambda at: -alone[at][0] / alone[at][1])
    shared = lines[its[0]].shared_tokens
    own = sum(lines[at].prompt_tokens - shared + lines[at].response_tokens for at in its) + shared
    count = min(len(its), 1 + int(SPLIT_SHARE * own / max(1, shared)))
    cuts = [len(its) * at // count for at in range(count + 1)]
    pieces = [ranked[begin:end] for begin, end in pairwise(cuts)]
    return [Part(piece, *H200.least([lines[at] for at in piece])) for piece in pieces]


def split_over(parts: Sequence[Part], sites: int) -> list[list[int]]:
    """Return the lines of each site: the largest part first, to the site with least of what it takes most."""
    given: list[list[int]] = [[] for _ in range(sites)]
    compute_s, memory_s = [0.0] * sites, [0.0] * sites
    for part in sorted(parts, key=lambda part: -max(part.compute_s, part.memory_s)):
        work = compute_s if part.density > 1 else memory_s
        site = work.index(min(work))
        given[site] += part.lines
        compute_s[site] += part.compute_s
        memory_s[site] += part.memory_s
    return given


class DualScanner(Chooser):
    """`first` lines, then the others of `which`, or of all, from both ends; lengths are as in `forecasts`."""

    def __init__(
        self, forecasts: Sequence[Line], first: Sequence[int] = (), which: Sequence[int] | None = None
    ) -> None:
        super().__init__(forecasts)
        self._first = list(first)[::-1]
        of = range(len(forecasts)) if which is None else which
        parts = parts_of(forecasts, sorted(set(of) - set(first)))
        self._line = [at for part in parts for at in part.lines]
        self._density = [part.density for part in parts for _ in part.lines]
        memory_s = sum(part.memory_s for part in parts)
        self._whole = sum(part.compute_s for part in parts) / memory_s if memory_s else 0.0
        self._left, self._right = 0, len(self._line) - 1
        self._used = [0.0, 0.0]
        self._side: dict[int, int] = {}
        self._now = 0

    def peek(self, scheduler: Scheduler) -> int | None:
        if self._first:
            self._now = 0
            return self._first[-1]
        if self._left > self._right:
            return None
        first, last = self._density[self._left], self._density[self._right]
        part = min(1.0, max(0.0, (self._whole - last) / (first - last))) if first > last else 1.0
        memory = scheduler.kv_cache_manager.pool.capacity * scheduler.kv_cache_manager.pool.page_size
        for side, share in ((0, part), (1, 1 - part)):
            at = self._line[self._left if side == 0 else self._right]
            if self._used[side] + self._need(at) <= share * memory or not scheduler.running:
                self._now = side
                return at
        return None

    def taken(self, at: int) -> None:
        self._side[at] = self._now
        self._used[self._now] += self._need(at)
        if self._first:
            self._first.pop()
        elif self._now == 0:
            self._left += 1
        else:
            self._right -= 1

    def ended(self, at: int) -> None:
        self._used[self._side.pop(at)] -= self._need(at)

    def _need(self, at: int) -> float:
        line = self.lines[at]
        return line.prompt_tokens - line.shared_tokens + line.response_tokens
