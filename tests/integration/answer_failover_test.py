"""A site that fails, breaks off or is full is replaced, and a begun answer continues where it can."""

from __future__ import annotations

import asyncio

import pytest

from gateway.domain import Delta, Opening, Usage
from gateway.errors import (
    Overloaded,
    UpstreamFailed,
    UpstreamLost,
)
from gateway.outcome import Status
from tests.support.answers import assigned_site, collect, run, start_answer, text_of
from tests.support.fakes.federation import Scene, until
from wire import federation_pb2 as pb


def test_a_full_site_is_passed_over_unnoticed() -> None:
    async def scenario(here: Scene) -> None:
        sites = [await here.site("a"), await here.site("b")]
        task = asyncio.create_task(collect(here, here.query()))
        await until(lambda: any(not s.inbox.empty() for s in sites), "an assignment")
        full = next(s for s in sites if not s.inbox.empty())
        message = await full.next()
        await full.send(
            rejected=pb.Rejected(
                attempt_id=message.assign.attempt_id, reason=pb.Rejected.FULL, message="full"
            )
        )
        other = next(s for s in sites if s is not full)
        assign = await other.assigned()
        await other.finish(assign, "done", 1)
        pieces = await task
        assert isinstance(pieces[0], Opening)
        assert (pieces[0].site, pieces[0].attempts) == (other.name, 2)

    run(scenario)


def test_when_every_site_is_full_the_client_is_told_to_come_back() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(collect(here, here.query()))
        attempt = (await site.next()).assign.attempt_id
        await site.send(
            rejected=pb.Rejected(attempt_id=attempt, reason=pb.Rejected.FULL, message="queue of 8 is full")
        )
        with pytest.raises(Overloaded, match="queue of 8 is full") as failure:
            await task
        assert failure.value.retry_after_s
        assert here.outcomes[0].status is Status.REFUSED

    run(scenario)


def test_a_site_lost_before_the_first_token_is_replaced_unnoticed() -> None:
    async def scenario(here: Scene) -> None:
        sites = [await here.site("a"), await here.site("b")]
        task = asyncio.create_task(collect(here, here.query()))
        dying, _ = await assigned_site(here, *sites)
        await dying.close()
        other = next(s for s in sites if s is not dying)
        await other.finish(await other.assigned(), "done", 1)
        assert text_of(await task) == "done"
        assert [attempt.ended for attempt in here.outcomes[0].attempts] == ["lost", "finished"]

    run(scenario)


def test_a_site_lost_in_mid_answer_is_resumed_from_what_the_client_has() -> None:
    async def scenario(here: Scene) -> None:
        sites = [await here.site("a"), await here.site("b")]
        task, pieces = start_answer(here, here.query())
        dying, assign = await assigned_site(here, *sites)
        await dying.step(assign, "Hel", 3)
        await until(lambda: text_of(pieces) == "Hel", "the first part")
        await dying.close()
        other = next(s for s in sites if s is not dying)
        resumed = await other.assigned()
        assert list(resumed.resume.token_ids) == [ord(letter) for letter in "Hel"]
        assert resumed.resume.text_chars == 3
        await other.finish(resumed, "lo", 5)
        await task
        assert text_of(pieces) == "Hello"
        assert pieces[-1] == Usage(prompt_tokens=7, completion_tokens=5)
        assert len(here.outcomes) == 1

    run(scenario)


READS_THOUGHTS = ("chat", "resume", "reasoning")


def test_a_site_lost_in_mid_thought_is_resumed_where_thoughts_are_told_from_text() -> None:
    async def scenario(here: Scene) -> None:
        dying = await here.site("a", features=READS_THOUGHTS)
        task, pieces = start_answer(here, here.query())
        assign = await dying.assigned()
        thought = {"reasoning": "Hm", "reasoning_tokens": 2}
        delta = pb.Delta(attempt_id=assign.attempt_id, token_ids=[1, 2], completion_tokens=2, **thought)
        await dying.send(step=pb.Step(deltas=[delta]))
        await until(lambda: len(pieces) == 2, "the first part")
        await here.site("b")
        other = await here.site("c", features=READS_THOUGHTS)
        await dying.close()
        resumed = await other.assigned()
        assert list(resumed.resume.token_ids) == [1, 2]
        assert (resumed.resume.text_chars, resumed.resume.reasoning_chars) == (0, 2)
        await other.step(resumed, "", 3, reasoning="m.", reasoning_tokens=3)
        await other.finish(resumed, "42", 5)
        await task
        assert "".join(each.reasoning for each in pieces if isinstance(each, Delta)) == "Hmm."
        assert text_of(pieces) == "42"
        assert pieces[-1] == Usage(prompt_tokens=7, completion_tokens=5, reasoning_tokens=3)

    run(scenario)


