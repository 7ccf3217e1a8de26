"""Quotas on the way of a query: reserved, topped up, settled, refused; the database is never waited for."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from gateway.domain import Caller, Delta, Finish, Opening, Usage
from gateway.errors import AboveQuota, BudgetSpent, Forbidden, NoSite, Overloaded, TooMany, UpstreamFailed
from gateway.http.rate_headers import duration
from gateway.outcome import Status
from gateway.query.answer import answer
from gateway.quotas.ledger import QuotaLedger, QuotaStatus
from gateway.quotas.limits import Grant, Kind, LimitId, Scope
from gateway.telemetry.recent import is_failure
from tests.support.answers import backend_of, collect
from tests.support.fakes.edge import Edge, Script, error_of, fail, on_loopback, run
from tests.support.fakes.federation import Scene, scene, until
from wire import federation_pb2 as pb

TENANT = "tenant-1"
FORECAST_P90 = 90
"""Of the fakes' forecaster, 1 to 100 tokens."""


def quotas_of(**limits: int) -> QuotaLedger:
    """A replica that holds all of these quotas of the fakes' tenant."""
    found = QuotaLedger()
    ids = {LimitId(Scope.TENANT, TENANT, Kind(name)): amount for name, amount in limits.items()}
    found.set_limits(ids)
    for limit_id, amount in ids.items():
        claim = found.claim(limit_id)
        assert claim is not None
        found.apply_grant(limit_id, claim, Grant(amount, amount, 0, amount))
    return found


def used(scene: Scene, kind: Kind) -> int:
    return scene.gateway.quotas.in_use(LimitId(Scope.TENANT, TENANT, kind))


def test_tokens_are_reserved_before_the_answer_and_settled_on_what_it_took() -> None:
    async def main() -> None:
        async with scene(quotas=quotas_of(tokens_per_min=1_000, requests_per_min=10)) as here:
            site = await here.site("a")
            asking = asyncio.create_task(collect(here, here.query()))
            assign = await site.assigned()
            guess = here.query().prompt_tokens_guess
            assert used(here, Kind.TOKENS) == guess + FORECAST_P90
            await site.finish(assign, "hello", 5)
            await asking
            await here.gateway.wait_settled()
            assert used(here, Kind.TOKENS) == 7 + 5
            assert used(here, Kind.REQUESTS) == 1

    asyncio.run(main())


def test_what_does_not_fit_is_refused_before_a_site_hears_of_it() -> None:
    async def main() -> None:
        async with scene(quotas=quotas_of(tokens_per_min=100)) as here:
            site = await here.site("a")
            first = asyncio.create_task(collect(here, here.query()))
            assign = await site.assigned()
            with pytest.raises(TooMany, match=r"100 tokens per minute of tenant 'tenant-1'") as refusal:
                await collect(here, here.query())
            assert refusal.value.retry_after_s is not None and 0 < refusal.value.retry_after_s <= 61
            assert site.inbox.empty()
            await site.finish(assign, "x", 1)
            await first
            assert [outcome.status for outcome in here.outcomes] == [Status.REFUSED, Status.ANSWERED]
            assert not any(is_failure(outcome) for outcome in here.outcomes), "a quota is no failure of ours"
            assert here.nothing_is_left()

    asyncio.run(main())


def test_places_are_free_again_whatever_way_a_query_ends() -> None:
    async def main() -> None:
        async with scene(quotas=quotas_of(concurrent_queries=2)) as here:
            site = await here.site("a")
            for end in ("finish", "leave", "fail"):
                asking = [asyncio.create_task(collect(here, here.query())) for _ in range(2)]
                assigns = [await site.assigned() for _ in asking]
                with pytest.raises(TooMany, match="2 concurrent queries"):
                    await collect(here, here.query())
                for task, assign in zip(asking, assigns, strict=True):
                    if end == "finish":
                        await site.finish(assign, "x", 1)
                    elif end == "leave":
                        task.cancel()
                        assert (await site.next()).WhichOneof("body") == "cancel"
                        await site.step(assign, "", 0, finish=3)
                    else:
                        await site.step(assign, "", 0, finish=4, error="out of memory")
                await asyncio.gather(*asking, return_exceptions=True)
                await here.gateway.wait_settled()
                assert used(here, Kind.QUERIES) == 0

    asyncio.run(main())


