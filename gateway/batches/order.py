"""Chooses the order in which the lines of a batch run; no other place does. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from math import log
from typing import Final, Protocol

from gateway.batches.values import Order

LOOSE_SHARE: Final = 0.02
"""The share of computing that may be lost so that lines run by length alone, apart from their group."""
LENGTH_STEP: Final = 4.0
"""The lines of a group that can be split run apart where their lengths differ by this factor."""


class Sized(Protocol):
    """What the order depends on: lines of one `group` begin with the same `shared_tokens`."""

    @property
    def group(self) -> int: ...
    @property
    def shared_tokens(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def response_tokens(self) -> float: ...


def order(lines: Sequence[Sized], how: Order = Order.BLEND) -> list[int]:
    """Return the indices of `lines` in the order of starting."""
    return _ORDERS[how](lines)


def _longest_first(lines: Sequence[Sized]) -> list[int]:
    """A batch ends with its last line, and a long one that starts last would run alone (LPT, Graham 1969).

    Compares plain numbers: no other thread runs while 50,000 are sorted.
    """
    return sorted(range(len(lines)), key=lambda index: lines[index].response_tokens, reverse=True)


def _groups(lines: Sequence[Sized], indices: Sequence[int]) -> list[list[int]]:
    """Return the indices by group, groups in the order of their first line."""
    groups: dict[int, list[int]] = {}
    for index in indices:
        groups.setdefault(lines[index].group, []).append(index)
    return list(groups.values())


def _by_prefix(lines: Sequence[Sized]) -> list[int]:
    return [index for group in _groups(lines, range(len(lines))) for index in group]


def _blended(lines: Sequence[Sized]) -> list[int]:
    """Put groups in the order of their longest lines, so that each prefix is computed once.

    A group whose prefix is worth little is split, by length or into its lines.
    """
    parts: list[list[int]] = []
    for group in _groups(lines, _longest_first(lines)):
        shared = lines[group[0]].shared_tokens
        tokens = sum(lines[index].prompt_tokens - shared + lines[index].response_tokens for index in group)
        if shared * len(group) <= LOOSE_SHARE * tokens:
            parts += [[index] for index in group]
        elif shared <= LOOSE_SHARE * tokens:
            steps = groupby(
                group, lambda index: int(log(max(1.0, lines[index].response_tokens), LENGTH_STEP))
            )
            parts += [list(part) for _, part in steps]
        else:
            parts.append(group)
    parts.sort(key=lambda part: lines[part[0]].response_tokens, reverse=True)
    return [index for part in parts for index in part]


_ORDERS: Final[Mapping[Order, Callable[[Sequence[Sized]], list[int]]]] = {
    Order.BLEND: _blended,
    Order.LONGEST: _longest_first,
    Order.PREFIX: _by_prefix,
    Order.FILE: lambda lines: list(range(len(lines))),
}
