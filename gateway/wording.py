"""Write a count with its noun in the singular or plural, and a list with its first few names."""

from __future__ import annotations

from collections.abc import Sequence

MAX_NAMED = 3


def several(count: float, one: str, many: str = "") -> str:
    """Return `1 query`, `2 queries`. `many` is the plural where it is not `one` and an s; rounds `count`."""
    shown = f"{count:,.0f}"
    return f"{shown} {one if shown == '1' else many or one + 's'}"


def first_few(names: Sequence[str]) -> str:
    """Return `a, b, c and 7 more`."""
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def refused_models(names: Sequence[str]) -> str:
    """Return `m: its queries` or `m, n: their queries`, which `are refused` goes on."""
    return f"{first_few(names)}: {'its' if len(names) == 1 else 'their'} queries"