@pytest.mark.parametrize(("prompts", "status"), [(2, 200), (3, 400)])
def test_more_prompts_than_may_run_at_once_are_a_mistake_of_the_request(prompts: int, status: int) -> None:
    """A 429 would be tried again and again."""

    async def main() -> None:
        async with (
            scene(quotas=quotas_of(concurrent_queries=2)) as here,
            on_loopback(Script(), backend_of(here)) as (edge, _),
        ):
            site = await here.site("a")
            body = {"model": "m", "prompt": ["hi"] * prompts}
            asking = asyncio.create_task(edge.post("/v1/completions", body))
            if status == 200:
                for assign in [await site.assigned() for _ in range(prompts)]:
                    await site.finish(assign, "x", 1)
            response = await asking
            assert response.status_code == status, response.text
            if status == 400:
                error = error_of(response, 400)
                assert error["param"] == "prompt"
                assert "3 prompts" in error["message"]
                assert f"2 concurrent queries of tenant '{TENANT}'" in error["message"]
            await here.gateway.wait_settled()
            assert used(here, Kind.QUERIES) == 0

    asyncio.run(main())


def test_an_answer_longer_than_forecast_is_topped_up_and_in_the_end_cut() -> None:
    async def main() -> None:
        async with scene(quotas=quotas_of(tokens_per_min=200)) as here:
            site = await here.site("a")
            asking = asyncio.create_task(collect(here, here.query()))
            assign = await site.assigned()
            await site.step(assign, "a" * 150, 150)
            await until(lambda: used(here, Kind.TOKENS) > 150)
            assert not asking.done()
            await site.step(assign, "b" * 60, 210)
            pieces = await asking
            assert (await site.next()).WhichOneof("body") == "cancel"
            await site.step(assign, "", 215, finish=3)
            await here.gateway.wait_settled()
            assert isinstance(pieces[0], Opening)
            assert isinstance(pieces[-1], Usage)
            finishes = [piece.finish for piece in pieces if isinstance(piece, Delta) and piece.finish]
            assert finishes == [Finish.LENGTH]
            assert "".join(piece.text for piece in pieces if isinstance(piece, Delta)) == "a" * 150 + "b" * 60
            (outcome,) = here.outcomes
            assert (outcome.status, outcome.completion_tokens) == (Status.ANSWERED, 210)
            assert pieces[-1] == Usage(7, 210), "what the client was told"

    asyncio.run(main())


def test_a_client_that_does_not_read_is_held_to_its_quota_like_one_that_does() -> None:
    async def main() -> None:
        async with scene(quotas=quotas_of(tokens_per_min=200)) as here:
            site = await here.site("a")
            pieces = answer(here.gateway, here.query())
            opening = asyncio.create_task(anext(pieces))
            assign = await site.assigned()
            await site.step(assign, "a" * 150, 150)
            await opening  # and from here on nothing is read
            tokens = 150
            while site.inbox.empty() and tokens < 10_000:
                tokens += 10
                await site.step(assign, "b" * 10, tokens)
                await until(lambda: not site.inbox.empty() or used(here, Kind.TOKENS) >= tokens)  # noqa: B023
            assert (await site.next()).WhichOneof("body") == "cancel"
            await site.step(assign, "c" * 500, tokens + 500)  # until the site reads the cancel
            await site.step(assign, "", tokens + 500, finish=3)
            rest = [piece async for piece in pieces]
            await here.gateway.wait_settled()
            (outcome,) = here.outcomes
            cut_at = outcome.prompt_tokens + outcome.completion_tokens
            assert cut_at == used(here, Kind.TOKENS) <= 200 * 1.05 + 10
            assert rest[-1] == Usage(7, outcome.completion_tokens)
            text = "".join(piece.text for piece in rest if isinstance(piece, Delta))
            assert len(text) == outcome.completion_tokens, "all that is charged is there to be read"
            assert here.nothing_is_left()

    asyncio.run(main())


