"""In which order the lines of a batch run: the one place where that is chosen. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.batches.values import Line


def order(lines: Sequence[Line]) -> list[int]:
    """The indices of `lines` as they should start: longest forecast first.

    A batch ends with its last line: a long one that starts last would run alone (LPT, Graham 1969).
    """
    return sorted(range(len(lines)), key=lambda index: (-lines[index].response_tokens, index))
