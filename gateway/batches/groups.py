"""Finds the lines of a batch that begin alike, from the hashes of their beginnings. Pure."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gateway.routing.prefixes import ENDS, HASH_BYTES, Prefix


class Groups(NamedTuple):
    """Of each line, by its index, the first line that begins alike, and the share of its prompt that does."""

    first: NDArray[np.int64]
    share: NDArray[np.float64]


class Sharing(NamedTuple):
    """The groups of two lines or more, their lines, and the prompt tokens that need not be computed again."""

    groups: int
    lines: int
    tokens: int


def sharing(groups: Groups, prompt_tokens: NDArray[np.int64]) -> Sharing:
    """Return what the lines save if those of each group run one after another."""
    _, begun, lines = np.unique(groups.first, return_index=True, return_counts=True)
    shared = (groups.share * prompt_tokens).astype(np.int64)
    shared[begun] = 0  # computed for the first line of each group
    several = lines[lines > 1]
    return Sharing(len(several), int(several.sum()), int(shared.sum()))


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

    def find(self) -> Groups:
        """Return the group of each line: of its beginnings the one that saves most of what is computed.

        A beginning of b bytes that n lines have saves b x (n - 1) / n of each. All lines of a document go
        together, though each begins with the instructions that those of other documents begin with, too.
        """
        hashes = np.frombuffer(self._hashes, f"<u{HASH_BYTES}")
        counts = np.frombuffer(self._counts, np.uint8).astype(np.int64)
        begins = counts.cumsum() - counts
        group, common_bytes, saved = np.arange(len(counts)), np.zeros(len(counts)), np.zeros(len(counts))
        # prompts share hashes of one depth
        for depth, end in enumerate(ENDS[: max(self._counts, default=0)]):
            lines = np.flatnonzero(counts > depth)
            _, first, which, times = np.unique(
                hashes[begins[lines] + depth], return_index=True, return_inverse=True, return_counts=True
            )
            saves = end * (1 - 1 / times[which])
            better = (saves > 0) & (saves >= saved[lines])  # the deepest of equals
            found = lines[better]
            group[found] = lines[first[which[better]]]
            common_bytes[found], saved[found] = end, saves[better]
        return Groups(group, np.minimum(1.0, common_bytes / np.frombuffer(self._bytes, np.uint64)))
