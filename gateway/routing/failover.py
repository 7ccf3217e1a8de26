"""Which attempt comes next, as a generator that yields tries and is told how each broke."""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

from gateway.domain import Broken, Cause, Resume, Sampling
from gateway.errors import (
    BadRequest,
    ContextTooLong,
    MicoError,
    NoSite,
    Overloaded,
    UpstreamFailed,
    UpstreamLost,
)

MOST_MOVES = 3
"""A query changes its site at most so often: no ping-pong, whatever the estimates say."""
RETRY_AFTER_S = 1.0


class Try(NamedTuple):
    """`avoid`: sites not to be used again. `resume`: what the client has, None before the first token.

    `toward`: the site that bid for the query, which then moves there for the `moves`-th time; of the first
    try, the site that it was assigned to with others.
    """

    number: int
    avoid: frozenset[str] = frozenset()
    resume: Resume | None = None
    toward: str | None = None
    moves: int = 0

    @property
    def because(self) -> str:
        """Why `toward`, in an operator's words."""
        if self.moves:
            return f"offloaded: {self.toward} was idle and bid for it"
        return "assigned jointly: with what else of its batch or burst starts now"


class Setback(NamedTuple):
    """How a try ended: the break, and what the client has been given of the answer by now."""

    broken: Broken
    delivered: Resume | None


def tries(sampling: Sampling, most: int, toward: str | None = None) -> Generator[Try, Setback, None]:
    """Until `most` tries have failed, never the same site twice. Raises the error for the client in the end.

    To be released by a site is no failure: the query goes on to the site that bid for it. Nobody asks for
    more than `MOST_MOVES` releases, so a site that gives up more than those has failed.
    """
    this, failures = Try(1, toward=toward), 0
    while True:
        broken, resume = yield this
        _check(broken, resume, sampling)
        if broken.cause is Cause.RELEASED and this.moves < MOST_MOVES:
            this = Try(this.number + 1, this.avoid, resume, broken.toward, this.moves + 1)
            continue
        failures += 1
        if failures >= most:
            raise gave_up(broken, resume)
        this = Try(this.number + 1, this.avoid | {broken.site}, resume, moves=this.moves)


def _check(broken: Broken, resume: Resume | None, sampling: Sampling) -> None:
    """Raise what no other site could better."""
    if broken.cause is Cause.INVALID:
        raise BadRequest(broken.message, param=broken.param)
    if resume is not None and not sampling.resumable:
        raise UpstreamLost(f"{broken.message}; with n > 1, logprobs or echo an answer can't go on elsewhere")
    if resume is not None and resume.has_output and not resume.token_ids:
        raise UpstreamLost(f"{broken.message}; {broken.site} names no tokens that another could go on from")


def gave_up(broken: Broken | None, resume: Resume | None, reason: str = "") -> MicoError:
    """The error for a query that no site takes: `broken` is how the last try ended, if there was one."""
    if broken is not None and broken.cause is Cause.CONTEXT_LENGTH:
        return ContextTooLong(broken.message, param=broken.param)
    if resume is not None and broken is not None:
        return UpstreamLost(f"{broken.message}, and no other site could go on")
    if broken is None:
        return NoSite(reason, retry_after_s=RETRY_AFTER_S)
    if broken.cause in (Cause.FULL, Cause.DRAINING):
        return Overloaded(f"every site is full: {broken.message}", retry_after_s=RETRY_AFTER_S)
    if broken.cause is Cause.UNSUPPORTED:
        return BadRequest(broken.message, param=broken.param)
    return UpstreamFailed(f"{broken.message}, and no other site could take over")
