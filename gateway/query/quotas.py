"""Reserve the quotas of one query, and top up the reservation as its answer grows.

`QueryContext` settles the reservation once the last token count of the answer is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.errors import DeadlinePassed, ShuttingDown, TooMany
from gateway.federation.attempt import LiveAttempt
from gateway.query.context import QueryContext
from gateway.query.deadline import Deadline
from gateway.query.demands import demand_of
from gateway.query.state import QueryState
from gateway.quotas.ledger import SliceFull
from gateway.quotas.limits import Unit
from gateway.routing.decide import most_nano_usd
from gateway.routing.failover import Try

LEASE_WITHIN_S = 2.0
"""How long a query waits for its replica to lease more of a quota before it is refused or its answer cut."""


class QueryQuotas:
    """The quota reservation of one query, from its prompt to the end of its answer."""

    __slots__ = ("_context", "_deadline", "_leasing", "_state")

    def __init__(self, context: QueryContext, state: QueryState, deadline: Deadline) -> None:
        self._context = context
        self._state = state
        self._deadline = deadline
        self._leasing: asyncio.Task[None] | None = None  # while the answer exceeds its reservation

    async def reserve_prompt(self) -> None:
        """Reserve one request, one concurrent query and the prompt's guessed tokens. Raises TooMany,
        Overloaded if the leases have lapsed, and BadRequest if the request's queries can never run at once.
        """
        query, quotas = self._state.query, self._context.quotas
        quotas.check_together(query.caller, query.together)

        def open_reservation() -> None:
            self._state.reservation = quotas.open(query.caller, query.prompt_tokens_guess)

        await self._reserve(open_reservation)

    async def reserve_answer(self) -> None:
        """Reserve the tokens of the answer's p90 for each choice, and their cost at the most expensive site.
        Raises TooMany.
        """
        context, state = self._context, self._state
        assert state.capped_forecast is not None, "a query is forecast before its answer is reserved"
        tokens = state.capped_forecast.quantile(0.9) * state.query.sampling.n
        nano_usd = 0
        if state.reservation.counts(Unit.NANO_USD):
            demand = demand_of(context, state, Try(1))
            nano_usd = most_nano_usd(demand, context.directory.fleet, context.clock(), tokens)
        await self._reserve(lambda: context.quotas.reserve(state.reservation, tokens, nano_usd))

    def top_up(self, attempt: LiveAttempt) -> None:
        """Extend the reservation of an answer that has outgrown it. If this replica's slice is full, lease
        more in the background, or truncate the answer if the slice can't grow. Called by the attempt.
        """
        try:
            self._cover(attempt)
        except SliceFull as full:
            if not full.may_grow:
                attempt.truncate()
                return
            attempt.covered_tokens = float("inf")  # no further call until leasing has ended
            self.close()  # cancels leasing for an earlier attempt
            self._leasing = asyncio.create_task(self._lease_and_cover(attempt))

    def close(self) -> None:
        """Cancel leasing for the answer."""
        if self._leasing is not None:
            self._leasing.cancel()

    async def _reserve(self, reserve: Callable[[], None]) -> None:
        """Call `reserve`, and repeat it after each round of leasing while this replica's slice is too small.

        Raises TooMany if the slice can't grow, or after LEASE_WITHIN_S seconds.
        """
        until_s = self._context.clock() + LEASE_WITHIN_S
        while True:
            try:
                return reserve()
            except SliceFull as full:
                left_s = until_s - self._context.clock()
                if not (full.may_grow and left_s > 0 and await self._lease_more(left_s)):
                    raise full.refusal from full

    async def _lease_more(self, within_s: float) -> bool:
        """Wait for one round of leasing. Return whether one succeeded within `within_s` seconds."""
        try:
            async with asyncio.timeout(within_s):
                return await self._deadline.wait(self._context.lease_more())
        except TimeoutError:
            return False

    async def _lease_and_cover(self, attempt: LiveAttempt) -> None:
        """Lease more of the quota for an answer. Truncate the answer if that fails."""
        try:
            await self._reserve(lambda: self._cover(attempt))
        except TooMany:
            attempt.truncate()
        except (DeadlinePassed, ShuttingDown):
            return  # raised to the reader of the answer

    def _cover(self, attempt: LiveAttempt) -> None:
        """Extend the reservation to the tokens and the cost so far. Raises SliceFull."""
        state = self._state
        self._context.quotas.cover(state.reservation, state.used_tokens, state.nano_usd_ahead)
        attempt.covered_tokens = state.covered_tokens
