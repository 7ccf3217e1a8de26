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

RETRY_AFTER_S = 1.0


class Try(NamedTuple):
    """`avoid`: sites not to be used again. `resume`: what the client has, None before the first token."""

    number: int
    avoid: frozenset[str]
    resume: Resume | None


class Setback(NamedTuple):
    """How a try ended: the break, and what the client has been given of the answer by now."""

    broken: Broken
    delivered: Resume | None


def tries(sampling: Sampling, most: int) -> Generator[Try, Setback, None]:
    """At most `most` tries, never the same site twice. Raises the error for the client in the end."""
    avoid: frozenset[str] = frozenset()
    resume: Resume | None = None
    for number in range(1, most + 1):
        broken, resume = yield Try(number, avoid, resume)
        if broken.cause is Cause.CONTEXT_LENGTH:
            raise ContextTooLong(broken.message, param=broken.param)
        if broken.cause is Cause.INVALID:
            raise BadRequest(broken.message, param=broken.param)
        if resume is not None and not sampling.resumable:
            raise UpstreamLost(
                f"{broken.message}; with n > 1, logprobs or echo an answer can't go on elsewhere"
            )
        avoid |= {broken.site}
    raise gave_up(broken, resume)


def gave_up(broken: Broken | None, resume: Resume | None, reason: str = "") -> MicoError:
    """The error for a query that no site takes: `broken` is how the last try ended, if there was one."""
    if resume is not None and broken is not None:
        return UpstreamLost(f"{broken.message}, and no other site could go on")
    if broken is None:
        return NoSite(reason, retry_after_s=RETRY_AFTER_S)
    if broken.cause in (Cause.FULL, Cause.DRAINING):
        return Overloaded(f"every site is full: {broken.message}", retry_after_s=RETRY_AFTER_S)
    if broken.cause is Cause.UNSUPPORTED:
        return BadRequest(broken.message, param=broken.param)
    return UpstreamFailed(f"{broken.message}, and no other site could take over")
