"""A line of several prompts that runs again asks, and pays for, only what was not answered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.batch_replica import jsonl, replica

COMPLETIONS = "/v1/completions"


def line(*prompts: str) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompts, "max_tokens": 8}
    return {"custom_id": "c", "method": "POST", "url": COMPLETIONS, "body": body}


@pytest.mark.parametrize("failures", [3, 99])
def test_a_prompt_that_was_answered_is_not_asked_again(
    url: str, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    monkeypatch.setattr("gateway.batches.job.BACKOFF_S", 0.01)

    async def main() -> None:
        async with replica(url) as here:
            here.fails = lambda prompt: prompt == "broken" and here.asked.count(prompt) <= failures
            batch_id = await here.submit(jsonl(line("one", "broken", "two")), endpoint=COMPLETIONS)
            done = await here.ended(batch_id)
            assert [here.asked.count(each) for each in ("one", "two")] == [1, 1]
            if failures == 99:
                assert done.request_counts.failed == 1
                return
            (answered,) = await here.lines(done.output_file_id)
            choices = answered["response"]["body"]["choices"]
            assert [each["text"] for each in choices] == ["re: one", "re: broken", "re: two"]
            assert answered["response"]["body"]["usage"]["total_tokens"] == 3 * (7 + 3)

    asyncio.run(main())
