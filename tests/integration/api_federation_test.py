"""The edge over the real core of a gateway: from the OpenAI SDK to a site's gRPC stream and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import openai
import pytest

from gateway.outcome import Status
from tests.support.answers import backend_of
from tests.support.fakes.edge import KEY, Edge, Script, on_loopback
from tests.support.fakes.federation import Scene, scene, until
from wire import federation_pb2 as pb

DEADLINE_S = 60.0
ASK = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def play(scenario: Callable[[Scene, Edge, int], Awaitable[None]]) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            scene() as here,
            on_loopback(Script(), backend_of(here)) as (edge, port),
        ):
            await scenario(here, edge, port)
            await here.gateway.wait_settled()
            await until(here.nothing_is_left, "all counters at zero")

    asyncio.run(main())


def test_a_whole_answer_from_a_site() -> None:
    async def scenario(here: Scene, edge: Edge, _: int) -> None:
        site = await here.site("alpha")
        named = {"x-request-id": "mine"}
        create = edge.sdk.chat.completions.with_raw_response.create
        asking = asyncio.create_task(create(**ASK, max_tokens=9, extra_headers=named))
        assign = await site.assigned()
        assert assign.sampling.max_tokens == 9
        assert [turn.content for turn in assign.chat.messages] == ["Hi"]
        await site.step(assign, "Hel", 1)
        await site.finish(assign, "lo", 2)
        raw = await asking
        assert raw.headers["x-mico-site"] == "alpha"
        completion = raw.parse()
        assert completion.choices[0].message.content == "Hello"
        assert completion.usage.total_tokens == 9
        assert completion.system_fingerprint == "rev-1"
        assert here.outcomes[0].query_id == completion.id.removeprefix("chatcmpl-")
        assert here.outcomes[0].request_id == raw.headers["x-request-id"] == "mine"

    play(scenario)


def test_two_prompts_are_two_queries_and_one_answer() -> None:
    async def scenario(here: Scene, edge: Edge, _: int) -> None:
        site = await here.site("alpha")
        asking = asyncio.create_task(edge.sdk.completions.create(model="m", prompt=["a", "b"], n=2))
        assigns = [await site.assigned(), await site.assigned()]
        for assign in assigns:
            for index in (1, 0):
                await site.finish(assign, f"{assign.text}{index}", 1, index=index)
        completion = await asking
        assert [choice.text for choice in completion.choices] == ["a0", "a1", "b0", "b1"]
        assert completion.usage is not None
        assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (14, 4)
        assert len({outcome.query_id for outcome in here.outcomes}) == 2

    play(scenario)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_a_disconnect_cancels_the_request_at_the_site(stream: bool, started: bool) -> None:
    async def scenario(here: Scene, edge: Edge, port: int) -> None:
        site = await here.site("alpha")
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps(ASK | {"stream": stream})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write((head + body).encode())
        assign = await site.assigned()
        if started:
            await site.step(assign, "Hel", 1)
            await until(
                lambda: any(state.opened for state in here.gateway.live_queries.values()), "an opening"
            )
        writer.close()
        cancel = await site.next()
        assert cancel.cancel.attempt_id == assign.attempt_id
        await site.step(assign, "", 1, finish=pb.Delta.CANCELLED)
        await until(lambda: here.outcomes, "an outcome")
        assert here.outcomes[0].status is Status.CANCELLED
        await writer.wait_closed()

    play(scenario)


def test_a_prompt_that_a_site_finds_too_long_is_a_400() -> None:
    async def scenario(here: Scene, edge: Edge, _: int) -> None:
        site = await here.site("alpha")
        asking = asyncio.create_task(edge.sdk.chat.completions.create(**ASK, stream=True))
        assign = (await site.next()).assign
        too_long = pb.Rejected(
            attempt_id=assign.attempt_id,
            reason=pb.Rejected.CONTEXT_LENGTH,
            message="the prompt has 1100 tokens, the context 1024",
        )
        await site.send(rejected=too_long)
        with pytest.raises(openai.BadRequestError, match="1100 tokens") as refusal:
            await asking
        assert refusal.value.code == "context_length_exceeded"

    play(scenario)


def test_a_federation_refuses_absent_and_forbidden_models() -> None:
    async def scenario(here: Scene, edge: Edge, _: int) -> None:
        await here.site("alpha")
        with pytest.raises(openai.NotFoundError, match="nope") as missing:
            await edge.sdk.chat.completions.create(**(ASK | {"model": "nope"}))
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.PermissionDeniedError) as denied:
            await edge.sdk.with_options(api_key="narrow").chat.completions.create(**ASK)
        assert denied.value.code == "permission_denied"
        assert [model.id async for model in edge.sdk.models.list()] == ["m"]

    play(scenario)


def test_a_site_that_breaks_mid_stream_ends_the_stream_with_an_error() -> None:
    async def scenario(here: Scene, edge: Edge, _: int) -> None:
        site = await here.site("alpha")
        asking = asyncio.create_task(edge.sdk.completions.create(model="m", prompt="x", n=2, stream=True))
        assign = await site.assigned()
        await site.step(assign, "Hel", 1)
        stream = await asking
        await site.step(assign, "", 1, finish=pb.Delta.FAILED, error="out of memory")
        said = []
        with pytest.raises(openai.APIError) as lost:
            async for chunk in stream:
                said.append(chunk.choices[0].text)
        assert "".join(said) == "Hel"
        assert lost.value.code == "upstream_lost"

    play(scenario)
