"""Chooses the order in which the lines of a batch run; no other place does. Pure.

Works on arrays: 50,000 Python objects would hold the interpreter, and so every stream, while they are sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gateway.batches.values import Order

LOOSE_SHARE: Final = 0.02
"""The share of computing that may be lost so that lines run by length alone, apart from their group."""
LARGE_LOOSE_SHARE: Final = 0.25
"""The same of groups that can be split: lines of so many run at any time that their prefix stays cached."""
LENGTH_STEP: Final = 4.0
"""The lines of a group that can be split run apart where their lengths differ by this factor."""
GOLDEN_RATIO: Final = 0.6180339887498949
"""Its multiples, without their whole parts, lie evenly between 0 and 1 however many there are."""
PREFILL_HEAVY: Final = 4.0
"""Lines with so many prompt tokens for each token of the answer fill up the iterations of the others."""

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


class LineSizes(NamedTuple):
    """What the order depends on, one element a line: those of one `group` begin with the same
    `shared_tokens`.
    """

    group: Integers
    shared_tokens: Integers
    prompt_tokens: Integers
    response_tokens: Floats


def order(sizes: LineSizes, how: Order = Order.BLEND, at_once: int = 1) -> Integers:
    """Return the indices of the lines in the order of starting. `at_once`: those that all sites run."""
    return _blended(sizes, at_once) if how is Order.BLEND else _ORDERS[how](sizes)


def prefill_heavy(prompt_tokens: int, response_tokens: float) -> bool:
    """Return whether a line takes a device's computing rather than its memory."""
    return prompt_tokens >= PREFILL_HEAVY * response_tokens


def _longest_first(sizes: LineSizes) -> Integers:
    """A batch ends with its last line, and a long one that starts last would run alone (LPT, Graham 1969)."""
    return np.argsort(-sizes.response_tokens, kind="stable")


def _by_prefix(sizes: LineSizes) -> Integers:
    """Put the lines of a group behind its first one."""
    _, first, group = np.unique(sizes.group, return_index=True, return_inverse=True)
    return np.argsort(first[group], kind="stable")


def _blended(sizes: LineSizes, at_once: int) -> Integers:
    """Spread groups over the batch, the longer the earlier, so that each prefix is computed once.

    All long lines at first would fill a site's memory with few rows, and all short ones at last its rows with
    little memory; but a long line that starts last runs alone. So a group starts anywhere in the time in
    which even the longest line could start, and less by as much as its own longest takes of that: in a batch
    that takes no longer than the longest line, the longest groups start first. A group whose prefix is worth
    little is split, by length or into its lines.
    """
    turns = _longest_first(sizes)
    response = sizes.response_tokens[turns]
    _, first, group = np.unique(sizes.group[turns], return_index=True, return_inverse=True)
    lines, shared = np.bincount(group), sizes.shared_tokens[turns][first]
    tokens = np.bincount(group, sizes.prompt_tokens[turns] + response) - shared * lines
    is_split = shared <= LOOSE_SHARE * tokens
    is_loose = shared * lines <= np.where(is_split, LARGE_LOOSE_SHARE, LOOSE_SHARE) * tokens
    step = (np.log(np.maximum(1.0, response)) / log(LENGTH_STEP)).astype(np.int64)
    part = group * 1024 + np.where(is_split[group], step, 0)  # floats are below 4 ** 1024
    _, longest, part = np.unique(part, return_index=True, return_inverse=True)
    leader = np.where(is_loose[group], np.arange(len(turns)), longest[part])
    parts, rank = np.unique(leader, return_inverse=True)  # the longest first
    most = max(1.0, response.max(initial=0.0))
    room = max(0.0, 1.0 - most * at_once / max(1.0, response.sum()))
    start = np.arange(len(parts)) * GOLDEN_RATIO % 1.0 * room * (1.0 - response[parts] / most)
    return turns[np.lexsort((leader, first[group], start[rank]))]


_ORDERS: Final[Mapping[Order, Callable[[LineSizes], Integers]]] = {
    Order.LONGEST: _longest_first,
    Order.PREFIX: _by_prefix,
    Order.FILE: lambda sizes: np.arange(len(sizes.group)),
}
