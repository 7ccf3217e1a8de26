"""A site that lies costs its own queries what they asked for, and nobody else anything."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.domain import Delta, Finish, Usage
from gateway.errors import BadRequest, UpstreamFailed
from gateway.federation import codec
from gateway.federation.answer_limits import OVERHEAD_BYTES, TEMPLATE_TOKENS
from gateway.prompt import MAX_VECTOR_BYTES, Pooling
from tests.support.answers import collect, run, text_of
from tests.support.fakes.federation import Scene, ScriptedSite, until
from wire import federation_pb2 as pb

MOST = 2**32 - 1


@pytest.mark.parametrize(("asked", "context", "charged"), [(5, 1024, 5), (None, 1024, 1024), (5000, 64, 64)])
def test_a_count_is_cut_to_what_was_asked_and_to_the_context(
    asked: int | None, context: int, charged: int
) -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a", context_tokens=context)
        task = asyncio.create_task(collect(here, here.query(max_tokens=asked)))
        assign = await site.assigned()
        await site.step(assign, "x", MOST)
        await site.finish(assign, "y", MOST)
        assert (await task)[-1] == Usage(prompt_tokens=7, completion_tokens=charged)
        assert here.outcomes[0].completion_tokens == charged

    run(scenario)


@pytest.mark.parametrize(
    "lie",
    [
        pb.Pooled(index=1, vector=bytes(8)),
        pb.Pooled(index=0, vector=bytes(7)),
        pb.Pooled(index=0, vector=bytes(MAX_VECTOR_BYTES + 4)),
        pb.Pooled(index=0, score=float("nan")),
    ],
)
def test_a_result_that_no_input_has_ends_the_link(lie: pb.Pooled) -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a", features=("embed",))
        query = replace(here.query(max_tokens=0), prompt=Pooling("embed", '{"input": ["x"]}', 1, 1))
        task = asyncio.create_task(collect(here, query))
        assign = await site.assigned()
        await site.step(assign, "", 0, finish=pb.Delta.STOP, pooled=[lie])
        with pytest.raises(UpstreamFailed, match="a result of input"):
            await task
        assert "a" not in here.gateway.federation.links

    run(scenario)


def test_results_that_nobody_asked_for_are_dropped() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(collect(here, here.query()))
        assign = await site.assigned()
        await site.step(assign, "x", 1, finish=pb.Delta.STOP, pooled=[pb.Pooled(index=9, vector=bytes(8))])
        pieces = await task
        assert text_of(pieces) == "x"
        assert not any(piece.pooled for piece in pieces if isinstance(piece, Delta))

    run(scenario)


@pytest.mark.parametrize("finish", [pb.Delta.CANCELLED, pb.Delta.FAILED])
def test_the_last_count_of_what_was_given_up_is_cut_too(finish: Any) -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(collect(here, here.query(max_tokens=5)))
        assign = await site.assigned()
        task.cancel()
        assert (await site.next()).cancel.attempt_id == assign.attempt_id
        await site.step(assign, "", MOST, finish=finish)
        await until(lambda: here.outcomes, "the outcome")
        assert here.outcomes[0].completion_tokens == 5

    run(scenario)


def test_a_prompt_has_no_more_tokens_than_its_bytes_explain() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a", context_tokens=1_000_000)
        task = asyncio.create_task(collect(here, here.query()))
        assign = (await site.next()).assign
        await site.send(accepted=pb.Accepted(attempt_id=assign.attempt_id, prompt_tokens=MOST))
        await site.finish(assign, "y", 1)
        usage = (await task)[-1]
        assert isinstance(usage, Usage)
        assert TEMPLATE_TOKENS < usage.prompt_tokens < TEMPLATE_TOKENS + 16 * 20

    run(scenario)


def test_the_sentences_of_a_site_are_cut_before_a_client_sees_them() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(collect(here, here.query()))
        attempt_id = (await site.next()).assign.attempt_id
        long = "x" * 2**20
        await site.send(
            rejected=pb.Rejected(attempt_id=attempt_id, reason=pb.Rejected.INVALID, message=long, param=long)
        )
        with pytest.raises(BadRequest) as refusal:
            await task
        assert len(refusal.value.message) == codec.MAX_REASON_CHARS + 1
        assert len(refusal.value.param or "") <= codec.MAX_NAME
        task = asyncio.create_task(collect(here, here.query()))
        await site.step(await site.assigned(), "", 0, finish=pb.Delta.FAILED, error=long)
        with pytest.raises(UpstreamFailed) as failure:
            await task
        assert len(failure.value.message) < codec.MAX_REASON_CHARS + 100

    run(scenario)


def test_what_was_not_asked_for_is_dropped() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(collect(here, here.query()))
        assign = await site.assigned()
        logprob = pb.TokenLogprob(token="x", top=[pb.TokenLogprob(token="y")])
        await site.step(
            assign,
            "x",
            1,
            logprobs=[logprob] * 9,
            prompt_logprobs=[logprob],
            tool_calls=[pb.ToolCall(index=0, id="1", name="rm")],
            finish=pb.Delta.TOOL_CALLS,
        )
        (delta,) = [piece for piece in await task if isinstance(piece, Delta)]
        assert (delta.logprobs, delta.prompt_logprobs, delta.tool_calls) == ((), (), ())
        assert delta.finish is Finish.STOP

    run(scenario)


def test_calls_without_end_cost_no_other_answer_of_their_site() -> None:
    """A model may well go on to call for as long as it may answer, and would at the next site, too."""

    async def scenario(here: Scene) -> None:
        site = await here.site("a", features=("tools",))
        query = here.query()
        query = replace(query, prompt=replace(query.prompt, tools_json='[{"a": 1}]'))
        task = asyncio.create_task(collect(here, query))
        assign = await site.assigned()
        calls = [pb.ToolCall(index=at, id=f"c{at}", name="add") for at in range(codec.MAX_CALLS + 1)]
        await site.step(assign, "", 9, tool_calls=calls)
        await site.finish(assign, "", 9)
        told = [call for piece in await task if isinstance(piece, Delta) for call in piece.tool_calls]
        assert [each.index for each in told] == list(range(codec.MAX_CALLS))
        assert "a" in here.gateway.federation.links

    run(scenario)


def test_alternatives_beyond_those_asked_for_are_cut() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(collect(here, here.query(logprobs=2)))
        assign = await site.assigned()
        deep = pb.TokenLogprob(token="deep")
        for _ in range(50):
            deep = pb.TokenLogprob(token="deep", top=[deep])
        await site.step(assign, "x", 1, logprobs=[pb.TokenLogprob(token="x", top=[deep] * 30)])
        await site.finish(assign, "", 1)
        deltas = [piece for piece in await task if isinstance(piece, Delta)]
        (logprob,) = [each for delta in deltas for each in delta.logprobs]
        assert [each.top for each in logprob.top] == [(), ()]

    run(scenario)


async def flood_text(site: ScriptedSite, assign: pb.Assign) -> None:
    await site.step(assign, "x" * 2 * OVERHEAD_BYTES, 1)


async def flood_ids(site: ScriptedSite, assign: pb.Assign) -> None:
    delta = pb.Delta(attempt_id=assign.attempt_id, token_ids=[1] * 2 * OVERHEAD_BYTES, completion_tokens=1)
    await site.send(step=pb.Step(deltas=[delta]))


async def flood_deltas(site: ScriptedSite, assign: pb.Assign) -> None:
    await site.send(step=pb.Step(deltas=[pb.Delta()] * (codec.MAX_DELTAS + 1)))


@pytest.mark.parametrize("flood", [flood_text, flood_ids, flood_deltas])
def test_an_answer_larger_than_any_that_was_asked_for_ends_the_link(flood: Any) -> None:
    async def scenario(here: Scene) -> None:
        mad = await here.site("a")
        other = await here.site("b", seconds_per_token=1.0)
        task = asyncio.create_task(collect(here, here.query(max_tokens=5)))
        await flood(mad, await mad.assigned())
        await other.finish(await other.assigned(), "done", 1)
        assert text_of(await task).endswith("done")
        assert "a" not in here.gateway.federation.links

    run(scenario)


@pytest.mark.parametrize(
    "figures",
    [
        {"tokens_per_s": float("inf")},
        {"tokens_per_s": -1.0},
        {"seconds_per_iteration": float("nan")},
        {"iteration": pb.IterationCost(base_s=float("-inf"))},
        {"token_load": 1e13},
        {"stalled_s": float("nan")},
        {"longest_iteration_s": -1.0},
        {"devices": [pb.DeviceLoad(tokens_per_s=float("nan"))]},
    ],
)
def test_figures_that_are_no_amounts_end_the_link(figures: dict[str, Any]) -> None:
    async def scenario(here: Scene) -> None:
        mad = await here.site("a")
        await mad.send(load=pb.Load(seq=9, **figures))
        await until(lambda: "a" not in here.gateway.federation.links, "the link to end")

    run(scenario)


@pytest.mark.parametrize("unix_s", [float("nan"), float("inf"), 1e300, -1e300])
def test_a_clock_that_is_no_time_is_not_shown(unix_s: float) -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a", answers_pings=False)
        link: Any = here.gateway.federation.links["a"]
        await site.send(pong=pb.Pong(nonce=link.pings.nonce, unix_s=unix_s))
        await until(lambda: not link.pings.unanswered, "the pong")
        assert here.gateway.directory.sites[0].clock_ahead_s is None

    run(scenario)


def hello(**change: Any) -> pb.Hello:
    fields: dict[str, Any] = {
        "protocol": 1,
        "site": "a",
        "models": [pb.Model(id="m", context_tokens=100)],
        "slots": 1,
        "kv_capacity_tokens": 100,
    }
    return pb.Hello(**(fields | change))


@pytest.mark.parametrize(
    "change",
    [
        {"models": [pb.Model(id=f"m{number}") for number in range(codec.MAX_MODELS + 1)]},
        {"models": [pb.Model(id="a\nb")]},
        {"models": [pb.Model(id="m", context_tokens=MOST)]},
        {"attempts": ["x"] * (codec.MAX_ABANDONED + 1)},
        {"input_usd_per_mtok": float("nan")},
        {"output_usd_per_mtok": -1.0},
    ],
)
def test_a_hello_that_no_correct_site_sends_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(codec.ProtocolError):
        codec.identity(hello(**change))


def test_the_names_in_a_hello_are_cut_and_printable() -> None:
    long = "x\r\nSet-Cookie: y" * 10_000
    model = pb.Model(
        id="m", context_tokens=9, revision=long, owned_by=long, features=[long] * 1000, created_s=-1
    )
    late = pb.Model(id="late", context_tokens=9, created_s=2**63 - 1)
    names = dict.fromkeys(("cloud", "region", "engine", "version", "pool", "boot_id"), long)
    site = codec.identity(hello(models=[model, late], **names))
    shown = [site.cloud, site.region, site.engine, site.version, site.pool]
    found = site.models["m"]
    shown += [found.revision, found.owned_by, *found.features]
    assert all(each.isprintable() and len(each) <= codec.MAX_NAME for each in shown)
    assert len(site.boot_id) <= codec.MAX_NAME
    assert (len(found.features), found.created_s) == (1, 0)
    assert datetime.fromtimestamp(site.models["late"].created_s, UTC).year == 9999