def test_a_site_lost_in_mid_thought_is_not_resumed_where_it_would_be_said_again() -> None:
    async def scenario(here: Scene) -> None:
        dying = await here.site("a", features=READS_THOUGHTS)
        task, pieces = start_answer(here, here.query())
        assign = await dying.assigned()
        delta = pb.Delta(attempt_id=assign.attempt_id, token_ids=[1], completion_tokens=1, reasoning="Hm")
        await dying.send(step=pb.Step(deltas=[delta]))
        await until(lambda: len(pieces) == 2, "the first part")
        await here.site("b")
        await dying.close()
        with pytest.raises(UpstreamLost, match="no other site could go on"):
            await task

    run(scenario)


def test_an_answer_that_can_not_be_resumed_ends_with_an_honest_error() -> None:
    async def scenario(here: Scene) -> None:
        sites = [await here.site("a"), await here.site("b")]
        task = asyncio.create_task(collect(here, here.query(n=2)))
        dying, assign = await assigned_site(here, *sites)
        await dying.step(assign, "Hel", 3)
        await until(lambda: any(a.opened for a in here.gateway.live_queries.values()), "the first token")
        await dying.close()
        with pytest.raises(UpstreamLost, match="n > 1"):
            await task
        (outcome,) = here.outcomes
        assert (outcome.status, outcome.completion_tokens) == (Status.FAILED, 3)

    run(scenario)


def test_an_answer_without_token_ids_goes_on_from_its_text() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        site.names_tokens = False
        task, pieces = start_answer(here, here.query())
        assign = await site.assigned()
        await here.site("old")
        other = await here.site("b", features=("chat", "resume_text", "resume_chat"))
        await site.step(assign, "Hel", 3)
        await until(lambda: text_of(pieces) == "Hel", "the first part")
        await site.close()
        resumed = await other.assigned()
        assert (resumed.resume.text, resumed.resume.tokens, resumed.resume.text_chars) == ("Hel", 3, 3)
        assert not resumed.resume.token_ids
        await other.finish(resumed, "lo", 5)
        await task
        assert text_of(pieces) == "Hello"
        assert pieces[-1] == Usage(prompt_tokens=7, completion_tokens=5)

    run(scenario)


def test_an_answer_drawn_from_a_seed_does_not_go_on_from_its_text() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        site.names_tokens = False
        task = asyncio.create_task(collect(here, here.query(seed=1)))
        assign = await site.assigned()
        await here.site("b", features=("chat", "resume_text", "resume_chat"))
        await site.step(assign, "Hel", 3)
        await until(lambda: any(a.opened for a in here.gateway.live_queries.values()), "the first token")
        await site.close()
        with pytest.raises(UpstreamLost, match="drawn from a seed, and no site named the tokens"):
            await task

    run(scenario)


def test_a_site_that_refuses_to_go_on_is_not_the_clients_mistake() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(collect(here, here.query()))
        assign = await site.assigned()
        others = {name: await here.site(name) for name in ("b", "c")}
        await site.step(assign, "Hel", 3)
        await until(lambda: any(a.opened for a in here.gateway.live_queries.values()), "the first token")
        await site.close()
        first, resumed = await assigned_site(here, *others.values())
        refusal = pb.Rejected(attempt_id=resumed.attempt_id, reason=pb.Rejected.INVALID, message="no")
        await first.send(rejected=refusal)
        second = next(each for each in others.values() if each is not first)
        await second.finish(await second.assigned(), "lo", 5)
        assert text_of(await task) == "Hello"

    run(scenario)


def test_an_answer_does_not_go_on_at_a_site_that_can_not_resume() -> None:
    async def scenario(here: Scene) -> None:
        dying = await here.site("a")
        task, pieces = start_answer(here, here.query())
        assign = await dying.assigned()
        other = await here.site("b", features=("chat",))
        await dying.step(assign, "Hel", 3)
        await until(lambda: text_of(pieces) == "Hel", "the first part")
        await dying.close()
        with pytest.raises(UpstreamLost, match="no other site could go on"):
            await task
        assert other.inbox.empty()

    run(scenario)


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_an_answer_does_not_go_on_with_other_weights(engine: str) -> None:
    """Other weights would have answered otherwise. Which weights a server has is for its operator to know."""

    async def scenario(here: Scene) -> None:
        dying = await here.site("a")
        task = asyncio.create_task(collect(here, here.query()))
        assign = await dying.assigned()
        other = await here.site("b", revision="rev-2", engine=engine)
        await dying.step(assign, "Hel", 3)
        await until(lambda: any(a.opened for a in here.gateway.live_queries.values()), "the first token")
        await dying.close()
        if engine == "native":
            with pytest.raises(UpstreamLost, match=r"b: has other weights than those that began"):
                await task
            assert other.inbox.empty()
        else:
            await other.finish(await other.assigned(), "lo", 5)
            assert text_of(await task) == "Hello"

    run(scenario)


