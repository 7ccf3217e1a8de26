"""Write a count with its noun in the singular or plural."""

from __future__ import annotations


def several(count: float, one: str, many: str = "") -> str:
    """Return `1 query`, `2 queries`. `many` is the plural where it is not `one` and an s; rounds `count`."""
    shown = f"{count:,.0f}"
    return f"{shown} {one if shown == '1' else many or one + 's'}"
