"""A whole site process in front of a server, linked to a gateway over real gRPC, on good days and bad."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from site_engine import remote_site
from site_engine.config import SiteConfig
from site_engine.errors import ConfigError
from site_engine.remote_site import serve
from tests.support import metric_pages
from tests.support.openai_server import Mood, OpenAIServer, openai_server
from tests.support.site_gateway import TOKEN, Gateway, Session, assign, serving
from wire import federation_pb2 as pb


def config(server: OpenAIServer, gateway: Gateway, **more: Any) -> SiteConfig:
    settings: dict[str, Any] = {
        "site": "front",
        "engine": "openai",
        "url": server.url,
        "gateways": (gateway.address,),
        "token": TOKEN,
        "slots": 4,
    }
    return SiteConfig(**{**settings, **more})


@dataclass
class Scene:
    server: OpenAIServer
    gateway: Gateway
    session: Session
    hello: pb.Hello

    async def refused(self, attempt_id: str) -> pb.Rejected:
        def mine() -> list[pb.Rejected]:
            return [each for each in self.session.said("rejected") if each.attempt_id == attempt_id]

        await self.session.until(mine)
        assert not self.session.finish(attempt_id)
        return mine()[0]

    async def load(self, **figures: int) -> pb.Load:
        """The first report that says so."""

        def found() -> list[pb.Load]:
            said = self.session.said("load")
            return [each for each in said if all(getattr(each, n) == v for n, v in figures.items())]

        await self.session.until(found)
        return found()[0]


@asynccontextmanager
async def scene(*, settings: dict[str, Any] | None = None, **of_server: Any) -> AsyncIterator[Scene]:
    async with openai_server(**of_server) as server, serving(Gateway()) as gateway:
        site = asyncio.create_task(serve(config(server, gateway, **(settings or {}))))
        try:
            session = await gateway.joined()
            hello = await session.welcome()
            yield Scene(server, gateway, session, hello)
        finally:
            if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # else it is ending, and hears none
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)
            await site


def run(scenario: Callable[[Scene], Awaitable[None]], **of_scene: Any) -> None:
    async def whole() -> None:
        async with scene(**of_scene) as here:
            await scenario(here)

    asyncio.run(whole())


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_EVERY_S", "PROBE_EVERY_S", "LIST_EVERY_S", "BACKOFF_FIRST_S"):
        monkeypatch.setattr(remote_site, name, 0.02)


def chat(attempt_id: str, text: str, **sampling: Any) -> dict[str, pb.Assign]:
    body = assign(attempt_id, **sampling)["assign"]
    body.chat.messages.extend([pb.ChatMessage(role="user", content=text)])
    return {"assign": body}


def test_answers_stream_with_the_servers_counts() -> None:
    async def scenario(here: Scene) -> None:
        session = here.session
        assert (here.hello.engine, here.hello.slots) == ("openai", 4)
        assert [(each.id, each.context_tokens) for each in here.hello.models] == [("letters", 64)]
        assert list(here.hello.models[0].features) == ["chat", "resume_text"]
        assert "unknown server, load from an estimate" in here.hello.version
        await session.send(**assign("text", "abc", max_tokens=5))
        await session.send(**chat("chat", "hello", max_tokens=3, n=2, temperature=0.5, stop=["!"]))
        assert await session.finished("text") == pb.Delta.LENGTH
        assert await session.finished("chat", 1) == await session.finished("chat", 0) == pb.Delta.LENGTH
        assert session.text("text") == "abcab"
        assert [session.text("chat", index) for index in (0, 1)] == ["hel", "hel"]
        assert session.deltas("text")[-1].completion_tokens == 5
        assert sum(session.deltas("chat", index)[-1].completion_tokens for index in (0, 1)) == 6
        counted = [each for each in session.said("accepted") if each.attempt_id == "text"]
        assert [each.prompt_tokens for each in counted] == [1, 7]  # guessed, then counted
        (asked,) = (each for each in here.server.asked if "messages" in each)
        assert (asked["stop"], asked["messages"]) == (["!"], [{"role": "user", "content": "hello"}])
        await here.load(tokens_total=11, running=0)

    run(scenario)


def test_a_server_that_counts_nothing_is_counted_by_chunks() -> None:
    async def scenario(here: Scene) -> None:
        await here.session.send(**assign("a", "abc", max_tokens=5, echo=True))
        assert await here.session.finished("a") == pb.Delta.LENGTH
        assert here.session.deltas("a")[-1].completion_tokens == 5
        assert here.session.text("a") == "abc" + "abcab"

    run(scenario, counts=False)


def test_connections_are_used_again() -> None:
    async def scenario(here: Scene) -> None:
        before = here.server.connections
        for number in range(5):
            await here.session.send(**assign(str(number)))
            await here.session.finished(str(number))
        assert here.server.connections <= before + 1

    run(scenario)


def test_a_request_on_a_closed_connection_is_sent_again() -> None:
    async def scenario(here: Scene) -> None:
        here.server.drops = 1
        await here.session.send(**assign("a"))
        assert await here.session.finished("a") == pb.Delta.LENGTH
        here.server.drops = 2
        await here.session.send(**assign("b"))
        assert (await here.refused("b")).reason == pb.Rejected.INTERNAL

    run(scenario)


def test_a_server_that_lists_no_models_serves_the_one_that_is_configured() -> None:
    async def scenario(here: Scene) -> None:
        assert [each.id for each in here.hello.models] == ["letters"]
        assert here.hello.models[0].context_tokens == 99
        await here.session.send(**assign("a"))
        assert await here.session.finished("a") == pb.Delta.LENGTH
        assert here.server.asked[0]["model"] == "some/folder"

    run(
        scenario,
        models=(),
        settings={"model": "some/folder", "served_model": "letters", "context_tokens": 99},
    )


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
        counted = [each.prompt_tokens for each in here.session.said("accepted")]
        assert counted == [1, 7]  # guessed, then counted

    run(scenario, owner="vllm")


def test_what_was_not_sent_can_be_released_and_what_was_can_not() -> None:
    async def scenario(here: Scene) -> None:
        here.server.go.clear()
        for name in "abcd":
            await here.session.send(**assign(name, max_tokens=9))
        await here.session.heard("accepted", 4)
        await here.session.until(lambda: here.session.text("a") and here.session.text("b"))
        await here.load(pending=2)
        await here.session.send(release=pb.Release(release_id="r", attempt_ids=list("abcd")))
        (released,) = await here.session.heard("released")
        assert list(released.attempt_ids) == ["c", "d"]
        here.server.go.set()
        assert await here.session.finished("a") == pb.Delta.LENGTH
        assert len(here.server.asked) == 2

    run(scenario, settings={"slots": 2})


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


def test_half_a_stream_is_a_failed_answer() -> None:
    async def scenario(here: Scene) -> None:
        here.server.mood = Mood.HALF
        await here.session.send(**assign("a", max_tokens=9))
        assert await here.session.finished("a") == pb.Delta.FAILED
        last = here.session.deltas("a")[-1]
        assert (here.session.text("a"), last.completion_tokens) == ("a", 1)
        assert "broke off" in last.error

    run(scenario)


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
        await here.session.over.wait()
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


def test_a_server_that_lives_but_fails_every_answer_is_left() -> None:
    async def scenario(here: Scene) -> None:
        here.server.mood = Mood.FAILING
        for name in "abc":
            await here.session.send(**assign(name))
        await here.session.over.wait()
        assert "answers in a row failed" in here.session.log[-1].bye.reason
        assert len(here.session.said("rejected")) == 3

    run(scenario)


def test_load_is_the_servers_own_word_where_it_gives_one() -> None:
    async def scenario(here: Scene) -> None:
        assert "(vllm, load from its metrics)" in here.hello.version
        assert here.hello.kv_capacity_tokens == 16_000
        known = {"chat", "logprobs", "tools", "guided", "resume_text", "resume_chat"}
        assert set(here.hello.models[0].features) == known
        here.server.running, here.server.waiting = 3, 5
        load = await here.load(pending=5, running=3)
        assert load.kv_free_tokens == 12_000
        assert load.token_load > 0
        await here.session.send(**assign("a", top_k=5))
        await here.server.until(lambda: here.server.asked)
        asked = here.server.asked[0]
        assert asked["top_k"] == 5
        assert asked["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
        here.server.metrics = metric_pages.SOMEBODY  # after an update
        await here.session.until(lambda: [load.pending for load in here.session.said("load")[-1:]] == [0])

    run(scenario, metrics=metric_pages.VLLM)


def test_what_the_server_may_drop_silently_is_refused() -> None:
    async def scenario(here: Scene) -> None:
        await here.session.send(**assign("a", top_k=5))
        refused = await here.refused("a")
        assert (refused.reason, refused.param) == (pb.Rejected.UNSUPPORTED, "top_k")
        body = assign("b")["assign"]
        body.resume.CopyFrom(pb.ResumeFrom(token_ids=[1], text_chars=1))  # from an older gateway: no text
        await here.session.send(assign=body)
        assert (await here.refused("b")).reason == pb.Rejected.UNSUPPORTED
        assert here.server.asked == []


def test_a_prompt_of_twice_the_context_does_not_reach_the_server() -> None:
    async def scenario(here: Scene) -> None:
        await here.session.send(**assign("a", "x" * 600))
        refused = await here.refused("a")
        assert (refused.reason, refused.param) == (pb.Rejected.CONTEXT_LENGTH, "prompt")
        await here.session.send(**assign("b", "x" * 300))  # may fit: the server knows
        await here.session.finished("b")
        assert len(here.server.asked) == 1

    run(scenario)


def resumed(attempt_id: str, prompt: str, text: str, tokens: int, **sampling: Any) -> dict[str, pb.Assign]:
    body = assign(attempt_id, prompt, **sampling)["assign"]
    body.resume.CopyFrom(pb.ResumeFrom(text=text, text_chars=len(text), tokens=tokens))
    return {"assign": body}


def test_an_answer_begun_elsewhere_goes_on_after_its_text() -> None:
    async def scenario(here: Scene) -> None:
        await here.session.send(**resumed("a", "abcde", "abc", 3, max_tokens=8))
        assert await here.session.finished("a") == pb.Delta.LENGTH
        asked = here.server.asked[0]
        assert (asked["prompt"], asked["max_tokens"]) == ("abcdeabc", 5)
        assert here.session.text("a") == "deabc"
        assert here.session.deltas("a")[-1].completion_tokens == 8
        assert [each.prompt_tokens for each in here.session.said("accepted")][-1] == 7 - 3

    run(scenario)


def test_an_answer_that_broke_off_after_its_last_token_only_ends() -> None:
    async def scenario(here: Scene) -> None:
        await here.session.send(**resumed("a", "abcde", "abc", 3, max_tokens=3))
        assert await here.session.finished("a") == pb.Delta.LENGTH
        assert (here.session.text("a"), here.session.deltas("a")[-1].completion_tokens) == ("", 3)
        assert here.server.asked == []

    run(scenario)

    run(scenario)


def test_a_providers_allowance_is_kept() -> None:
    async def scenario(here: Scene) -> None:
        for name in "abcd":
            await here.session.send(**assign(name))
        await here.session.finished("a")
        await here.session.finished("b")
        await here.load(pending=2)
        assert len(here.server.asked) == 2

    run(scenario, settings={"requests_per_min": 2})


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
            await session.over.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            assert await site == 0
            await server.start()

    asyncio.run(scenario())


def test_a_signal_drains() -> None:
    async def scenario(here: Scene) -> None:
        here.server.go.clear()
        await here.session.send(**assign("a", max_tokens=9))
        await here.session.until(lambda: here.session.text("a"))
        os.kill(os.getpid(), signal.SIGTERM)
        await here.session.heard("draining")
        here.server.go.set()
        assert await here.session.finished("a") == pb.Delta.LENGTH
        await here.session.over.wait()

    run(scenario)
