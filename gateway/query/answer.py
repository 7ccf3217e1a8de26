"""The core loop of one query: admit → reserve → forecast → decide → dispatch → relay → settle.

HTTP is handled in `gateway/http`, and the choice of a site in `gateway/routing`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import NamedTuple

from gateway.decision import Decision
from gateway.domain import AnswerEvent, Query
from gateway.errors import MicoError
from gateway.failure import INABILITIES, AttemptFailure, FailureCause
from gateway.federation.attempt import AttemptFailed, LiveAttempt
from gateway.prompt import Pooling
from gateway.query.admission import Live, admit
from gateway.query.context import QueryContext
from gateway.query.deadline import Deadline
from gateway.query.demands import demand_of
from gateway.query.forecasting import NO_ANSWER
from gateway.query.quotas import QueryQuotas
from gateway.query.refusals import able_is_away, may_come_back, refusal_of, unable_sites
from gateway.query.targets import Targets, prospect_of
from gateway.routing.decide import Placement
from gateway.routing.demand import Demand
from gateway.routing.failover import FailedTry, Try, final_error, resume_options, tries
from gateway.routing.policies import JOINT_POLICIES

REJOIN_WITHIN_S = 10.0
"""How long a query waits for a site: the longest pause of a site between two dials."""
REJOIN_POLL_S, REJOIN_POLL_SHARE = 0.1, 0.1
"""The interval between checks of the sites while waiting: the larger of REJOIN_POLL_S seconds and
REJOIN_POLL_SHARE of the time waited so far.
"""
ROOM_AFTER_S, ASK_AGAIN_AFTER_S = 0.5, 3.0
"""Seconds until a site that was too full to resume an answer is tried again: ROOM_AFTER_S if the site is no
longer crowded, ASK_AGAIN_AFTER_S in any case.
"""


def answer(context: QueryContext, query: Query) -> AsyncGenerator[AnswerEvent, None]:
    """Yield Opening, Delta …, Usage. Raises a MicoError if the answer cannot be completed.

    Closing the generator cancels the query: its slots are freed, and its usage is still recorded. Exactly one
    outcome is recorded for each query, admitted or refused.
    """
    return QueryRun(context, query).run()


class Assignment(NamedTuple):
    """A try with its decision: the chosen site, and the demand that the site was chosen for."""

    planned: Try
    demand: Demand
    decision: Decision


class QueryRun:
    """Runs one query from admission to settlement. `run` calls the other methods in order."""

    __slots__ = ("_plan", "_targets", "context", "deadline", "quotas", "state")

    def __init__(self, context: QueryContext, query: Query) -> None:
        self.context = context
        self.state = context.new_state(query)
        self.deadline = Deadline(context, self.state)
        self.quotas = QueryQuotas(context, self.state, self.deadline)
        self._targets = Targets()
        self._plan = self._tries()

    @property
    def query(self) -> Query:
        return self.state.query

    async def run(self) -> AsyncGenerator[AnswerEvent, None]:
        """Yield the events of the answer. After a failed attempt, continue with the next try until none is
        left. Raises a MicoError if the answer cannot be completed.
        """
        state = self.state
        # The deadline is a timer that expires the current wait and every later one, not `asyncio.timeout()`:
        # a timeout must not span a `yield` of an async generator. It cancels the task that entered it, which
        # may be running the consumer's code at that moment, and another task may close the generator.
        timer = asyncio.get_running_loop().call_later(self.deadline.left_s(), state.expire)
        try:
            self._switch_to(self._targets.begin(self.query, self.context))
            self.admit()
            await self.quotas.reserve_prompt()
            await self.forecast()
            await self.stand_in()
            await self.quotas.reserve_answer()
            planned = await self.batch_assign(next(self._plan))
            while not state.answered:
                assignment = await self.assign(planned)
                attempt = self.dispatch(assignment)
                try:
                    async for event in self.relay(attempt):
                        yield event
                    state.answered = True
                    self._learn_cached(assignment)
                except AttemptFailed as failed:
                    planned = await self.next_try(FailedTry(failed.failure, state.delivered, state.failure))
            yield state.usage
        except MicoError as error:
            state.fail(error)
            raise
        except Exception as error:
            state.fail(MicoError(f"the gateway failed unexpectedly: {type(error).__name__}"))
            raise
        finally:
            timer.cancel()
            self.settle()

    def admit(self) -> None:
        """Register the query as live. Raises the errors of `admission.admit`."""
        context, query = self.context, self.query
        admit(
            query,
            models=context.directory.models,
            live=Live(context.live, context.prompt_bytes + self.state.prompt_bytes),
            tenant_live=context.live_of(query.caller.tenant),
            max_live=Live(context.max_live, context.max_prompt_bytes),
            has_room=context.has_room(),
            fleet_complete=context.fleet_complete,
        )
        context.register(self.state)

    async def forecast(self) -> None:
        """Wait for the forecast of the answer's length. A pooling query, which generates no tokens, gets
        NO_ANSWER at once. Raises DeadlinePassed and ShuttingDown.
        """
        state = self.state
        if isinstance(self.query.prompt, Pooling):
            state.set_forecast(NO_ANSWER)
            return
        state.forecast_future = self.context.forecasts.request(self.query)
        if state.expired:
            state.expire()
        try:
            state.set_forecast(await state.forecast_future)
        except TimeoutError as exc:
            raise self.deadline.error() from exc

    async def stand_in(self) -> None:
        """Switch to another target of the route if the current one is overloaded or slow."""
        if not self._targets.are_left:
            return
        demand = demand_of(self.context, self.state, Try(1))
        switched = self._targets.stand_in(self.query, lambda model: prospect_of(demand, model, self.context))
        if switched is not None:
            self._switch_to(switched)
            await self.forecast()

    async def batch_assign(self, first: Try) -> Try:
        """Wait for joint assignment (WINDOW_S) if the query is part of a burst and every site is full.

        Return the try with the site that joint assignment chose as its preferred site.
        """
        context = self.context
        if context.policy_name not in JOINT_POLICIES or first.preferred_site is not None:
            return first
        demand = demand_of(context, self.state, first)
        if not context.window.should_wait(demand, context.directory.fleet, context.clock()):
            return first
        return first._replace(preferred_site=await self.deadline.wait(context.assign_in_window(demand)))

    async def assign(self, planned: Try) -> Assignment:
        """Decide on the site for a try. If no site can take it and nothing of the answer has been delivered,
        decide on the first try of the route's next target instead. Raises the error for the client.
        """
        while True:
            planned = await self.await_rejoin(planned)
            try:
                return self.decide(planned)
            except MicoError as error:
                if self.state.opened:
                    raise
                planned = await self._next_target(error)

    async def next_try(self, failed: FailedTry) -> Try:
        """Return the try that follows a failed one. Raises the error for the client if none is left."""
        try:
            return self._plan.send(failed)
        except MicoError as error:
            if self.state.opened:
                raise
            return await self._next_target(error)

    async def await_rejoin(self, planned: Try) -> Try:
        """Wait up to REJOIN_WITHIN_S for a site if the last attempt's site was lost, or was too full to
        resume the answer, and no other can take over. Return the try, which may allow full sites again.

        A stall of this process or a network outage ends all links at once, and the sites dial again. When a
        site is lost, its answers may fill the queue of the only site that is left.
        """
        context, current = self.context, self.state.current
        failure = current.failure if current is not None else None
        if failure is None or (failure.cause is not FailureCause.LOST and failure.site not in planned.full):
            return planned
        if self._targets.are_left and not self.state.opened:
            return planned
        began_s = context.clock()
        while (now_s := context.clock()) < began_s + REJOIN_WITHIN_S and (
            planned.full or may_come_back(self.query, planned.tried, context.directory.sites, now_s)
        ):
            asked = self._asking_again(planned, now_s - began_s)
            if self._place(asked)[1].site is not None:
                return asked
            await self.deadline.wait(asyncio.sleep(max(REJOIN_POLL_S, REJOIN_POLL_SHARE * (now_s - began_s))))
        return planned

    def _asking_again(self, planned: Try, waited_s: float) -> Try:
        """Return the try with those full sites allowed again that may have room after `waited_s`."""
        again = {
            site
            for site in planned.full
            if waited_s >= ASK_AGAIN_AFTER_S
            or (waited_s >= ROOM_AFTER_S and self.context.directory.crowded(site) is None)
        }
        return planned._replace(tried=planned.tried - again, full=planned.full - again)

    def decide(self, planned: Try) -> Assignment:
        """Choose the site for a try. Raises the error for the client if no site can take it."""
        context, query = self.context, self.query
        began_s = context.clock() - query.received_s
        demand, placed = self._place(planned)
        if placed.site is None:
            raise self._no_site_error(planned, demand, placed.reason)
        decision = Decision(
            query_id=query.id,
            attempt_id=context.new_id(),
            site=placed.site.name,
            policy=context.policy_name,
            reason=placed.reason,
            estimates=placed.estimates,
            excluded=placed.excluded,
            decided_s=context.clock() - query.received_s,
            began_s=began_s,
        )
        return Assignment(planned, demand, decision)

    def dispatch(self, assignment: Assignment) -> LiveAttempt:
        """Send the query to the chosen site, and count its demand as credit of the site."""
        planned, demand, decision = assignment
        forecast = self.state.forecast
        assert forecast is not None, "a query is forecast before it is dispatched"
        link = self.context.federation.links[decision.site]
        traced = self.context.trace_query(self.query, decision.attempt_id)
        attempt = link.assign(
            traced,
            decision,
            demand,
            forecast,
            resume=planned.resume,
            moves=planned.moves,
            excluded=planned.tried.union(self._excluded(planned)),
            prefix_hashes=self.state.prefix.announced if self.state.prefix else b"",
        )
        if self.state.reservation.bound and not isinstance(self.query.prompt, Pooling):
            attempt.on_uncovered = self.quotas.top_up
        self.state.add_attempt(attempt)
        return attempt

    async def relay(self, attempt: LiveAttempt) -> AsyncGenerator[AnswerEvent, None]:
        """Yield the site's output as it arrives. Raises AttemptFailed, DeadlinePassed and ShuttingDown."""
        state = self.state
        try:
            while deltas := await attempt.next():
                if attempt.id not in state.first_token_s:
                    if not state.opened:
                        yield state.open(attempt)
                    state.record_first(attempt)
                    if state.prefix is not None:
                        self.context.prefixes.record(state.prefix, attempt.site.name, self.context.clock())
                for delta in deltas:
                    state.record_delta(delta)
                    yield delta
        except TimeoutError as exc:
            raise self.deadline.error() from exc

    def settle(self) -> None:
        """End the query: cancel an attempt that still runs, record one outcome, and return unused quota."""
        self.quotas.close()
        self.context.settle(self.state)

    # ---- deciding

    def _tries(self) -> Generator[Try, FailedTry, None]:
        return tries(self.query.sampling, self.context.max_tries, self.query.preferred_site)

    def _switch_to(self, query: Query) -> None:
        """Replace the query, for another model, and plan its tries again. Called only before delivery."""
        if query is not self.query:
            self.state.switch_to(query)
            self._plan = self._tries()

    async def _next_target(self, error: MicoError) -> Try:
        """Switch to the next target of the route and return its first try. Raises the error for the client if
        no target is left. Not called once the answer has begun, as only the same model can continue it.
        """
        self._switch_to(self._targets.after(error, self.query, self.context.directory.models))
        await self.forecast()
        return next(self._plan)

    def _place(self, planned: Try) -> tuple[Demand, Placement]:
        """Choose a site, using the first way of resuming the answer that some site supports."""
        excluded = self._excluded(planned)
        for needs in resume_options(self.query, planned.resume):
            demand = demand_of(self.context, self.state, planned, needs)
            placed = self.context.place(demand, planned, excluded)
            if placed.site is not None:
                break
        return demand, placed

    def _no_site_error(self, planned: Try, demand: Demand, reason: str) -> MicoError:
        """Return the error for a try that no site can take now. `reason`: why the sites were excluded."""
        context, query, failure = self.context, self.query, self.state.failure
        if self.state.opened:
            return final_error(failure, planned.resume, reason)
        if failure is not None and self._is_move(failure, planned):
            failure = None
        elif failure is not None and self._may_be_able_later(failure):
            reason = f"{reason}; {failure.site}: {failure.message}"
            failure = None
        if not context.fleet_complete:
            reason = f"{reason}; this gateway has just started, and sites may still join"
            return final_error(failure, planned.resume, reason)
        refusal = refusal_of(query, demand, query.needs, context.directory.sites, context.clock())
        return refusal or final_error(failure, planned.resume, reason)

    def _is_move(self, failure: AttemptFailure, planned: Try) -> bool:
        """Return whether the site released the query to a site that bid for it, which is not a failure."""
        return failure.cause is FailureCause.RELEASED and failure.site not in planned.tried

    def _may_be_able_later(self, failure: AttemptFailure) -> bool:
        """Return whether the site lacked an ability that a site which takes no work now may have."""
        context, limit_tokens = self.context, self.state.too_short_context_tokens
        return failure.cause in INABILITIES and (
            not context.fleet_complete
            or able_is_away(self.query, failure, limit_tokens, context.directory.sites, context.clock())
        )

    def _excluded(self, planned: Try) -> dict[str, str]:
        """Return the sites that serve the query's model but can't take the query, each with the reason."""
        state, limit_tokens = self.state, self.state.too_short_context_tokens
        begun_by = state.opened_by if planned.resume is not None else None
        if not limit_tokens and begun_by is None:
            return {}  # the common case: skip `directory.sites`, which is rebuilt after each change
        return unable_sites(self.query.model, limit_tokens, begun_by, self.context.directory.sites)

    def _learn_cached(self, assignment: Assignment) -> None:
        """Correct the prefix index by the share of the prompt that the site found in its cache. Skipped if
        the share is unknown, and for resumed answers and echoed prompts, which do not use the cache.
        """
        state = self.state
        expected, site = assignment.demand.cached, assignment.decision.site
        uses_cache = not self.query.sampling.echo and assignment.planned.resume is None
        if site in expected.evidence and uses_cache and not state.cached_unknown:
            found = state.cached_tokens / max(1, state.prompt_tokens)
            self.context.prefixes.correct(expected, site, found)
