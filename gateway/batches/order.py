"""Chooses the order in which the lines of a batch run; no other place does. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.batches.values import Line


def order(lines: Sequence[Line]) -> list[int]:
    """Return the indices of `lines` in the order of starting: longest forecast first.

    A batch ends with its last line, and a long one that starts last would run alone (LPT, Graham 1969). Lines
    of one length stay in their order. Compares plain numbers: no other thread runs while 50,000 are sorted.
    """
    return sorted(range(len(lines)), key=lambda index: lines[index].response_tokens, reverse=True)
