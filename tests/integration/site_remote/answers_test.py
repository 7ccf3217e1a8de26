"""A whole site process in front of a server, linked to a gateway over real gRPC, on good days and bad."""

from __future__ import annotations

from typing import Any

import pytest

from site_engine.remote import server
from site_engine.remote.count import MAX_COUNTS
from tests.support import metric_pages
from tests.support.openai_server import Mood
from tests.support.remote_site import Scene, chat, run
from tests.support.site_gateway import assign
from wire import federation_pb2 as pb


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
        counted = [each for each in session.received("accepted") if each.attempt_id == "text"]
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


def test_a_prompt_that_is_only_echoed_asks_nothing_of_the_server() -> None:
    """vLLM refuses `max_tokens` of 0, and so do others."""

    async def scenario(here: Scene) -> None:
        await here.session.send(**assign("a", "abc", max_tokens=0, echo=True))
        assert await here.session.finished("a") == pb.Delta.LENGTH
        assert (here.session.text("a"), here.server.asked) == ("abc", [])

    run(scenario)


@pytest.mark.parametrize("refuses_in_stream", [False, True])
def test_a_chat_that_may_be_longer_than_fits_is_as_long_as_fits(refuses_in_stream: bool) -> None:
    async def scenario(here: Scene) -> None:
        await here.session.send(**chat("a", "hello", max_tokens=62))
        assert await here.session.finished("a") == pb.Delta.LENGTH
        assert here.session.text("a") == "hell"
        assert [each.get("max_tokens") for each in here.server.asked] == [62, None]
        here.server.mood = Mood.TOO_LONG
        await here.session.send(**chat("b", "hello", max_tokens=62))
        assert (await here.refused("b")).reason == pb.Rejected.CONTEXT_LENGTH
        assert len(here.server.asked) == 4
        await here.session.send(**chat("c", "hello"))
        assert (await here.refused("c")).reason == pb.Rejected.CONTEXT_LENGTH
        here.server.mood = Mood.ANSWERING  # none of this is a fault of the server
        await here.session.send(**chat("d", "hello", max_tokens=3))
        assert await here.session.finished("d") == pb.Delta.LENGTH

    run(scenario, owner="vllm", refuses_excess=True, refuses_in_stream=refuses_in_stream)


def test_connections_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_S", 600.0)  # however long this machine takes between two requests

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


def test_what_was_not_sent_can_be_released_and_what_was_can_not() -> None:
    async def scenario(here: Scene) -> None:
        here.server.go.clear()
        for name in "abcd":
            await here.session.send(**assign(name, max_tokens=9))
        await here.session.wait_for("accepted", 4)
        await here.session.until(lambda: here.session.text("a") and here.session.text("b"))
        await here.load(pending=2)
        await here.session.send(release=pb.Release(release_id="r", attempt_ids=list("abcd")))
        (released,) = await here.session.wait_for("released")
        assert list(released.attempt_ids) == ["c", "d"]
        here.server.go.set()
        assert await here.session.finished("a") == pb.Delta.LENGTH
        assert len(here.server.asked) == 2

    run(scenario, settings={"slots": 2})


def test_load_is_the_servers_own_word_where_it_gives_one() -> None:
    async def scenario(here: Scene) -> None:
        assert "(vllm, load from its metrics)" in here.hello.version
        assert here.hello.kv_capacity_tokens == 16_000
        known = {
            "chat",
            "logprobs",
            "tools",
            "guided",
            "resume_text",
            "resume_chat",
            "count",
            "template_kwargs",
        }
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
        await here.session.until(lambda: [load.pending for load in here.session.received("load")[-1:]] == [0])

    run(scenario, metrics=metric_pages.VLLM)


def test_metrics_that_come_with_the_first_answer_are_read_from_then_on() -> None:
    """As of TGI, whose site begins beside it and so finds it new."""

    async def scenario(here: Scene) -> None:
        assert "(tgi, load from an estimate: " in here.hello.version
        here.server.metrics = metric_pages.TGI
        await here.load(pending=3, running=12)

    run(scenario, metrics="# TYPE tgi_batch_max_total_tokens gauge\ntgi_batch_max_total_tokens 16000\n")


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
        assert [each.prompt_tokens for each in here.session.received("accepted")][-1] == 7 - 3

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


def count(attempt_id: str, text: str) -> dict[str, pb.Count]:
    return {"count": pb.Count(**chat(attempt_id, text))}


def test_vllm_counts_a_chat_by_its_own_tokenizer() -> None:
    async def scenario(here: Scene) -> None:
        asked: list[Any] = []
        here.server.pages["/tokenize"] = lambda body: asked.append(body) or {"count": 11, "tokens": []}
        await here.session.send(**count("a", "hello"))
        (counted,) = await here.session.wait_for("counted")
        assert (counted.attempt_id, counted.prompt_tokens) == ("a", 11)
        assert asked == [{"model": "letters", "messages": [{"role": "user", "content": "hello"}]}]
        assert not here.server.asked

    run(scenario, owner="vllm")


def test_counts_that_take_long_leave_room_for_answers_and_probes() -> None:
    """Else three probes that get no connection take the site out of the federation."""

    async def scenario(here: Scene) -> None:
        here.server.mood = Mood.SILENT
        await here.session.send(**assign("a"))
        for number in range(MAX_COUNTS):
            await here.session.send(**count(str(number), "hello"))
        await here.server.until(lambda: here.server.running == 1 + MAX_COUNTS)
        seen = here.server.listings
        await here.server.until(lambda: here.server.listings > seen + 2)

    run(scenario, owner="vllm", settings={"slots": 1})


def test_llama_cpp_counts_what_its_template_makes_of_a_chat() -> None:
    async def scenario(here: Scene) -> None:
        asked: list[Any] = []
        here.server.pages["/apply-template"] = lambda body: asked.append(body) or {"prompt": "<hello>"}
        here.server.pages["/tokenize"] = lambda body: asked.append(body) or {"tokens": [1, 2, 3]}
        await here.session.send(**count("a", "hello"))
        assert (await here.session.wait_for("counted"))[0].prompt_tokens == 3
        assert asked == [
            {"messages": [{"role": "user", "content": "hello"}]},
            {"content": "<hello>", "add_special": True, "parse_special": True},
        ]

    run(scenario, owner="llamacpp")


def test_a_server_that_cannot_count_is_named() -> None:
    async def scenario(here: Scene) -> None:
        assert "count" not in here.hello.models[0].features
        await here.session.send(**count("a", "hello"))
        refused = await here.refused("a")
        assert (refused.reason, "counts no tokens" in refused.message) == (pb.Rejected.UNSUPPORTED, True)

    run(scenario)


def test_what_a_server_says_wrongly_of_a_count_is_a_refusal() -> None:
    async def scenario(here: Scene) -> None:
        answers: list[Any] = ["no json", [1], *({"count": each} for each in ("many", None, -1, 2**32))]
        for number, answer in enumerate(answers):
            here.server.pages["/tokenize"] = lambda _, answer=answer: answer
            await here.session.send(**count(str(number), "hello"))
            assert (await here.refused(str(number))).reason == pb.Rejected.INTERNAL
        del here.server.pages["/tokenize"]
        here.server.mood = Mood.INVALID
        await here.session.send(**count("old", "hello"))
        assert (await here.refused("old")).reason == pb.Rejected.INVALID

    run(scenario, owner="vllm")
