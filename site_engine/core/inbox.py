"""Describe inboxes: memory of an engine into which other engines of the same host copy keys and values."""

from __future__ import annotations

from typing import NamedTuple

PLACES = 4
"""Places per inbox. Each holds the keys and values of one moved request."""


class InboxAddress(NamedTuple):
    """The name under which other processes open an inbox, and the size of each of its places."""

    name: str
    place_bytes: int


class InboxPlace(NamedTuple):
    """A place in an inbox, numbered from 0. Reserved for one request until the inbox's engine receives it."""

    inbox: InboxAddress
    number: int
