"""The prompts of one line: what is answered is kept, and what can't help any more is given up."""

from __future__ import annotations

import asyncio

import pytest

from gateway.batches.kept_answers import KeptAnswers, answer_rest
from gateway.domain import AnswerEvent, Caller, Delta, Finish, Opening, Query, Sampling, Usage
from gateway.errors import AboveQuota, ContextTooLong, MicoError, TooMany, UpstreamFailed
from gateway.openai.merge import Pieces


class Prompts:
    """Answers each prompt with itself; the error of `failing` comes once all others have been asked."""

    def __init__(self, failing: MicoError, *, others_wait: bool = False) -> None:
        self.failing = failing
        self.others_wait = others_wait
        self.asked: list[str] = []
        self.given_up: list[str] = []

    def queries(self, *prompts: str) -> list[Query]:
        return [Query(each, "m", each, Sampling(), Caller("k", "t"), 0.0, 60.0) for each in prompts]

    async def answer(self, query: Query) -> Pieces:
        self.asked.append(query.id)
        await asyncio.sleep(0)
        if query.id == "bad":
            raise self.failing
        try:
            await asyncio.Event().wait() if self.others_wait else await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.given_up.append(query.id)
            raise
        yield Opening("a", "", "", 1, 0.0, 5, "")
        yield Delta(0, query.id, 1, finish=Finish.STOP)
        yield Usage(5, 1)


async def collect(prompts: Prompts, queries: list[Query], kept: KeptAnswers) -> list[AnswerEvent]:
    return [event async for event in answer_rest(prompts.answer, queries, kept)]


@pytest.mark.parametrize("failing", [TooMany("full"), UpstreamFailed("broken")])
def test_the_others_are_answered_to_the_end_and_kept(failing: MicoError) -> None:
    async def main() -> None:
        prompts, kept = Prompts(failing), KeptAnswers()
        with pytest.raises(type(failing)):
            await collect(prompts, prompts.queries("one", "bad", "two"), kept)
        assert sorted(kept) == [0, 2]
        again = prompts.queries("one", "good", "two")
        *events, usage = await collect(prompts, again, kept)
        assert prompts.asked == ["one", "bad", "two", "good"]
        texts = {each.index: each.text for each in events if isinstance(each, Delta)}
        assert texts == {0: "one", 1: "good", 2: "two"}
        assert usage == Usage(15, 3)

    asyncio.run(main())


@pytest.mark.parametrize("failing", [AboveQuota("too large"), ContextTooLong("too long")])
def test_the_others_of_a_line_that_can_never_be_answered_are_given_up(failing: MicoError) -> None:
    async def main() -> None:
        prompts = Prompts(failing, others_wait=True)
        with pytest.raises(type(failing)):
            await collect(prompts, prompts.queries("one", "bad", "two"), KeptAnswers())
        assert sorted(prompts.given_up) == ["one", "two"]

    asyncio.run(main())
