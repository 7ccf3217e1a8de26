"""The story of one query: admit → forecast → decide → dispatch → relay → settle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from gateway.domain import Decision, Piece, Query
from gateway.errors import DeadlinePassed, Ending, Forbidden, MicoError
from gateway.federation.attempt import AttemptBroken, LiveAttempt
from gateway.query.admission import admit
from gateway.query.context import Gateway
from gateway.query.state import Story
from gateway.quotas.book import Full
from gateway.routing.decide import Placement, decide
from gateway.routing.demand import Demand
from gateway.routing.failover import Setback, Try, gave_up, same_weights, tries, ways_on
from gateway.routing.policies import JOINTLY
from predictor.forecast import Forecast

T = TypeVar("T")


async def answer(gateway: Gateway, query: Query) -> AsyncGenerator[Piece, None]:
    """Yield Opening, Delta …, Usage; raise a MicoError where that can't go on.

    Close it to give the query up: its slots are freed, what it used is still recorded. Exactly one outcome is
    recorded for every query that was admitted or refused here.
    """
    story = gateway.tell(query)
    alarm = asyncio.get_running_loop().call_later(left_s(gateway, story), story.hurry)
    try:
        admit(
            query,
            models=gateway.directory.models,
            live=gateway.live,
            of_tenant=gateway.live_of(query.caller.tenant),
            most_live=gateway.most_live,
            has_room=gateway.has_room(),
            complete=gateway.complete,
        )
        gateway.begin(story)
        await reserve_prompt(gateway, story)
        story.foresee(await foreseen(gateway, story))
        await reserve_answer(gateway, story)
        plan = tries(query.sampling, gateway.most_tries, query.toward)
        this = await gather(gateway, story, next(plan))
        while not story.answered:
            attempt = dispatch(gateway, story, this)
            try:
                async for piece in relay(gateway, story, attempt):
                    yield piece
                story.answered = True
            except AttemptBroken as broken:
                this = plan.send(Setback(broken.broken, story.delivered))
        yield story.usage
    except MicoError as error:
        story.error = error
        raise
    except Exception as error:
        story.error = MicoError(f"the gateway failed unexpectedly: {type(error).__name__}")
        raise
    finally:
        alarm.cancel()
        gateway.settle(story)


def dispatch(gateway: Gateway, story: Story, this: Try) -> LiveAttempt:
    """Decide on a site and reserve room there. Raises the error for the client if no site can take it."""
    query, forecast = story.query, story.forecast
    assert forecast is not None, "a query is forecast before it is dispatched"
    began_s = gateway.clock() - query.received_s
    demand, placed = place(gateway, story, this)
    if placed.site is None:
        broken = story.current.broken if story.current else None
        raise out_of_reach(gateway, query) or gave_up(broken, this.resume, placed.reason)
    decision = Decision(
        query_id=query.id,
        attempt_id=gateway.new_id(),
        site=placed.site.name,
        policy=gateway.policy_name,
        reason=placed.reason,
        estimates=placed.estimates,
        excluded=placed.excluded,
        decided_s=gateway.clock() - query.received_s,
        began_s=began_s,
    )
    link = gateway.federation.links[decision.site]
    told = gateway.traced(query, decision.attempt_id)
    attempt = link.assign(told, decision, demand, forecast, resume=this.resume, moves=this.moves)
    story.begin(attempt)
    return attempt


def place(gateway: Gateway, story: Story, this: Try) -> tuple[Demand, Placement]:
    """Where it goes, by the first way of going on that a site has."""
    barred = too_short(gateway, story) | of_other_weights(gateway, story, this)
    for needs in ways_on(story.query, this.resume):
        demand = demanded(story, this, needs)
        placed = decide(
            demand,
            gateway.directory.fleet,
            gateway.policy,
            now_s=gateway.clock(),
            turn=next(gateway.turns),
            avoid=this.avoid,
            barred=barred,
            toward=this.toward,
            because=this.because,
        )
        if placed.site is not None:
            break
    return demand, placed


def out_of_reach(gateway: Gateway, query: Query) -> Forbidden | None:
    """The error for a key that may use none of the regions where the model is, as far as these are known."""
    sites = [site.identity for site in gateway.directory.sites if query.model in site.identity.models]
    allowed, regions = query.caller.regions, {site.region for site in sites}
    if allowed is None or regions & allowed or not gateway.complete:
        return None
    where = ", ".join(sorted(regions))
    return Forbidden(f"this key may not use the regions of {query.model}: {where}", param="model")


def demanded(story: Story, this: Try, needs: frozenset[str]) -> Demand:
    if this.number > 1:
        return demand_of(story, this, needs)
    if story.demand is None:
        story.demand = demand_of(story, this, needs)
    return story.demand


def demand_of(story: Story, this: Try, needs: frozenset[str]) -> Demand:
    query, expected = story.query, story.expected
    assert expected is not None, "a query is forecast before it is dispatched"
    delivered = this.resume.tokens if this.resume else 0
    prompt_tokens = story.prompt_tokens or query.prompt_tokens_guess
    return Demand.of(
        query.model,
        prompt_tokens,
        expected,
        query.sampling,
        delivered=delivered,
        lane=query.lane,
        needs=needs,
        regions=query.caller.regions,
    )


async def gather(gateway: Gateway, story: Story, first: Try) -> Try:
    """In a burst onto sites that are all full, wait some milliseconds to be assigned with what else comes."""
    if gateway.policy_name not in JOINTLY or first.toward is not None:
        return first
    demand = demanded(story, first, story.query.needs)
    if not gateway.window.keeps(demand, gateway.directory.fleet, gateway.clock()):
        return first
    return first._replace(toward=await in_time(gateway, story, gateway.gathered(demand)))


def too_short(gateway: Gateway, story: Story) -> dict[str, str]:
    """Sites that would refuse the prompt too, with why: it did not fit a context as long as theirs."""
    limit_tokens = story.too_short_tokens
    if not limit_tokens:
        return {}
    served = {site.name: site.identity.models.get(story.query.model) for site in gateway.directory.sites}
    short = [name for name, model in served.items() if model and model.context_tokens <= limit_tokens]
    return dict.fromkeys(short, "its context is too short")


def of_other_weights(gateway: Gateway, story: Story, this: Try) -> dict[str, str]:
    """Sites that would go on with an answer as another model, with why. It has begun once it was opened: by
    then the client was told the revision, and a token that shows no text yet is of these weights, too.
    """
    begun_at, model = story.begun_at, story.query.model
    if begun_at is None or this.resume is None:
        return {}
    others = [
        site.name for site in gateway.directory.sites if not same_weights(begun_at, site.identity, model)
    ]
    return dict.fromkeys(others, "has other weights than those that began the answer")


async def relay(gateway: Gateway, story: Story, attempt: LiveAttempt) -> AsyncGenerator[Piece, None]:
    """Hand on what the site sends, as coalesced as it comes. Raises AttemptBroken, DeadlinePassed, Ending.

    An answer that has used up the caller's quota ends like one that has reached its length.
    """
    room_tokens = 0  # what the answer may have before its reservation is looked at
    try:
        while deltas := await attempt.next():
            if not story.opened:
                yield story.open(attempt)
            for delta in deltas:
                story.take(attempt, delta)
                yield delta
            if attempt.completion_tokens <= room_tokens or attempt.ended.is_set():
                continue
            if not await covered(gateway, story):
                for delta in attempt.cut():
                    story.take(attempt, delta)
                    yield delta
                return
            room_tokens = story.hold.tokens - story.prompt_tokens
    except TimeoutError as exc:
        raise too_late(gateway, story) from exc


async def foreseen(gateway: Gateway, story: Story) -> Forecast:
    """Raises DeadlinePassed and Ending."""
    story.forecasting = gateway.forecasts.ask(story.query)
    if story.late:
        story.hurry()
    try:
        return await story.forecasting
    except TimeoutError as exc:
        raise too_late(gateway, story) from exc


async def reserve_prompt(gateway: Gateway, story: Story) -> None:
    """Hold a place and the prompt's tokens of the caller's quotas. Raises TooMany, before any forecast."""
    query = story.query

    def reserve() -> None:
        story.hold = gateway.quotas.open(query.caller, query.prompt_tokens_guess)

    await reserved(gateway, story, reserve)


async def reserve_answer(gateway: Gateway, story: Story) -> None:
    """Hold the tokens of nine answers in ten of its kind. Raises TooMany."""
    assert story.expected is not None, "a query is forecast before its answer is reserved"
    tokens = story.expected.quantile(0.9) * story.query.sampling.n
    await reserved(gateway, story, lambda: gateway.quotas.reserve(story.hold, tokens))


async def reserved(gateway: Gateway, story: Story, reserve: Callable[[], None]) -> None:
    """Where only this replica's slice of a quota is full, others are asked for more of it, once."""
    try:
        reserve()
        return
    except Full as full:
        if not full.elsewhere:
            raise full.refusal from full
    await in_time(gateway, story, gateway.lease_more())
    try:
        reserve()
    except Full as full:
        raise full.refusal from full


async def covered(gateway: Gateway, story: Story) -> bool:
    """Whether the answer may go on: what it has used is reserved, or could be topped up."""
    if gateway.quotas.covers(story.hold, story.used_tokens):
        return True
    await in_time(gateway, story, gateway.lease_more())
    return gateway.quotas.covers(story.hold, story.used_tokens)


async def in_time(gateway: Gateway, story: Story, work: Awaitable[T]) -> T:
    """Raises DeadlinePassed, and Ending when this process can wait no longer."""
    try:
        async with asyncio.timeout(left_s(gateway, story)) as story.waiting:
            return await work
    except TimeoutError as exc:
        raise too_late(gateway, story) from exc


def left_s(gateway: Gateway, story: Story) -> float:
    return 0.0 if gateway.ending else story.query.deadline_s - gateway.clock()


def too_late(gateway: Gateway, story: Story) -> MicoError:
    if gateway.ending:
        return Ending("this gateway is shutting down; send the request again")
    waited = gateway.clock() - story.query.received_s
    return DeadlinePassed(f"the answer was not complete after {waited:.0f} s")
