"""Which attempt comes next, as a generator that yields tries and is told how each broke."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, NamedTuple

from gateway.domain import Broken, Cause, Query, Resume, Sampling, SiteIdentity
from gateway.errors import (
    BadRequest,
    ContextTooLong,
    MicoError,
    NoSite,
    Overloaded,
    UpstreamFailed,
    UpstreamLost,
)
from gateway.prompt import Chat

MOST_MOVES = 3
"""A query changes its site at most so often: no ping-pong, whatever the estimates say."""
RETRY_AFTER_S = 1.0
NATIVE: Final = "native"
"""The engine that is our own, and names its weights by their revision."""


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
    if broken.cause is Cause.INVALID and resume is None:  # else another site took it as it was
        raise BadRequest(broken.message, param=broken.param)
    if resume is not None and not sampling.resumable:
        raise UpstreamLost(f"{broken.message}; with n > 1, logprobs or echo an answer can't go on elsewhere")
    if resume is not None and resume.has_output and not resume.token_ids:
        _check_text(broken, resume, sampling)


def _check_text(broken: Broken, resume: Resume, sampling: Sampling) -> None:
    """Raise where text alone is not enough to go on from."""
    what = "a call of a function had begun" if resume.tool_calls else ""
    what = what or ("an answer drawn from a seed" if _is_drawn_from_seed(sampling) else "")
    if what:
        raise UpstreamLost(f"{broken.message}; {what}, and no site named the tokens to go on from")


def ways_on(query: Query, resume: Resume | None) -> tuple[frozenset[str], ...]:
    """The features that a site needs to go on, the exact way first: after the tokens, then after the text."""
    if resume is None or not resume.has_output:
        return (query.needs,)
    ways = []
    if resume.token_ids:
        ways.append(query.needs | {"resume"})
    if not (resume.tool_calls or _is_drawn_from_seed(query.sampling)):
        ways.append(query.needs | _after_text(query))
    return tuple(ways)


def same_weights(one: SiteIdentity, other: SiteIdentity, model: str) -> bool:
    """Whether one may finish what the other has begun. Of a server nobody knows which weights it has: its
    operator answers for them.
    """
    here, there = one.models.get(model), other.models.get(model)
    if here is None or there is None or not one.engine == other.engine == NATIVE:
        return True
    return here.revision == there.revision


def _is_drawn_from_seed(sampling: Sampling) -> bool:
    """Whether the answer is to be the same each time, so that only its exact tokens are its beginning."""
    greedy = sampling.temperature <= 0 or sampling.top_p <= 0 or sampling.top_k == 1
    return sampling.seed is not None and not greedy


def _after_text(query: Query) -> set[str]:
    """Only a site that has the tokenizer puts text behind token ids, or reads it as what it is to follow."""
    kind = "resume_chat" if isinstance(query.prompt, Chat) else "resume_text"
    exact = isinstance(query.prompt, tuple) or query.needs & {"tools", "guided"}
    return {kind, "resume"} if exact else {kind}


def gave_up(broken: Broken | None, resume: Resume | None, reason: str = "") -> MicoError:
    """The error for a query that no site takes: `broken` is how the last try ended, if there was one."""
    if resume is not None and broken is not None:
        because = f" ({reason})" if reason else ""
        return UpstreamLost(f"{broken.message}, and no other site could go on{because}")
    if broken is not None and broken.cause is Cause.CONTEXT_LENGTH:
        return ContextTooLong(broken.message, param=broken.param)
    if broken is None:
        return NoSite(reason, retry_after_s=RETRY_AFTER_S)
    if broken.cause in (Cause.FULL, Cause.DRAINING):
        return Overloaded(f"every site is full: {broken.message}", retry_after_s=RETRY_AFTER_S)
    if broken.cause is Cause.UNSUPPORTED:
        return BadRequest(broken.message, param=broken.param)
    return UpstreamFailed(f"{broken.message}, and no other site could take over")
