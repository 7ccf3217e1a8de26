"""Format counts with a singular or plural noun, and lists by their first few names."""

from __future__ import annotations

from collections.abc import Sequence

MAX_NAMED = 3


def several(count: float, one: str, many: str = "") -> str:
    """Return text such as `1 file` or `2 files`. `many`: the plural if it is not `one` with an s. Rounds."""
    shown = f"{count:,.0f}"
    return f"{shown} {one if shown == '1' else many or one + 's'}"


def first_few(names: Sequence[str]) -> str:
    """Return text such as `a, b, c and 7 more`."""
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def refused_models(names: Sequence[str]) -> str:
    """Return `m: its queries` or `m, n: their queries`, to be continued by `are refused`."""
    return f"{first_few(names)}: {'its' if len(names) == 1 else 'their'} queries"
