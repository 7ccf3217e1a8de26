"""The state of one query, and the outcome it leaves. Does no I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter

from msgspec.structs import replace

from gateway.decision import Estimate
from gateway.domain import Delta, Finish, Lane, Opening, Query, SiteIdentity, Usage
from gateway.ending import Ending
from gateway.errors import ClientMistake, MicoError, Overloaded
from gateway.failure import INABILITIES, AttemptFailure, FailureCause, Resume
from gateway.federation.attempt import LiveAttempt
from gateway.outcome import Attempt, Outcome, Status
from gateway.prices import Prices
from gateway.prompt import Chat, Pooling, Prompt, memory_bytes
from gateway.quotas.ledger import TOP_UP_TOKENS, Reservation
from gateway.quotas.limits import Unit
from gateway.routing.demand import Demand
from gateway.routing.prefixes import Prefix
from predictor.forecast import Forecast


class QueryState:
    """`clock` is monotonic; `received_at` is unix time, for the record only."""

    def __init__(self, query: Query, clock: Callable[[], float], received_at: float) -> None:
        self.query = query
        self.prompt_bytes = memory_bytes(query.prompt)
        self.forecast: Forecast | None = None
        self.capped_forecast: Forecast | None = None  # by the max_tokens of the client
        self.first_demand: Demand | None = None  # of the first try
        self.prefix: Prefix | None = None  # once it was of interest to know which sites have it
        self.opened_by: SiteIdentity | None = None  # the site that sent the first token
        self.error: type[MicoError] | None = None  # not the exception, whose frames hold this object
        self.error_message = ""
        self.answered = False
        self.ended_s: float | None = None
        self.reservation = Reservation()
        self.expired = False  # its deadline has passed, or the process shuts down
        self.forecast_future: asyncio.Future[Forecast] | None = None
        self.wait_timeout: asyncio.Timeout | None = None  # of the last other wait, which may be over
        self._resumable = query.sampling.resumable
        self._clock = clock
        self._received_at = received_at
        self._attempts: list[LiveAttempt] = []
        self.first_token_s: dict[str, float] = {}  # by attempt, since the query was received
        self._forecast_s: float | None = None
        self._queue_s: float | None = None
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._tokens = 0  # delivered, as the sites counted them
        self._calls = 0
        self._argument_chars = 0  # of the last call
        self._reasoning_chars = 0
        self._refused = False
        self._cached_tokens: dict[int, int] = {}  # of the prompt, by choice
        self.cached_unknown = False  # a site did not tell them
        self._reasoning_tokens: dict[int, int] = {}
        self._finishes: dict[int, Finish] = {}

    @property
    def current(self) -> LiveAttempt | None:
        return self._attempts[-1] if self._attempts else None

    @property
    def opened(self) -> bool:
        return bool(self.first_token_s)

    @property
    def prompt_tokens(self) -> int:
        """Return the count of the last site; 0 before any site has counted."""
        for attempt in reversed(self._attempts):
            if attempt.prompt_tokens is not None:
                return attempt.prompt_tokens
        return 0

    @property
    def completion_tokens(self) -> int:
        """Return the count of the sites. A resumed attempt counts what it was given, so the largest is the
        total.

        A complete answer has the last attempt's count: it lacks what another attempt lost before delivery.
        """
        if self._attempts and (self.answered or len(self._attempts) == 1):
            return self._attempts[-1].completion_tokens
        return max((attempt.completion_tokens for attempt in self._attempts), default=0)

    @property
    def used_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def charged(self) -> Usage:
        """Return the tokens to record and to count against quotas, without their cost.

        An error instead of an answer costs nothing, whatever sites have counted: also of a line that failed
        in mid-answer, as nobody gets a part of it. What was cancelled costs what was counted until then.
        """
        has_part = self.opened and self.query.lane is not Lane.BATCH
        return self._counted if self.error is None or has_part else Usage(0, 0)

    @property
    def delivered(self) -> Resume | None:
        """Return the part of the answer that the client has; None before the first token."""
        if not self.opened:
            return None
        ids = tuple(self._token_ids) if len(self._token_ids) == self._tokens else ()
        text = "".join(self._text)
        return Resume(
            ids,
            text,
            self._tokens,
            self._calls,
            self._argument_chars,
            self._reasoning_chars,
            self._refused,
        )

    @property
    def too_short_context_tokens(self) -> int:
        """Return the longest context that a site found too short for the prompt; 0 if none did."""
        refused = [a for a, failure in self._failed() if failure.cause is FailureCause.CONTEXT_LENGTH]
        return max((a.site.models[self.query.model].context_tokens for a in refused), default=0)

    @property
    def failure(self) -> AttemptFailure | None:
        """Return the failure to report: the last one; but if that is an inability of its site, the last other
        failure of a site that may have been able.
        """
        last = self.current.failure if self.current is not None else None
        if last is None or last.cause not in INABILITIES:
            return last
        limit_tokens = self.too_short_context_tokens if last.cause is FailureCause.CONTEXT_LENGTH else -1
        able = [
            failure
            for attempt, failure in self._failed()
            if failure.cause not in INABILITIES
            and attempt.site.models[self.query.model].context_tokens > limit_tokens
        ]
        return able[-1] if able else last

    def _failed(self) -> list[tuple[LiveAttempt, AttemptFailure]]:
        """Return the attempts at the model that failed, each with how it did."""
        model = self.query.model
        return [(a, a.failure) for a in self._attempts if a.failure and a.demand.model == model]

    @property
    def usage(self) -> Usage:
        return replace(self._counted, nano_usd=self.nano_usd)

    @property
    def _counted(self) -> Usage:
        """Return the tokens so far, without their cost."""
        reasoning = sum(self._reasoning_tokens.values())
        prompt, completion = self.prompt_tokens, self.completion_tokens
        return Usage(prompt, completion, self.cached_tokens, min(reasoning, completion))

    @property
    def cached_tokens(self) -> int:
        """Return the tokens of the prompt that the sites had in their caches, as they say."""
        return min(*self._cached_tokens.values(), self.prompt_tokens) if self._cached_tokens else 0

    @property
    def nano_usd(self) -> int:
        """Return the cost of all attempts so far."""
        return sum(attempt.nano_usd for attempt in self._attempts)

    @property
    def nano_usd_ahead(self) -> int:
        """Return the cost once the answer is TOP_UP_TOKENS longer."""
        current = self.current
        more = current.cost(TOP_UP_TOKENS) - current.nano_usd if current is not None else 0
        return self.nano_usd + more

    @property
    def covered_tokens(self) -> int:
        """Return the length of the answer up to which the reservation lasts; a budget covers
        `nano_usd_ahead`.
        """
        covered = self.reservation.tokens - self.prompt_tokens
        if self.reservation.counts(Unit.NANO_USD):
            return min(covered, self.completion_tokens + TOP_UP_TOKENS)
        return covered

    def add_attempt(self, attempt: LiveAttempt) -> None:
        self._attempts.append(attempt)
        if not attempt.resumed_tokens:  # it begins the answer anew
            self._token_ids, self._tokens = [], 0
        if self.expired:
            attempt.expire()
        if self._queue_s is None:
            self._queue_s = self._clock() - self.query.received_s

    def open(self, attempt: LiveAttempt) -> Opening:
        """Record the first token of the first attempt that brings one."""
        self.opened_by = attempt.site
        return Opening(
            site=attempt.site.name,
            cloud=attempt.site.cloud,
            region=attempt.site.region,
            attempts=len(self._attempts),
            queue_s=self._queue_s or 0.0,
            prompt_tokens=self.prompt_tokens,
            fingerprint=attempt.site.models[self.query.model].revision,
            model=self.query.model,
        )

    def switch_to(self, query: Query) -> None:
        """Forget what was worked out for another model."""
        self.query, self.first_demand, self.prefix = query, None, None

    def set_forecast(self, forecast: Forecast) -> None:
        self.forecast = forecast
        max_tokens = self.query.sampling.max_tokens
        self.capped_forecast = forecast if max_tokens is None else forecast.capped(max_tokens)
        self._forecast_s = self._clock() - self.query.received_s

    def expire(self) -> None:
        """End the wait in progress with TimeoutError, and every later one at once."""
        self.expired = True
        if self.current is not None:
            self.current.expire()
        if self.forecast_future is not None and not self.forecast_future.done():
            self.forecast_future.set_exception(TimeoutError())
        if self.wait_timeout is not None:
            with suppress(RuntimeError):  # that wait is over
                self.wait_timeout.reschedule(0.0)

    def fail(self, error: MicoError) -> None:
        self.error, self.error_message = type(error), error.message

    def end(self) -> None:
        """Mark the end for the client; counts of the site may still arrive."""
        self.ended_s = self._clock()

    def record_first(self, attempt: LiveAttempt) -> None:
        """Record that the first delta of `attempt` is about to go to the client."""
        self.first_token_s[attempt.id] = self._clock() - self.query.received_s

    def record_delta(self, delta: Delta) -> None:
        """Record a delta that is about to go to the client."""
        if delta.reasoning_tokens:
            self._reasoning_tokens[delta.index] = delta.reasoning_tokens
        if delta.finish is not None:
            self._cached_tokens[delta.index] = delta.cached_tokens
            self.cached_unknown = self.cached_unknown or delta.cached_unknown
            self._finishes[delta.index] = delta.finish
        if not self._resumable:
            return
        if delta.reasoning:
            self._reasoning_chars += len(delta.reasoning)
        if delta.refusal:
            self._refused = True
        if delta.token_ids:
            self._token_ids.extend(delta.token_ids)
        self._text.append(delta.text)
        self._tokens = max(self._tokens, delta.completion_tokens)
        for call in delta.tool_calls:
            if call.index >= self._calls:
                self._calls, self._argument_chars = call.index + 1, 0
            self._argument_chars += len(call.arguments)

    def outcome(self, prices_of: Callable[[str], Prices | None] = lambda _: None) -> Outcome:
        """Return what is recorded. `prices_of` returns a site's prices now, None for an unknown site."""
        query, charged = self.query, self.charged
        attempts = tuple(map(self._attempt_record, self._attempts))
        paid_nano_usd = sum(attempt.nano_usd for attempt in attempts)
        cheapest, dearest = self._cost_bounds(paid_nano_usd, charged, prices_of)
        return Outcome(
            query_id=query.id,
            request_id=query.request_id,
            tenant=query.caller.tenant,
            key_id=query.caller.key_id,
            model=query.model,
            status=self._status(),
            error=self.error_message,
            prompt_tokens=charged.prompt_tokens,
            completion_tokens=charged.completion_tokens,
            forecast=None if isinstance(query.prompt, Pooling) else self.forecast,
            attempts=attempts,
            received_at=self._received_at,
            queue_s=self._queue_s,
            first_token_s=min(self.first_token_s.values(), default=None),
            total_s=(self._clock() if self.ended_s is None else self.ended_s) - query.received_s,
            forecast_s=self._forecast_s,
            traceparent=query.traceparent,
            mistaken=self.error is not None and issubclass(self.error, ClientMistake),
            ending=Ending(
                _operation(query.prompt),
                tuple(finish.value for finish in self._finishes.values()),
                charged.cached_tokens,
                charged.reasoning_tokens,
                self.error.__name__ if self.error else "",
            ),
            asked_model=query.asked_model,
            cheapest_nano_usd=cheapest,
            dearest_nano_usd=dearest,
            max_tokens=query.sampling.max_tokens,
        )

    def _cost_bounds(
        self, paid_nano_usd: int, charged: Usage, prices_of: Callable[[str], Prices | None]
    ) -> tuple[int, int]:
        """Return the least and the most of what was paid and what the same tokens would have cost at the
        cheapest and at the dearest of the other sites that were compared, by the first estimates of them.
        """
        costs = [paid_nano_usd]
        others: list[Estimate] = []
        for attempt in self._attempts:
            if attempt.demand.model == self.query.model:
                first = attempt.decision
                others = [estimate for estimate in first.estimates if estimate.site != first.site]
                break
        if others and charged.total_tokens:
            by_price = attrgetter("price_usd")
            for estimate in (min(others, key=by_price), max(others, key=by_price)):
                if (prices := prices_of(estimate.site)) is not None:
                    cached, choices = round(estimate.cached_tokens), self.query.sampling.n
                    costs.append(
                        prices.nano_usd(charged.prompt_tokens, cached, charged.completion_tokens, choices)
                    )
        return min(costs), max(costs)

    def _status(self) -> Status:
        if self.answered:
            return Status.ANSWERED
        if self.error is None:
            return Status.CANCELLED
        refused = not self._attempts or issubclass(self.error, ClientMistake | Overloaded)
        return Status.REFUSED if refused and not self.opened else Status.FAILED

    def _attempt_record(self, attempt: LiveAttempt) -> Attempt:
        return Attempt(
            decision=attempt.decision,
            ended=attempt.failure.cause.value if attempt.failure else "finished",
            prompt_tokens=attempt.prompt_tokens or 0,
            completion_tokens=attempt.completion_tokens,
            first_token_s=self.first_token_s.get(attempt.id),
            model=attempt.demand.model,
            cached_tokens=attempt.cached_tokens,
            resumed_tokens=attempt.resumed_tokens,
            prices=attempt.prices,
            nano_usd=attempt.nano_usd,
        )


def _operation(prompt: Prompt) -> str:
    """Return the operation as OpenTelemetry names it; ranking has no name there."""
    if isinstance(prompt, Pooling):
        return {"embed": "embeddings"}.get(prompt.task, prompt.task)
    return "chat" if isinstance(prompt, Chat) else "text_completion"
