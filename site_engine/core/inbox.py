"""Describe inboxes: memory of an engine into which other engines of its host copy keys and values."""

from __future__ import annotations

from typing import NamedTuple

PLACES = 4
"""The number of places of an inbox, each for the keys and values of one request that moves."""


class InboxAddress(NamedTuple):
    """The name under which other processes open an inbox, and the size of each of its places."""

    name: str
    place_bytes: int


class InboxPlace(NamedTuple):
    """A place in an inbox, numbered from 0. It belongs to one request until its engine has received that."""

    inbox: InboxAddress
    number: int