def test_half_a_character_goes_on_with_no_other_weights() -> None:
    """The client has no text of it, but was told the revision, and the token is of these weights."""

    async def scenario(here: Scene) -> None:
        dying = await here.site("a")
        task = asyncio.create_task(collect(here, here.query()))
        assign = await dying.assigned()
        other = await here.site("b", revision="rev-2")
        half = pb.Delta(attempt_id=assign.attempt_id, token_ids=[240], completion_tokens=1)
        await dying.send(step=pb.Step(deltas=[half]))
        await until(lambda: any(a.opened for a in here.gateway.live_queries.values()), "the first token")
        await dying.close()
        with pytest.raises(UpstreamLost, match=r"b: has other weights than those that began"):
            await task
        assert other.inbox.empty()

    run(scenario)


def test_tokens_of_half_a_character_are_none_of_an_answer_that_began_anew() -> None:
    """A server without a tokenizer begins anew where the client has no text. Its own count then stood for
    the lost tokens, from which the next site went on: the client got another text.
    """

    async def scenario(here: Scene) -> None:
        native = await here.site("a")
        task, pieces = start_answer(here, here.query())
        assign = await native.assigned()
        half = pb.Delta(attempt_id=assign.attempt_id, token_ids=[240, 159, 152], completion_tokens=3)
        await native.send(step=pb.Step(deltas=[half]))
        await until(lambda: len(pieces) == 2, "the first tokens")
        server = await here.site("b", features=("chat", "resume_text", "resume_chat"))
        server.names_tokens = False
        await native.close()
        await server.step(await server.assigned(), "Hel", 3)
        await until(lambda: text_of(pieces) == "Hel", "the first part")
        other = await here.site("c", features=("chat", "resume", "resume_text", "resume_chat"))
        await server.close()
        resumed = await other.assigned()
        assert (resumed.resume.text, resumed.resume.tokens, list(resumed.resume.token_ids)) == ("Hel", 3, [])
        await other.finish(resumed, "lo", 5)
        await task
        assert text_of(pieces) == "Hello"

    run(scenario)


def test_what_has_not_begun_is_answered_by_whichever_weights_there_are() -> None:
    async def scenario(here: Scene) -> None:
        dying = await here.site("a")
        task = asyncio.create_task(collect(here, here.query()))
        await dying.assigned()
        other = await here.site("b", revision="rev-2")
        await dying.close()
        await other.finish(await other.assigned(), "Hello", 5)
        assert text_of(await task) == "Hello"
        assert [piece.fingerprint for piece in task.result() if isinstance(piece, Opening)] == ["rev-2"]

    run(scenario)


def test_an_engine_failure_everywhere_is_reported_with_its_reason() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(collect(here, here.query()))
        assign = await site.assigned()
        await site.step(assign, "", 0, finish=pb.Delta.FAILED, error="out of memory")
        with pytest.raises(UpstreamFailed, match="out of memory"):
            await task
        assert here.outcomes[0].status is Status.FAILED

    run(scenario)


def test_output_of_an_attempt_that_is_over_is_dropped() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(collect(here, here.query()))
        assign = await site.assigned()
        await site.finish(assign, "done", 1)
        await site.step(assign, " and more", 5)
        assert text_of(await task) == "done"
        second = asyncio.create_task(collect(here, here.query()))
        await site.finish(await site.assigned(), "again", 1)
        assert text_of(await second) == "again"

    run(scenario)


def test_usage_counts_the_answer_that_was_given() -> None:
    async def scenario(here: Scene) -> None:
        sites = [await here.site("a"), await here.site("b")]
        task = asyncio.create_task(collect(here, here.query()))
        failing, assign = await assigned_site(here, *sites)
        await failing.step(assign, "lost words", 10, finish=pb.Delta.FAILED, error="out of memory")
        other = next(s for s in sites if s is not failing)
        await other.finish(await other.assigned(), "done", 4)
        assert (await task)[-1] == Usage(prompt_tokens=7, completion_tokens=4)
        assert here.outcomes[0].completion_tokens == 4

    run(scenario)


def test_a_prompt_too_long_for_one_site_goes_to_one_with_a_longer_context() -> None:
    async def scenario(here: Scene) -> None:
        short = await here.site("a")
        task = asyncio.create_task(collect(here, here.query()))
        attempt = (await short.next()).assign.attempt_id
        await here.site("b")
        long = await here.site("c", context_tokens=4096)
        await short.send(
            rejected=pb.Rejected(
                attempt_id=attempt, reason=pb.Rejected.CONTEXT_LENGTH, message="2000 > 1024", param="messages"
            )
        )
        await long.finish(await long.assigned(), "done", 1)
        assert text_of(await task) == "done"

    run(scenario)
