"""One running attempt: buffers the output of one query at one site for the reader that relays it.

Sends nothing to the site: `link.py` feeds the attempt, and is called back when the attempt is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from gateway.decision import Decision
from gateway.domain import Delta, Finish, SiteIdentity
from gateway.failure import AttemptFailure, FailureCause
from gateway.federation.answer_limits import AnswerLimits
from gateway.federation.stream_pace import StreamPace
from gateway.prices import FREE, Prices
from gateway.routing.demand import Demand


class AttemptFailed(Exception):
    """Raised to the reader when the attempt has failed at its site; `failure` holds the cause."""

    def __init__(self, failure: AttemptFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(slots=True)
class _Choice:
    newest: Delta | None = None  # the last delta, if not fetched yet
    earlier: list[tuple[int, Delta]] = field(default_factory=list)  # (deltas merged, part)
    completion_tokens: int = 0
    cached_tokens: int = 0
    finished: bool = False

    def add(self, delta: Delta) -> None:
        """Buffer a delta for the reader. Parts of similar size are merged, so that each character of a long
        answer is copied a logarithmic number of times, and not once for every later delta.
        """
        self.completion_tokens = max(self.completion_tokens, delta.completion_tokens)
        part, self.newest = self.newest, delta
        if part is None:
            return
        parts, size = self.earlier, 1
        while parts and parts[-1][0] <= size:
            merged, before = parts.pop()
            size, part = size + merged, _merge(before, part)
        parts.append((size, part))

    def take(self) -> Delta | None:
        """Remove all buffered deltas and return them merged into one, None if there are none."""
        delta, self.newest = self.newest, None
        while self.earlier and delta is not None:
            delta = _merge(self.earlier.pop()[1], delta)
        return delta


class LiveAttempt:
    """One query at one site. Buffered deltas of a choice are merged, which bounds memory by one answer.

    One reader awaits `next`. `ended` is set once every choice has finished or the attempt has failed.
    `on_uncovered` is called with the attempt after each delta that leaves the answer longer than
    `covered_tokens`, whether or not the reader has fetched the earlier deltas.
    """

    def __init__(
        self,
        *,
        decision: Decision,
        demand: Demand,
        site: SiteIdentity,
        choices: int,
        moves: int,
        on_cancel: Callable[[LiveAttempt], None],
        limits: AnswerLimits,
        pace: StreamPace,
        prices: Prices = FREE,
        resumed_tokens: int = 0,
        resumable: bool = True,
        excluded: frozenset[str] = frozenset(),
    ) -> None:
        self.decision = decision
        self.demand = demand
        self.site = site
        self.moves = moves
        self.limits = limits
        self._pace = pace
        self.prices = prices
        self.resumed_tokens = resumed_tokens  # completion tokens from earlier sites
        self.wire_bytes = 0  # size of the deltas so far
        self.resumable = resumable
        self.excluded = excluded  # sites that failed the query before, or can't resume it
        self.started = False
        self._has_reasoned = False
        self.prompt_tokens: int | None = None  # as the site counts them; None until it accepts
        self.expired = False
        self.truncated = False
        self._cancelled = False
        self.covered_tokens = 0.0
        self.on_uncovered: Callable[[LiveAttempt], None] | None = None
        self.failure: AttemptFailure | None = None
        self.ended = asyncio.Event()
        self._choices = [_Choice() for _ in range(choices)]
        self._has_output = False  # there are buffered deltas
        self._reader: asyncio.Future[None] | None = None
        self._on_cancel = on_cancel

    @property
    def id(self) -> str:
        return self.decision.attempt_id

    @property
    def movable(self) -> bool:
        """Return whether another site can take the attempt over without the client noticing."""
        return self.resumable or not self.started

    @property
    def needs_to_resume(self) -> frozenset[str]:
        """Return the features that a model needs to resume after the tokens so far."""
        return frozenset(("resume", "reasoning") if self._has_reasoned else ("resume",))

    @property
    def completion_tokens(self) -> int:
        """Return the completion tokens counted by the site, summed over all choices."""
        if len(self._choices) == 1:
            return self._choices[0].completion_tokens
        return sum(choice.completion_tokens for choice in self._choices)

    def freed_by(self, index: int) -> int:
        """Return the tokens of KV memory that the end of a choice frees at its site: its completion tokens,
        and the prompt's once the attempt has ended.
        """
        prompt_tokens = (self.prompt_tokens or 0) if self.ended.is_set() else 0
        return prompt_tokens + self._choices[index].completion_tokens

    @property
    def cached_tokens(self) -> int:
        """Return the cached prompt tokens that the site reports, the least of all finished choices."""
        if len(self._choices) == 1:
            return self._choices[0].cached_tokens
        return min((choice.cached_tokens for choice in self._choices if choice.finished), default=0)

    @property
    def nano_usd(self) -> int:
        return self.cost()

    def cost(self, more_tokens: int = 0) -> int:
        """Return the cost in nano-dollars so far, or with `more_tokens` more output tokens. An attempt that
        failed without output costs nothing. For a cancelled one that the site has accepted, the prompt is
        assumed to have been computed.
        """
        failed = self.failure is not None and self.failure.cause is not FailureCause.CANCELLED
        gave = self.started or self.completion_tokens > 0
        if not gave and (failed or self.prompt_tokens is None):
            return 0
        return self.prices.nano_usd(
            (self.prompt_tokens or 0) + self.resumed_tokens,
            self.cached_tokens,
            max(0, self.completion_tokens - self.resumed_tokens) + more_tokens,
            len(self._choices),
        )

    # -- called by the link --

    def accept(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens

    def feed(self, delta: Delta) -> None:
        """Add one delta. Raises IndexError for a choice that was not requested."""
        choice = self._choices[delta.index]
        if choice.finished or self.failure is not None:
            return
        may_wait = self.started and delta.finish is None
        if not self.truncated:
            self.started = self._has_output = True
            if delta.reasoning:
                self._has_reasoned = True
            choice.add(delta)
        if delta.finish is not None:
            choice.finished, choice.cached_tokens = True, delta.cached_tokens
            if all(c.finished for c in self._choices):
                self._end()
        if may_wait:
            self._pace.wake(self._wake)
        else:
            self._wake()
        if self.on_uncovered is not None and self.completion_tokens > self.covered_tokens:
            self.on_uncovered(self)

    def count(self, index: int, completion_tokens: int) -> None:
        choice = self._choices[index]
        if not self.truncated:
            choice.completion_tokens = max(choice.completion_tokens, completion_tokens)

    def close_choice(self, index: int, failure: AttemptFailure) -> None:
        """Mark a choice as cancelled at the site; the attempt ends once all its choices have ended."""
        self._choices[index].finished = True
        if all(choice.finished for choice in self._choices):
            self.fail(failure)

    def fail(self, failure: AttemptFailure) -> None:
        if not self.ended.is_set():
            self.failure = failure
            self._end()
        self._wake()

    def _end(self) -> None:
        """Mark the end, and drop `on_uncovered`, which refers to the query: the reference cycle would live
        until a garbage collection.
        """
        self.ended.set()
        self.on_uncovered = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # -- called by the reader --

    async def next(self) -> list[Delta]:
        """Wait for output. Return one delta per choice with output, in order of choices, or [] after the end.

        Raises AttemptFailed once all output before the failure has been returned, and TimeoutError once the
        attempt has expired and no output is left.
        """
        while True:
            if self._has_output:
                self._has_output = False
                return [delta for choice in self._choices if (delta := choice.take()) is not None]
            if self.truncated:
                return []
            if self.failure is not None:
                raise AttemptFailed(self.failure)
            if self.ended.is_set():
                return []
            if self.expired:
                raise TimeoutError
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def expire(self) -> None:
        """Stop waiting: `next` returns the output received by now, then raises TimeoutError."""
        self.expired = True
        self._wake()

    def truncate(self) -> None:
        """Cancel the attempt and end all running choices now, with finish reason LENGTH.

        Output that the site sends until it reads the cancel is dropped and not counted.
        """
        if self.ended.is_set():
            return
        for index, choice in enumerate(self._choices):
            if not choice.finished:
                last = choice.take() or Delta(index, "", choice.completion_tokens)
                choice.add(replace(last, finish=Finish.LENGTH, cached_unknown=True))  # not reported yet
                self._has_output = True
        self.truncated = True
        self.cancel()
        self._wake()

    def cancel(self) -> None:
        """Cancel the attempt at its site, which still reports its last count. Does nothing after the end."""
        if not (self._cancelled or self.ended.is_set()):
            self._cancelled = True
            self.on_uncovered = None
            self._on_cancel(self)


def _merge(first: Delta, then: Delta) -> Delta:
    return replace(
        then,
        text=first.text + then.text,
        reasoning=first.reasoning + then.reasoning,
        refusal=first.refusal + then.refusal,
        token_ids=first.token_ids + then.token_ids,
        logprobs=first.logprobs + then.logprobs,
        prompt_logprobs=first.prompt_logprobs + then.prompt_logprobs,
        tool_calls=first.tool_calls + then.tool_calls,
        pooled=first.pooled + then.pooled,
    )