MILLI = 1_000_000
"""Nano-dollars in a thousandth of a dollar, the price of a token of these sites."""


def test_a_budget_is_reserved_by_the_forecast_and_settled_by_what_the_answer_cost() -> None:
    async def main() -> None:
        async with scene(quotas=quotas_of(usd_per_month=1_000 * MILLI)) as here:
            site = await here.site("a", output_usd_per_mtok=1_000.0)
            asking = asyncio.create_task(collect(here, here.query()))
            assign = await site.assigned()
            assert used(here, Kind.BUDGET) == FORECAST_P90 * MILLI
            await site.finish(assign, "hello", 5)
            await asking
            await here.gateway.wait_settled()
            assert here.outcomes[0].nano_usd == used(here, Kind.BUDGET) == 5 * MILLI

    asyncio.run(main())


def test_an_answer_beyond_its_budget_is_cut_and_the_next_is_told_when_the_month_ends() -> None:
    async def main() -> None:
        async with scene(quotas=quotas_of(usd_per_month=200 * MILLI)) as here:
            site = await here.site("a", output_usd_per_mtok=1_000.0)

            def count() -> int:
                live = [state.current for state in here.gateway.live_queries.values()]
                return max((each.completion_tokens for each in live if each), default=0)

            asking = asyncio.create_task(collect(here, here.query()))
            assign, tokens = await site.assigned(), 0
            while site.inbox.empty() and tokens < 1_000:
                tokens += 10
                await site.step(assign, "a" * 10, tokens)
                await site.report()
                await until(lambda: not site.inbox.empty() or count() >= tokens)  # noqa: B023
            assert (await site.next()).WhichOneof("body") == "cancel"
            await site.step(assign, "", tokens, finish=3)
            pieces = await asking
            await here.gateway.wait_settled()
            assert [p.finish for p in pieces if isinstance(p, Delta) and p.finish] == [Finish.LENGTH]
            assert 100 * MILLI <= used(here, Kind.BUDGET) <= 1.05 * 200 * MILLI
            assert pieces[-1].nano_usd == used(here, Kind.BUDGET)  # type: ignore[union-attr]
            with pytest.raises((BudgetSpent, AboveQuota, TooMany), match=r"\$0\.20 per month of tenant"):
                await collect(here, here.query())

    asyncio.run(main())


def test_an_error_instead_of_an_answer_spends_no_budget() -> None:
    async def main() -> None:
        async with scene(quotas=quotas_of(usd_per_month=1_000 * MILLI)) as here:
            site = await here.site("a", output_usd_per_mtok=1_000.0)
            asking = asyncio.create_task(collect(here, here.query()))
            assign = await site.assigned()
            failed = pb.Delta(attempt_id=assign.attempt_id, finish=pb.Delta.FAILED, error="broken")
            await site.send(step=pb.Step(deltas=[failed]))
            with pytest.raises(UpstreamFailed):
                await asking
            await here.gateway.wait_settled()
            assert used(here, Kind.BUDGET) == 0

    asyncio.run(main())


