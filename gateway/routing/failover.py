"""Retry and failover, as a generator that yields the next try and receives the failure of the last one."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, NamedTuple

from gateway.domain import Query, Sampling, SiteIdentity
from gateway.errors import (
    BadRequest,
    ContextTooLong,
    MicoError,
    NoSite,
    Overloaded,
    UpstreamFailed,
    UpstreamLost,
)
from gateway.failure import AttemptFailure, FailureCause, Resume
from gateway.prompt import Chat

MAX_MOVES = 3
"""The number of moves by offloading that a query may make, so that it can't alternate between sites."""
RETRY_AFTER_S = 1.0
NATIVE: Final = "native"
"""The `engine` of this project's own sites, which identify their weights by the model's revision."""


class Try(NamedTuple):
    """The next try, after `failures` failed ones. `tried`: sites not to be used again. `resume`: the part of
    the answer delivered to the client, None before the first token.

    `full`: the sites of `tried` that were too full to resume the answer and may be tried again later.
    `preferred_site`: the site that bid for the query, to which the query makes its move number `moves`; for
    the first try, the site that joint assignment chose.
    """

    number: int
    tried: frozenset[str] = frozenset()
    resume: Resume | None = None
    preferred_site: str | None = None
    moves: int = 0
    full: frozenset[str] = frozenset()
    failures: int = 0

    @property
    def preference_reason(self) -> str:
        """Return the reason for `preferred_site`, as shown to operators."""
        if self.moves:
            return f"offloaded: {self.preferred_site} was idle and bid for it"
        return "assigned jointly: with what else of its batch or burst starts now"


class FailedTry(NamedTuple):
    """A try that failed, and the part of the answer delivered to the client so far.

    `to_report`: the failure to report to the client if no try is left; None means `failure`.
    """

    failure: AttemptFailure
    delivered: Resume | None
    to_report: AttemptFailure | None = None


def tries(
    sampling: Sampling, max_tries: int, preferred_site: str | None = None
) -> Generator[Try, FailedTry, None]:
    """Yield tries until `max_tries` have failed, then raise the error for the client. No site is tried twice,
    except for a site that was lost once, as it may have reconnected, and for sites of `full` that the caller
    removes from `tried`.

    A release by a site is not a failure: the query moves to the site that bid for it. Gateways request at
    most `MAX_MOVES` releases, so a further release counts as a failure.
    """
    current, lost_once = Try(1, preferred_site=preferred_site), set[str]()
    while True:
        failure, resume, to_report = yield current
        _check(failure, resume, sampling)
        if failure.cause is FailureCause.RELEASED and current.moves < MAX_MOVES:
            current = Try(
                current.number + 1,
                current.tried,
                resume,
                failure.preferred_site,
                current.moves + 1,
                current.full,
                current.failures,
            )
            continue
        failures = current.failures + 1
        if failures >= max_tries:
            raise final_error(to_report or failure, resume)
        tried, full = current.tried, current.full
        if failure.cause is FailureCause.LOST and failure.site not in tried | lost_once:
            lost_once.add(failure.site)
        else:
            tried |= {failure.site}
        if resume is not None and failure.cause is FailureCause.FULL:
            full |= {failure.site}
        current = Try(current.number + 1, tried, resume, None, current.moves, full, failures)


def _check(failure: AttemptFailure, resume: Resume | None, sampling: Sampling) -> None:
    """Raise BadRequest or UpstreamLost for a failure that no other site could avoid."""
    if failure.cause is FailureCause.INVALID and resume is None:  # else another site accepted the query
        raise BadRequest(failure.message, param=failure.param)
    if resume is not None and not sampling.resumable:
        raise UpstreamLost(f"{failure.message}; with n > 1, logprobs or echo an answer can't go on elsewhere")
    if resume is not None and resume.has_output and not resume.token_ids:
        _check_text(failure, resume, sampling)


def _check_text(failure: AttemptFailure, resume: Resume, sampling: Sampling) -> None:
    """Raise UpstreamLost if the answer can't be resumed from its text alone."""
    if resume.tool_calls:
        lost = "a call of a function had begun"
    elif resume.beside_text:
        lost = "its reasoning or its refusal was delivered"
    elif _is_drawn_from_seed(sampling):
        lost = "an answer drawn from a seed"
    else:
        return
    raise UpstreamLost(f"{failure.message}; {lost}, and no site named the tokens to go on from")


def resume_options(query: Query, resume: Resume | None) -> tuple[frozenset[str], ...]:
    """Return the features needed for each way of resuming: from the tokens, which is exact, then the text."""
    if resume is None or not resume.has_output:
        return (query.needs,)
    ways = []
    if resume.token_ids:
        ways.append(query.needs | ({"resume", "reasoning"} if resume.reasoning_chars else {"resume"}))
    if not (resume.tool_calls or resume.beside_text or _is_drawn_from_seed(query.sampling)):
        ways.append(query.needs | _after_text(query))
    return tuple(ways)


def same_weights(one: SiteIdentity, other: SiteIdentity, model: str) -> bool:
    """Return whether one site may finish an answer that the other began. The weights behind a remote site are
    unknown, so its operator is trusted that they are the same.
    """
    here, there = one.models.get(model), other.models.get(model)
    if here is None or there is None or not one.engine == other.engine == NATIVE:
        return True
    return here.revision == there.revision


def _is_drawn_from_seed(sampling: Sampling) -> bool:
    """Return whether the answer is sampled with a seed, and so can only be resumed from its exact tokens."""
    greedy = sampling.temperature <= 0 or sampling.top_p <= 0 or sampling.top_k == 1
    return sampling.seed is not None and not greedy


def _after_text(query: Query) -> set[str]:
    """Return the features needed to resume from text. Only a site with the tokenizer ("resume") can append
    text to a prompt of token ids, or parse the text against the tools or the schema.
    """
    kind = "resume_chat" if isinstance(query.prompt, Chat) else "resume_text"
    exact = isinstance(query.prompt, tuple) or query.needs & {"tools", "guided"}
    return {kind, "resume"} if exact else {kind}


def final_error(failure: AttemptFailure | None, resume: Resume | None, reason: str = "") -> MicoError:
    """Return the error for a query that no site takes. `failure`: how the last try failed, None if none was
    made. `reason`: why the sites were excluded.
    """
    if resume is not None and failure is not None:
        because = f" ({reason})" if reason else ""
        return UpstreamLost(f"{failure.message}, and no other site could go on{because}")
    if failure is not None and failure.cause is FailureCause.CONTEXT_LENGTH:
        return ContextTooLong(failure.message, param=failure.param)
    if failure is None or failure.cause is FailureCause.MODEL_UNKNOWN:
        return NoSite(reason or "no site serves the model now", retry_after_s=RETRY_AFTER_S)
    if failure.cause in (FailureCause.FULL, FailureCause.DRAINING):
        return Overloaded(f"every site is full: {failure.message}", retry_after_s=RETRY_AFTER_S)
    if failure.cause is FailureCause.UNSUPPORTED:
        return BadRequest(failure.message, param=failure.param)
    return UpstreamFailed(f"{failure.message}, and no other site could take over")
