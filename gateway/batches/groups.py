"""Finds the lines of a batch that begin alike, from the hashes of their beginnings. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gateway.routing.prefixes import ENDS, HASH_BYTES, Prefix


class Group(NamedTuple):
    """`first`: the index of the first line of the group; `share`: the common part of this line's prompt."""

    first: int
    share: float


class PrefixGroups:
    """Collects the hashes of lines, at most 60 of 8 bytes each, until all have been added."""

    def __init__(self) -> None:
        self._hashes = bytearray()
        self._counts = array("B")
        self._bytes = array("Q")

    def add(self, prefix: Prefix) -> None:
        """Add the next line."""
        self._hashes += b"".join(prefix.hashes)
        self._counts.append(len(prefix.hashes))
        self._bytes.append(max(1, prefix.prompt_bytes))

    def find(self) -> Sequence[Group]:
        """Return the group of each line: of its beginnings the one that saves most of what is computed.

        A beginning of b bytes that n lines have saves b x (n - 1) / n of each. All lines of a document go
        together, though each begins with the instructions that those of other documents begin with, too.
        """
        counts = np.frombuffer(self._counts, np.uint8).astype(np.int64)
        hashes = np.frombuffer(bytes(self._hashes), f"<u{HASH_BYTES}")
        lines = np.repeat(np.arange(len(counts)), counts)
        depth = np.arange(len(hashes)) - np.repeat(counts.cumsum() - counts, counts)
        _, first, which, times = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
        saved = np.array(ENDS, float)[depth] * (1 - 1 / times[which])
        # the last of equals is the deepest: a stable sort by line and savings
        best = np.lexsort((depth, saved, lines))[counts.cumsum()[counts > 0] - 1]
        found = [Group(index, 0.0) for index in range(len(counts))]
        for at in best[saved[best] > 0].tolist():
            line = int(lines[at])
            share = min(1.0, ENDS[depth[at]] / self._bytes[line])
            found[line] = Group(int(lines[first[which[at]]]), share)
        return found
