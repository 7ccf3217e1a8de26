"""Decide which engine of a pool computes a request, while engines are lost and requests move between them.

One engine at a time, under an epoch: what belongs to an earlier epoch is void, so no token is taken twice.
The pool keeps the tokens of every answer until it has ended, so none is lost with an engine. A move takes a
request out of one engine, after its last token there, and gives it to another: in between it is the pool's
alone, and no engine keeps memory for it.

Pure values. `tests/laws/pool_ownership_test.py` searches every order of messages, losses and cancels.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

MAX_LOSSES = 3
"""A request that so many engines were lost with may be the cause: it fails, and the gateway decides."""


class Phase(Enum):
    PLACED = "placed"  # given to its engine, which has not said that it took it
    HELD = "held"  # its engine has it
    LEAVING = "leaving"  # its engine was asked to give it up, for a move
    ENDED = "ended"


class Act(Enum):
    """The action of the pool that a change of a request requires."""

    NOTHING = "nothing"
    EXPORT = "export"  # ask the engine for the request
    PLACE = "place"  # give the request to the engine, under the new epoch
    CANCELLED = "cancelled"  # end the answer: its client has left
    FAILED = "failed"  # end the answer: no engine goes on with it


class Owned(NamedTuple):
    """A request of the pool. `to`: where it goes when its engine gives it up."""

    engine: int
    epoch: int = 1
    phase: Phase = Phase.PLACED
    to: int | None = None
    cancelled: bool = False
    losses: int = 0


def accepted(one: Owned) -> Owned:
    return one._replace(phase=Phase.HELD) if one.phase is Phase.PLACED else one


def move(one: Owned, to: int) -> tuple[Owned, Act]:
    """Begin a move, unless the request is on its way already."""
    if one.phase is not Phase.HELD or one.cancelled or to == one.engine:
        return one, Act.NOTHING
    return one._replace(phase=Phase.LEAVING, to=to), Act.EXPORT


def stayed(one: Owned) -> Owned:
    """Note that the engine did not give the request up."""
    return one._replace(phase=Phase.HELD, to=None)


def exported(one: Owned, to: int | None) -> tuple[Owned, Act]:
    """Go on in the engine `to` once none has the request. There is none left: it fails."""
    if one.cancelled:
        return end(one), Act.CANCELLED
    if to is None:
        return end(one), Act.FAILED
    return one._replace(engine=to, epoch=one.epoch + 1, phase=Phase.PLACED, to=None), Act.PLACE


def lost(one: Owned, to: int | None) -> tuple[Owned, Act]:
    """Go on in the engine `to` after the loss of the one that had the request."""
    one = one._replace(losses=one.losses + 1)
    return exported(one, None if one.losses >= MAX_LOSSES else to)


def cancel(one: Owned) -> Owned:
    """Note that the client has left. The engine is told, too; where it can't answer, the pool ends it."""
    return one._replace(cancelled=True)


def end(one: Owned) -> Owned:
    return one._replace(phase=Phase.ENDED, to=None)
