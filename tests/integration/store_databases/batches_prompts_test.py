"""Lines with several prompts: each prompt is answered, and charged, once however often its line runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from gateway.batches.prompts import Kept, answer_prompts
from gateway.domain import AnswerEvent, Query, Sampling, Usage
from gateway.errors import AboveQuota, BadRequest, MicoError, NoSite, TooMany
from gateway.outcome import Status
from tests.support.batch_replica import Replica, jsonl, replica
from tests.support.fakes.federation import CALLER


def line(*prompts: str, **more: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": list(prompts), **more}
    return {"custom_id": "t", "method": "POST", "url": "/v1/completions", "body": body}


async def run(here: Replica, *lines: dict[str, Any]) -> Any:
    done = await here.ended(await here.submit(jsonl(*lines), endpoint="/v1/completions"))
    await here.scene.gateway.wait_settled()
    return done


def test_a_prompt_is_charged_once_though_another_of_its_line_fails(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.job.BACKOFF_S", 0.01)

    async def main() -> None:
        async with replica(url) as here:
            here.fails = lambda prompt: prompt == "two" and here.asked.count(prompt) < 3
            done = await run(here, line("one", "two", "three"))
            (answered,) = await here.lines(done.output_file_id)
            body = answered["response"]["body"]
            assert [each["text"] for each in body["choices"]] == ["re: one", "re: two", "re: three"]
            assert [here.asked.count(prompt) for prompt in ("one", "two", "three")] == [1, 3, 1]
            charged = [each for each in here.scene.outcomes if each.completion_tokens]
            assert sum(each.completion_tokens for each in charged) == body["usage"]["completion_tokens"]
            assert all(each.status is Status.ANSWERED for each in charged)

    asyncio.run(main())


def query(number: int) -> Query:
    return Query(f"q-{number}", "m", f"prompt {number}", Sampling(), CALLER, 0.0, 1.0)


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (BadRequest("too hot"), True),
        (AboveQuota("more than the quota"), True),
        (TooMany("30 requests a minute"), False),
        (NoSite("away"), False),
    ],
)
def test_prompts_beside_one_that_is_refused_for_good_are_cancelled(error: MicoError, is_final: bool) -> None:
    ended = asyncio.Event()

    async def answer(asked: Query) -> AsyncGenerator[AnswerEvent, None]:
        if asked.id == "q-1":
            ended.set()
            raise error
        await ended.wait()
        if is_final:
            await asyncio.Event().wait()
        yield Usage(1, 1)

    async def main() -> Kept:
        kept: Kept = {}
        with pytest.raises(type(error)):
            async for _ in answer_prompts(answer, [query(0), query(1), query(2)], kept):
                pass
        return kept

    assert asyncio.run(main()) == ({} if is_final else {0: [Usage(1, 1)], 2: [Usage(1, 1)]})


def test_prompts_that_are_asked_again_are_numbered_from_0() -> None:
    """By the first number a gateway knows that the line has begun at a site."""
    asked: list[tuple[str, str]] = []

    async def answer(query: Query) -> AsyncGenerator[AnswerEvent, None]:
        asked.append((query.id, str(query.prompt)))
        yield Usage(1, 1)

    async def main() -> None:
        kept: Kept = {0: [Usage(1, 1)]}
        async for _ in answer_prompts(answer, [query(0), query(1), query(2)], kept):
            pass

    asyncio.run(main())
    assert asked == [("q-0", "prompt 1"), ("q-1", "prompt 2")]
