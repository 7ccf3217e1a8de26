"""The state of one query, from which its outcome is built. Does no I/O."""

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
    """The state of one query. `clock` is monotonic; `received_at` is unix time, used in the record only."""

    def __init__(self, query: Query, clock: Callable[[], float], received_at: float) -> None:
        self.query = query
        self.prompt_bytes = memory_bytes(query.prompt)
        self.forecast: Forecast | None = None
        self.capped_forecast: Forecast | None = None  # truncated at the client's max_tokens
        self.first_demand: Demand | None = None  # demand of the first try
        self.prefix: Prefix | None = None  # computed once several sites are known
        self.opened_by: SiteIdentity | None = None  # the site that sent the first token
        self.error: type[MicoError] | None = None  # not the exception: its traceback refers to this object
        self.error_message = ""
        self.answered = False
        self.ended_s: float | None = None
        self.reservation = Reservation()
        self.expired = False  # the deadline has passed, or the process shuts down
        self.forecast_future: asyncio.Future[Forecast] | None = None
        self.wait_timeout: asyncio.Timeout | None = None  # timeout of the last `Deadline.wait`; may be over
        self._resumable = query.sampling.resumable
        self._clock = clock
        self._received_at = received_at
        self._attempts: list[LiveAttempt] = []
        self.first_token_s: dict[str, float] = {}  # by attempt id, seconds since the query was received
        self._forecast_s: float | None = None
        self._queue_s: float | None = None
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._tokens = 0  # delivered completion tokens, as counted by sites
        self._calls = 0
        self._argument_chars = 0  # characters of the last call's arguments
        self._reasoning_chars = 0
        self._refused = False
        self._cached_tokens: dict[int, int] = {}  # cached prompt tokens, by choice
        self.cached_unknown = False  # True if a site did not report the cached tokens
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
        """Return the prompt tokens counted by the last site that accepted; 0 before any has."""
        for attempt in reversed(self._attempts):
            if attempt.prompt_tokens is not None:
                return attempt.prompt_tokens
        return 0

    @property
    def completion_tokens(self) -> int:
        """Return the completion tokens counted by sites. A resumed attempt's count includes the tokens it
        resumed from, so the largest count is the total.

        For a complete answer it is the last attempt's count, which excludes tokens that an earlier attempt
        generated but did not deliver.
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

        A query that ends with an error before its first token is charged nothing. Neither is a batch line
        that fails in mid-answer, as its partial answer is dropped. A cancelled query is charged the tokens
        counted so far.
        """
        has_part = self.opened and self.query.lane is not Lane.BATCH
        return self._counted if self.error is None or has_part else Usage(0, 0)

    @property
    def delivered(self) -> Resume | None:
        """Return the part of the answer delivered to the client; None before the first token."""
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
        """Return the longest context, in tokens, that was too short for the prompt; 0 if none was."""
        refused = [a for a, failure in self._failed() if failure.cause is FailureCause.CONTEXT_LENGTH]
        return max((a.site.models[self.query.model].context_tokens for a in refused), default=0)

    @property
    def failure(self) -> AttemptFailure | None:
        """Return the failure to report, None if the last attempt did not fail. This is the last failure,
        unless it is an inability of its site: then an earlier failure of an able site takes precedence.
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
        """Return the failed attempts at the query's current model, each with its failure."""
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
        """Return the cached prompt tokens that the sites report, the least of all choices; 0 if unknown."""
        return min(*self._cached_tokens.values(), self.prompt_tokens) if self._cached_tokens else 0

    @property
    def nano_usd(self) -> int:
        """Return the cost of all attempts so far, in nano-dollars."""
        return sum(attempt.nano_usd for attempt in self._attempts)

    @property
    def nano_usd_ahead(self) -> int:
        """Return the cost, in nano-dollars, once the answer is TOP_UP_TOKENS longer."""
        current = self.current
        more = current.cost(TOP_UP_TOKENS) - current.nano_usd if current is not None else 0
        return self.nano_usd + more

    @property
    def covered_tokens(self) -> int:
        """Return the completion tokens up to which the reservation lasts. If a budget binds the query, this
        is at most TOP_UP_TOKENS from now, whose cost is `nano_usd_ahead`.
        """
        covered = self.reservation.tokens - self.prompt_tokens
        if self.reservation.counts(Unit.NANO_USD):
            return min(covered, self.completion_tokens + TOP_UP_TOKENS)
        return covered

    def add_attempt(self, attempt: LiveAttempt) -> None:
        self._attempts.append(attempt)
        if not attempt.resumed_tokens:  # the attempt generates the answer from the start
            self._token_ids, self._tokens = [], 0
        if self.expired:
            attempt.expire()
        if self._queue_s is None:
            self._queue_s = self._clock() - self.query.received_s

    def open(self, attempt: LiveAttempt) -> Opening:
        """Return the Opening, at the first token of the answer, and keep the site that began it."""
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
        """Replace the query by one for another model, and drop the demand and prefix of the old model."""
        self.query, self.first_demand, self.prefix = query, None, None

    def set_forecast(self, forecast: Forecast) -> None:
        self.forecast = forecast
        max_tokens = self.query.sampling.max_tokens
        self.capped_forecast = forecast if max_tokens is None else forecast.capped(max_tokens)
        self._forecast_s = self._clock() - self.query.received_s

    def expire(self) -> None:
        """End the wait in progress with TimeoutError, and every later one as it begins."""
        self.expired = True
        if self.current is not None:
            self.current.expire()
        if self.forecast_future is not None and not self.forecast_future.done():
            self.forecast_future.set_exception(TimeoutError())
        if self.wait_timeout is not None:
            with suppress(RuntimeError):  # the wait is over
                self.wait_timeout.reschedule(0.0)

    def fail(self, error: MicoError) -> None:
        self.error, self.error_message = type(error), error.message

    def end(self) -> None:
        """Record the time of the end for the client; token counts of the site may still arrive."""
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
        """Return the outcome to record. `prices_of` returns a site's current prices, None if unknown."""
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
        """Return the least and the greatest cost of the answer, in nano-dollars: the minimum and maximum of
        the cost paid and of the cost of the same tokens at the cheapest and the most expensive other site,
        according to the estimates of the first decision for the model.
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
    """Return OpenTelemetry's name of the operation, or the task itself where it has none, as for ranking."""
    if isinstance(prompt, Pooling):
        return {"embed": "embeddings"}.get(prompt.task, prompt.task)
    return "chat" if isinstance(prompt, Chat) else "text_completion"
