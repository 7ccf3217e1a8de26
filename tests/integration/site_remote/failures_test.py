"""A foreign server that breaks, hangs or refuses: the site counts, retries or leaves it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from typing import Any

import pytest

from site_engine.errors import ConfigError
from site_engine.remote_site import serve
from tests.support.openai_server import Mood, openai_server
from tests.support.remote_site import Scene, config, run
from tests.support.site_gateway import Gateway, assign, serving
from wire import federation_pb2 as pb

WITHIN_S = 60.0


async def cut_off(here: Scene) -> None:
    """After its first text."""
    here.server.go.clear()
    await here.session.send(**assign("a", max_tokens=50))
    await here.session.until(lambda: here.session.text("a"))
    await here.session.send(cancel=pb.Cancel(attempt_id="a"))
    assert await here.session.finished("a") == pb.Delta.CANCELLED


def test_a_cancel_closes_the_stream_at_the_server() -> None:
    async def scenario(here: Scene) -> None:
        await cut_off(here)
        assert here.session.deltas("a")[-1].completion_tokens == 1
        await here.server.until(lambda: here.server.left == 1 and here.server.running == 0)

    run(scenario)


def test_an_answer_that_is_cut_off_is_counted_as_far_as_the_server_told() -> None:
    async def scenario(here: Scene) -> None:
        await cut_off(here)
        counted = [each.prompt_tokens for each in here.session.received("accepted")]
        assert counted == [1, 7]  # guessed, then counted

    run(scenario, owner="vllm")


@pytest.mark.parametrize(
    ("mood", "reason"),
    [
        (Mood.FAILING, pb.Rejected.INTERNAL),
        (Mood.GARBAGE, pb.Rejected.INTERNAL),
        (Mood.FULL, pb.Rejected.FULL),
        (Mood.TOO_LONG, pb.Rejected.CONTEXT_LENGTH),
        (Mood.INVALID, pb.Rejected.INVALID),
    ],
)
def test_before_the_first_word_a_failure_is_a_refusal_with_its_reason(mood: Mood, reason: int) -> None:
    async def scenario(here: Scene) -> None:
        here.server.mood = mood
        await here.session.send(**assign("a"))
        refused = await here.refused("a")
        assert refused.reason == reason
        assert refused.message
        here.server.mood = Mood.ANSWERING
        if mood is Mood.FULL:  # it is left alone as long as it asked
            await here.session.send(**assign("b"))
            assert "left alone" in (await here.refused("b")).message
        else:
            await here.session.send(**assign("b"))
            assert await here.session.finished("b") == pb.Delta.LENGTH

    run(scenario)


def test_a_server_that_says_in_the_stream_that_it_is_full_is_full_not_broken() -> None:
    """As SGLang does where its queue has a limit, and TGI."""

    async def scenario(here: Scene) -> None:
        here.server.mood = Mood.FULL
        for name in "abcd":
            await here.session.send(**assign(name))
        assert {(await here.refused(name)).reason for name in "abcd"} == {pb.Rejected.FULL}

    run(scenario, refuses_in_stream=True)


def test_half_a_stream_is_a_failed_answer() -> None:
    async def scenario(here: Scene) -> None:
        here.server.mood = Mood.HALF
        await here.session.send(**assign("a", max_tokens=9))
        assert await here.session.finished("a") == pb.Delta.FAILED
        last = here.session.deltas("a")[-1]
        assert (here.session.text("a"), last.completion_tokens) == ("a", 1)
        assert "the server behind this site broke off" in last.error
        assert "127.0.0.1" not in last.error, "its address is for the log alone"

    run(scenario)


def test_an_answer_that_the_server_had_ended_is_whole_though_its_count_never_came() -> None:
    """To go on elsewhere would tell more than the model meant to."""

    async def scenario(here: Scene) -> None:
        here.server.mood = Mood.HALF
        await here.session.send(**assign("a", max_tokens=1))
        assert await here.session.finished("a") == pb.Delta.STOP
        last = here.session.deltas("a")[-1]
        assert (here.session.text("a"), last.completion_tokens, last.error) == ("a", 1, "")

    run(scenario, ends="stop")


def test_a_server_that_hangs_is_given_up() -> None:
    async def scenario(here: Scene) -> None:
        here.server.mood = Mood.SILENT
        await here.session.send(**assign("a"))
        assert (await here.refused("a")).reason == pb.Rejected.INTERNAL
        await here.server.until(lambda: here.server.left == 1)

    run(scenario, settings={"silence_s": 0.1})


def test_a_deadline_ends_an_answer() -> None:
    async def scenario(here: Scene) -> None:
        here.server.go.clear()
        body = assign("a", max_tokens=9)["assign"]
        body.deadline_s = 40.0
        await here.session.send(assign=body)
        await here.session.until(lambda: here.session.text("a"))
        asyncio.get_running_loop().time = lambda: time.monotonic() + 40.0  # type: ignore[method-assign]
        assert await here.session.finished("a") == pb.Delta.FAILED
        assert "deadline" in here.session.deltas("a")[-1].error
        await here.server.until(lambda: here.server.left == 1)

    run(scenario)


def test_a_killed_server_fails_what_it_had_and_the_site_comes_back_with_it() -> None:
    async def scenario(here: Scene) -> None:
        here.server.go.clear()
        for name in "abc":
            await here.session.send(**assign(name, max_tokens=9))
        await here.session.until(lambda: here.session.text("a") and here.session.text("b"))
        await here.load(pending=1)
        await here.server.die()
        assert await here.session.finished("a") == await here.session.finished("b") == pb.Delta.FAILED
        assert (await here.refused("c")).reason == pb.Rejected.INTERNAL
        await here.session.ended()
        assert here.session.log[-1].WhichOneof("body") == "bye"
        here.server.go.set()
        here.server.models = ("letters", "more")  # as it may be after an update
        await here.server.start()
        again = await here.gateway.joined()
        hello = await again.welcome()
        assert [each.id for each in hello.models] == ["letters", "more"]
        await again.send(**assign("d"))
        assert await again.finished("d") == pb.Delta.LENGTH

    run(scenario, settings={"slots": 2})


def test_a_server_that_dies_breaks_the_connections_that_it_has_just_taken() -> None:
    """Or a site would go on asking it, and find it alive."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        for turns in range(8):
            async with openai_server() as server:
                with socket.create_connection(("127.0.0.1", server.port)) as client:
                    client.setblocking(False)
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    await server.die()
                    with pytest.raises(ConnectionError):
                        async with asyncio.timeout(WITHIN_S):
                            await loop.sock_sendall(client, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
                            assert not await loop.sock_recv(client, 1)
                            raise ConnectionError("it is closed")

    asyncio.run(scenario())


def test_a_server_whose_metrics_lack_one_is_lost_once_its_health_says_so() -> None:
    """As of vLLM with --disable-log-stats, whose page stays after its engine has died."""

    async def scenario(here: Scene) -> None:
        here.server.health = 503
        await here.session.ended()
        assert "/health answers 503" in here.session.log[-1].bye.reason
        here.server.health = 200
        await here.gateway.joined()

    run(scenario, owner="vllm", metrics="process_open_fds 9.0\n", health=200)


def test_a_server_that_lives_but_fails_every_answer_is_left() -> None:
    async def scenario(here: Scene) -> None:
        here.server.mood = Mood.FAILING
        for name in "abc":
            await here.session.send(**assign(name))
        await here.session.ended()
        assert "answers in a row failed" in here.session.log[-1].bye.reason
        assert len(here.session.received("rejected")) == 3

    run(scenario)


@pytest.mark.parametrize("mood", [Mood.GARBAGE, Mood.SILENT])
def test_a_server_that_answers_no_plain_request_either_is_left(mood: Mood) -> None:
    async def scenario(here: Scene) -> None:
        here.server.mood = mood
        for name in "abc":
            await here.session.send(**assign(name))
        await here.session.ended()
        assert "answers in a row failed" in here.session.log[-1].bye.reason

    run(scenario, settings={"silence_s": 0.1})


def test_requests_that_a_server_fails_at_do_not_end_its_site() -> None:
    """Some servers answer some faulty requests with 500; a client sends such a one again and again."""

    async def scenario(here: Scene) -> None:
        here.server.fails_at = "poison"
        for number in range(7):
            await here.session.send(**assign(str(number), "poison"))
            assert (await here.refused(str(number))).reason == pb.Rejected.INTERNAL
        await here.server.until(lambda: any(each["prompt"] == "Hi" for each in here.server.asked))
        await here.session.send(**assign("d"))
        assert await here.session.finished("d") == pb.Delta.LENGTH
        assert not here.session.over.is_set()

    run(scenario)


def test_the_key_goes_with_every_request_and_a_wrong_one_is_named(tmp_path: Any) -> None:
    secret = tmp_path / "key"
    secret.write_text("sk-1\n")

    async def scenario(here: Scene) -> None:
        await here.session.send(**assign("a"))
        assert await here.session.finished("a") == pb.Delta.LENGTH

    run(scenario, settings={"key_file": secret}, key="sk-1")

    async def wrong() -> None:
        async with openai_server(key="sk-2") as server, serving(Gateway()) as gateway:
            with pytest.raises(ConfigError, match="wants a key"):
                await serve(config(server, gateway))
            with pytest.raises(ConfigError, match="the server has letters"):
                await serve(config(server, gateway, model="other", key_file=secret_of("sk-2")))

    def secret_of(key: str) -> Any:
        secret.write_text(key)
        return secret

    asyncio.run(wrong())


def test_a_site_waits_for_its_server_and_a_signal_ends_the_wait() -> None:
    async def scenario() -> None:
        async with openai_server() as server, serving(Gateway()) as gateway:
            await server.die()
            site = asyncio.create_task(serve(config(server, gateway)))
            await server.start()
            session = await gateway.joined()
            await session.welcome()
            await server.die()
            await session.ended()
            os.kill(os.getpid(), signal.SIGTERM)
            assert await site == 0
            await server.start()

    asyncio.run(scenario())


def test_a_signal_ends_a_site_whose_server_takes_questions_and_answers_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("site_engine.remote.server.PROBE_S", 3600.0)

    async def scenario() -> None:
        asked, ended = asyncio.Event(), asyncio.Event()

        async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            await ended.wait()
            writer.close()

        async with openai_server() as server, serving(Gateway()) as gateway:
            hung = await asyncio.start_server(hang, "127.0.0.1", 0)
            url = "http://{}:{}".format(*hung.sockets[0].getsockname())
            site = asyncio.create_task(serve(config(server, gateway, url=url)))
            await asyncio.wait_for(asked.wait(), WITHIN_S)
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                assert await asyncio.wait_for(site, WITHIN_S) == 0
            finally:
                ended.set()
                hung.close()

    asyncio.run(scenario())


def test_a_signal_drains() -> None:
    async def scenario(here: Scene) -> None:
        here.server.go.clear()
        await here.session.send(**assign("a", max_tokens=9))
        await here.session.until(lambda: here.session.text("a"))
        os.kill(os.getpid(), signal.SIGTERM)
        await here.session.wait_for("draining")
        here.server.go.set()
        assert await here.session.finished("a") == pb.Delta.LENGTH
        await here.session.ended()

    run(scenario)
