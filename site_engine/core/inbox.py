"""Describe inboxes, in which an engine takes keys and values from other engines of its host."""

from __future__ import annotations

from typing import NamedTuple

PLACES = 4
"""Of an inbox: requests that can be on their way to an engine with their keys and values."""


class InboxAddress(NamedTuple):
    """By which other processes find an inbox, and the bytes of each of its places."""

    name: str
    place_bytes: int


class InboxPlace(NamedTuple):
    """Of one request until it was received."""

    inbox: InboxAddress
    number: int