def test_an_answer_that_outgrows_its_slice_waits_for_more_and_goes_on() -> None:
    quotas = quotas_of(tokens_per_min=1_000)
    tokens = LimitId(Scope.TENANT, TENANT, Kind.TOKENS)
    leased = asyncio.Event()

    async def lease_more() -> bool:
        await leased.wait()
        claim = quotas.claim(tokens)
        assert claim is not None
        quotas.apply_grant(tokens, claim, Grant(1_000, 1_000, 0, 1_000))
        return True

    async def main() -> None:
        async with scene(quotas=quotas, lease_more=lease_more) as here:
            site = await here.site("a")
            asking = asyncio.create_task(collect(here, here.query()))
            assign = await site.assigned()
            quotas._limits[tokens].ceiling = 100
            await site.step(assign, "a" * 300, 300)
            await until(lambda: quotas._limits[tokens].unmet > 0)
            leased.set()
            await until(lambda: used(here, Kind.TOKENS) >= 307)
            await site.finish(assign, "b", 301)
            pieces = await asking
            finishes = [piece.finish for piece in pieces if isinstance(piece, Delta) and piece.finish]
            assert finishes == [Finish.STOP]
            await here.gateway.wait_settled()
            assert used(here, Kind.TOKENS) == 308

    asyncio.run(main())


def test_a_slice_that_is_short_is_asked_for_once_and_the_query_goes_on() -> None:
    quotas = quotas_of(tokens_per_min=1_000)
    tokens = LimitId(Scope.TENANT, TENANT, Kind.TOKENS)
    asked = 0

    async def lease_more() -> bool:
        nonlocal asked
        asked += 1
        claim = quotas.claim(tokens)
        assert claim is not None and claim.want > 0
        quotas.apply_grant(tokens, claim, Grant(1_000, 1_000, 0, 1_000))
        return True

    async def main() -> None:
        quotas._limits[tokens].ceiling = 0
        async with scene(quotas=quotas, lease_more=lease_more) as here:
            site = await here.site("a")
            asking = asyncio.create_task(collect(here, here.query()))
            await site.finish(await site.assigned(), "x", 1)
            await asking

    asyncio.run(main())
    assert asked == 1


def test_one_tenant_does_not_fill_the_gateway() -> None:
    async def main() -> None:
        async with scene(max_live=10) as here:
            site = await here.site("a", slots=20)
            flood = [asyncio.create_task(collect(here, here.query())) for _ in range(12)]
            await until(lambda: sum(task.done() for task in flood) == 3)
            refusals = [task.exception() for task in flood if task.done()]
            assert all(isinstance(each, Overloaded) and "tenant-1" in each.message for each in refusals)
            assert here.gateway.live_of(TENANT).queries == 9
            other = here.query(caller=Caller("key-2", "tenant-2"))
            asking = asyncio.create_task(collect(here, other))
            await until(lambda: here.gateway.live_of("tenant-2").queries == 1)
            for _ in range(10):
                await site.finish(await site.assigned(), "x", 1)
            await asyncio.gather(*flood, asking, return_exceptions=True)
            await here.gateway.wait_settled()
            assert here.nothing_is_left()
            assert here.gateway.live_of(TENANT).queries == 0

    asyncio.run(main())


def test_the_prompts_of_live_queries_bound_memory_and_no_tenant_fills_it() -> None:
    huge = "€" * 500_000  # two bytes of memory each

    async def main() -> None:
        async with scene(max_prompt_bytes=10 * 2**20) as here:
            site = await here.site("a", slots=40)
            flood = [
                asyncio.create_task(collect(here, msgspec.structs.replace(here.query(), prompt=huge)))
                for _ in range(30)
            ]
            await until(lambda: sum(task.done() for task in flood) == 22, "the refusals")
            assert here.gateway.live == 8
            refusals = [task.exception() for task in flood if task.done()]
            assert all(isinstance(each, Overloaded) and each.retry_after_s for each in refusals)
            assert 8_000_000 < here.gateway.prompt_bytes < 8_100_000
            other = here.query(caller=Caller("key-2", "tenant-2"))
            with pytest.raises(Overloaded, match="fill the memory"):
                await collect(here, msgspec.structs.replace(other, prompt="x" * 3 * 2**20))
            asking = asyncio.create_task(collect(here, here.query(caller=Caller("key-2", "tenant-2"))))
            await until(lambda: here.gateway.live_of("tenant-2").queries == 1, "the other tenant's query")
            for _ in range(here.gateway.live):
                await site.finish(await site.assigned(), "x", 1)
            await asyncio.gather(*flood, asking, return_exceptions=True)
            await here.gateway.wait_settled()
            assert here.nothing_is_left()
            assert here.gateway.live_of(TENANT) == (0, 0)

    asyncio.run(main())


