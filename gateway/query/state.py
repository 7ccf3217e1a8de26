"""What has happened to one query so far, and the record it leaves. Does no I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from gateway.domain import Attempt, Cause, Delta, Opening, Outcome, Query, Resume, SiteIdentity, Status, Usage
from gateway.errors import ClientMistake, MicoError, Overloaded
from gateway.federation.attempt import LiveAttempt
from gateway.quotas.book import Hold
from gateway.routing.demand import Demand
from predictor.forecast import Forecast


class Story:
    """`now` is the monotonic clock; `received_at` is unix time, for the record only."""

    def __init__(self, query: Query, now: Callable[[], float], received_at: float) -> None:
        self.query = query
        self.forecast: Forecast | None = None
        self.expected: Forecast | None = None  # the same, capped by what the client allows
        self.demand: Demand | None = None  # of the first try
        self.begun_at: SiteIdentity | None = None  # who sent the first token
        self.error: MicoError | None = None
        self.answered = False
        self.ended_s: float | None = None
        self.hold = Hold()
        self.late = False  # its time is up
        self.forecasting: asyncio.Future[Forecast] | None = None
        self.waiting: asyncio.Timeout | None = None  # what else it waited for last, and may wait for still
        self._resumable = query.sampling.resumable
        self._now = now
        self._received_at = received_at
        self._attempts: list[LiveAttempt] = []
        self._first_token_s: dict[str, float] = {}
        self._forecast_s: float | None = None
        self._queue_s: float | None = None
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._tokens = 0  # delivered, as the sites counted them
        self._calls = 0
        self._argument_chars = 0  # of the last call

    @property
    def current(self) -> LiveAttempt | None:
        return self._attempts[-1] if self._attempts else None

    @property
    def opened(self) -> bool:
        return bool(self._first_token_s)

    @property
    def prompt_tokens(self) -> int:
        """As the last site counted them; 0 before any site has."""
        for attempt in reversed(self._attempts):
            if attempt.accepted is not None:
                return attempt.accepted.prompt_tokens
        return 0

    @property
    def completion_tokens(self) -> int:
        """As the sites counted them. A resumed attempt counts what it was given, so the largest is all.

        Once there is an answer it is the last attempt's: what another lost before delivery is not in it.
        """
        if self._attempts and (self.answered or len(self._attempts) == 1):
            return self._attempts[-1].completion_tokens
        return max((attempt.completion_tokens for attempt in self._attempts), default=0)

    @property
    def used_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def delivered(self) -> Resume | None:
        """What the client has by now; None before the first token."""
        if not self.opened:
            return None
        ids = tuple(self._token_ids) if len(self._token_ids) == self._tokens else ()
        return Resume(ids, "".join(self._text), self._tokens, self._calls, self._argument_chars)

    @property
    def too_short_tokens(self) -> int:
        """The longest context that a site found too short for the prompt; 0 if none did."""
        tried = [a for a in self._attempts if a.broken and a.broken.cause is Cause.CONTEXT_LENGTH]
        return max((a.site.models[self.query.model].context_tokens for a in tried), default=0)

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.completion_tokens)

    def begin(self, attempt: LiveAttempt) -> None:
        self._attempts.append(attempt)
        if self.late:
            attempt.hurry()
        if self._queue_s is None:
            self._queue_s = self._now() - self.query.received_s

    def open(self, attempt: LiveAttempt) -> Opening:
        """The first token of the first attempt that brings one."""
        self.begun_at = attempt.site
        return Opening(
            site=attempt.site.name,
            cloud=attempt.site.cloud,
            region=attempt.site.region,
            attempts=len(self._attempts),
            queue_s=self._queue_s or 0.0,
            prompt_tokens=self.prompt_tokens,
            fingerprint=attempt.site.models[self.query.model].revision,
        )

    def foresee(self, forecast: Forecast) -> None:
        self.forecast = forecast
        most = self.query.sampling.max_tokens
        self.expected = forecast if most is None else forecast.capped(most)
        self._forecast_s = self._now() - self.query.received_s

    def hurry(self) -> None:
        """What it waits for is late from now on."""
        self.late = True
        if self.current is not None:
            self.current.hurry()
        if self.forecasting is not None and not self.forecasting.done():
            self.forecasting.set_exception(TimeoutError())
        if self.waiting is not None:
            with suppress(RuntimeError):  # it does not wait
                self.waiting.reschedule(0.0)

    def end(self) -> None:
        """Nothing more goes to the client; counts may still arrive."""
        self.ended_s = self._now()

    def take(self, attempt: LiveAttempt, delta: Delta) -> None:
        """Note what is about to be handed to the client."""
        if attempt.id not in self._first_token_s:
            self._first_token_s[attempt.id] = self._now() - self.query.received_s
        if not self._resumable:
            return
        self._token_ids.extend(delta.token_ids)
        self._text.append(delta.text)
        self._tokens = max(self._tokens, delta.completion_tokens)
        for call in delta.tool_calls:
            if call.index >= self._calls:
                self._calls, self._argument_chars = call.index + 1, 0
            self._argument_chars += len(call.arguments)

    def outcome(self) -> Outcome:
        query = self.query
        return Outcome(
            query_id=query.id,
            request_id=query.request_id,
            tenant=query.caller.tenant,
            key_id=query.caller.key_id,
            model=query.model,
            status=self._status(),
            error=self.error.message if self.error else "",
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            forecast=self.forecast,
            attempts=tuple(map(self._ended, self._attempts)),
            received_at=self._received_at,
            queue_s=self._queue_s,
            first_token_s=min(self._first_token_s.values(), default=None),
            total_s=(self._now() if self.ended_s is None else self.ended_s) - query.received_s,
            forecast_s=self._forecast_s,
            traceparent=query.traceparent,
            mistaken=isinstance(self.error, ClientMistake),
        )

    def _status(self) -> Status:
        if self.answered:
            return Status.ANSWERED
        if self.error is None:
            return Status.CANCELLED
        before_any_site = not self._attempts or isinstance(self.error, ClientMistake | Overloaded)
        return Status.REFUSED if before_any_site else Status.FAILED

    def _ended(self, attempt: LiveAttempt) -> Attempt:
        return Attempt(
            decision=attempt.decision,
            ended=attempt.broken.cause.value if attempt.broken else "finished",
            prompt_tokens=attempt.accepted.prompt_tokens if attempt.accepted else 0,
            completion_tokens=attempt.completion_tokens,
            first_token_s=self._first_token_s.get(attempt.id),
        )
