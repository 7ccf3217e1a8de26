"""A count and what is counted, as a person would write it."""

from __future__ import annotations


def several(count: float, one: str, many: str = "") -> str:
    """`1 query`, `2 queries`; `many` where it is more than `one` and an s. Halves are rounded."""
    shown = f"{count:,.0f}"
    return f"{shown} {one if shown == '1' else many or one + 's'}"