def test_a_key_may_only_use_sites_of_its_regions() -> None:
    async def main() -> None:
        async with scene() as here:
            site = await here.site("a")
            outside = Caller("key-2", "tenant-2", regions=frozenset({"elsewhere"}))
            with pytest.raises(Forbidden, match="this key may not use the regions of m: here"):
                await collect(here, here.query(caller=outside))
            assert (here.outcomes[-1].status, here.outcomes[-1].mistaken) == (Status.REFUSED, True)
            here.gateway.fleet_complete_s = float("inf")  # a site elsewhere may be on its way back
            with pytest.raises(NoSite, match="this key may not use region here"):
                await collect(here, here.query(caller=outside))
            inside = Caller("key-3", "tenant-2", regions=frozenset({"elsewhere", "here"}))
            asking = asyncio.create_task(collect(here, here.query(caller=inside)))
            await site.finish(await site.assigned(), "x", 1)
            await asking

    asyncio.run(main())


def shown(caller: Caller, kind: Kind) -> QuotaStatus | None:
    return {Kind.REQUESTS: QuotaStatus(60, 59, 0.012), Kind.TOKENS: QuotaStatus(5_000, 4_321, 360.0)}.get(
        kind
    )


TOLD = {
    "x-ratelimit-limit-requests": "60",
    "x-ratelimit-remaining-requests": "59",
    "x-ratelimit-reset-requests": "12ms",
    "x-ratelimit-limit-tokens": "5000",
    "x-ratelimit-remaining-tokens": "4321",
    "x-ratelimit-reset-tokens": "6m0s",
}


@pytest.mark.parametrize("stream", [False, True])
def test_rate_limit_headers_show_the_quota(stream: bool) -> None:
    async def scenario(edge: Edge) -> None:
        response = await edge.chat(stream=stream)
        assert response.status_code == 200
        headers = response.headers.items()
        assert {name: value for name, value in headers if name.startswith("x-ratelimit-")} == TOLD

    run(scenario, quota_status=shown)


@pytest.mark.parametrize(
    ("error", "code", "retry"),
    [
        (TooMany("the quota of 9 requests per minute", retry_after_s=2.5), "rate_limit_exceeded", None),
        (BudgetSpent("the quota of 9 tokens per month"), "insufficient_quota", "false"),
        (AboveQuota("this query alone needs 10"), "rate_limit_exceeded", "false"),
    ],
)
def test_a_full_quota_is_openai_s_429_with_the_time_to_wait(
    error: TooMany, code: str, retry: str | None
) -> None:
    async def scenario(edge: Edge) -> None:
        response = await edge.chat()
        body = error_of(response, 429)
        assert (body["code"], body["message"]) == (code, error.message)
        assert response.headers["retry-after"] == ("120" if retry else "3")
        assert response.headers.get("x-should-retry") == retry
        headers = response.headers.items()
        assert {name: value for name, value in headers if name.startswith("x-ratelimit-")} == TOLD

    run(scenario, fail(error), quota_status=shown)


def test_without_quotas_no_header_speaks_of_them() -> None:
    async def scenario(edge: Edge) -> None:
        assert not [name for name in (await edge.chat()).headers if name.startswith("x-ratelimit")]

    run(scenario)


@pytest.mark.parametrize(("asked", "granted"), [(-5, 0), (0, 0), (3, 3)])
def test_a_client_puts_itself_back_but_not_forward(asked: int, granted: int) -> None:
    async def scenario(edge: Edge) -> None:
        assert (await edge.chat(priority=asked)).status_code == 200

    assert run(scenario).query.priority == granted


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0ms"), (0.0124, "12ms"), (1.5, "1.5s"), (60.0, "1m0s"), (3_725.2, "62m5s")]
)
def test_durations_read_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
