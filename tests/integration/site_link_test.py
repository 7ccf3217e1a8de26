"""A site before gateways, over real gRPC: the attempts it takes, its answers, and its end."""

from __future__ import annotations

from dataclasses import replace

from site_engine.federation.report_pace import REPORT_EVERY_S
from tests.support.site_fakes import CONTEXT_TOKENS, HELLO, FakeEngine
from tests.support.site_gateway import TOKEN, Gateway, assign, serving, site_before
from tests.support.site_links import HURRIED, falls_idle, idle, run
from wire import federation_pb2 as pb

ADD = '[{"type": "function", "function": {"name": "add"}}]'


def test_a_site_says_who_it_is_and_how_busy() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as gateway, site_before(gateway) as scene:
            session = await gateway.joined()
            hello = await session.welcome()
            assert session.metadata["authorization"] == f"Bearer {TOKEN}"
            assert (hello.site, hello.cloud, hello.region) == ("alpha", "on-prem", "lab")
            assert hello.models[0].id == "letters"
            assert list(hello.attempts) == []
            await session.wait_for("load")
            scene.clock.now += REPORT_EVERY_S
            scene.engine_thread.request_load()
            loads = await session.wait_for("load", 2)
            assert [each.seq for each in loads] == sorted({each.seq for each in loads})
            assert idle(loads[0])
            await session.send(ping=pb.Ping(nonce=7))
            assert (await session.wait_for("pong"))[0].nonce == 7
            await session.wait_for("bid")

    run(scenario())


def test_an_attempt_is_accepted_streamed_and_finished() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as gateway, site_before(gateway, stepped=False):
            session = await gateway.linked()
            await session.send(**assign("a", "hello", max_tokens=12))
            assert await session.finished("a") == pb.Delta.LENGTH
            accepted = session.received("accepted")[0]
            assert accepted.prompt_tokens == 5
            assert session.text("a") == "hellohellohe"
            deltas = session.deltas("a")
            assert [token for each in deltas for token in each.token_ids] == [ord(x) for x in "hellohellohe"]
            assert deltas[-1].completion_tokens == 12
            kinds = [each.WhichOneof("body") for each in session.log]
            assert kinds.index("accepted") < kinds.index("step")
            await falls_idle(session)

    run(scenario())


def test_chats_tokens_and_echo() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as gateway, site_before(gateway, stepped=False):
            session = await gateway.linked()
            sampling = pb.Sampling(n=1, top_p=1.0, max_tokens=6)
            chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
            ids = pb.TokenIds(ids=[ord("x"), ord("y")])
            echoed = pb.Sampling(n=1, top_p=1.0, max_tokens=2, echo=True)
            await session.send(
                assign=pb.Assign(attempt_id="c", model="letters", chat=chat, sampling=sampling)
            )
            await session.send(
                assign=pb.Assign(attempt_id="t", model="letters", token_ids=ids, sampling=echoed)
            )
            await session.finished("c")
            await session.finished("t")
            assert session.text("c") == "user: "
            assert session.text("t") == "xyxy"

    run(scenario())


def test_a_resumed_attempt_goes_on_where_it_was() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as gateway, site_before(gateway, stepped=False):
            session = await gateway.linked()
            body = assign("a", "abc")["assign"]
            body.resume.CopyFrom(pb.ResumeFrom(token_ids=[ord("a"), ord("b")], text_chars=2))
            await session.send(assign=body)
            await session.finished("a")
            assert session.text("a") == "cabc"

    run(scenario())


def test_every_choice_ends_once() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as gateway, site_before(gateway, stepped=False):
            session = await gateway.linked()
            await session.send(**assign("a", n=3))
            for index in range(3):
                assert await session.finished("a", index) == pb.Delta.LENGTH
                assert session.text("a", index) == "abca"
            assert len(session.received("accepted")) == 1
            await falls_idle(session)

    run(scenario())


def test_what_cannot_be_served_is_rejected_with_the_reason() -> None:
    reasons = pb.Rejected.Reason

    async def scenario() -> None:
        async with serving(Gateway()) as gateway, site_before(gateway, engine=FakeEngine(max_pending=1)):
            session = await gateway.linked()
            wrong = assign("model")["assign"]
            wrong.model = "numbers"
            tools = assign("tools")["assign"]
            tools.chat.CopyFrom(pb.Chat(messages=[pb.ChatMessage(role="user")], tools_json=ADD))
            nothing = assign("nothing")["assign"]
            nothing.ClearField("prompt")
            await session.send(assign=wrong)
            await session.send(assign=tools)
            await session.send(assign=nothing)
            await session.send(**assign("long", "x" * CONTEXT_TOKENS))
            chat = assign("long chat")["assign"]
            chat.chat.CopyFrom(pb.Chat(messages=[pb.ChatMessage(role="user", content="x" * CONTEXT_TOKENS)]))
            await session.send(assign=chat)
            await session.send(**assign("bias", logit_bias={5000: 1.0}))
            await session.send(**assign("warm", temperature=float("nan")))
            await session.send(**assign("waits"))
            await session.send(**assign("full"))
            await session.send(**assign("wide", n=2))
            rejected = {each.attempt_id: each for each in await session.wait_for("rejected", 9)}
            assert {name: (each.reason, each.param) for name, each in rejected.items()} == {
                "model": (reasons.MODEL_UNKNOWN, "model"),
                "tools": (reasons.UNSUPPORTED, "tools"),
                "nothing": (reasons.UNSUPPORTED, "prompt"),
                "long": (reasons.CONTEXT_LENGTH, "prompt"),
                "long chat": (reasons.CONTEXT_LENGTH, "messages"),
                "bias": (reasons.INVALID, "logit_bias"),
                "warm": (reasons.INVALID, "temperature"),
                "full": (reasons.FULL, ""),
                "wide": (reasons.FULL, ""),
            }
            assert all(each.message for each in rejected.values())
            assert [each.attempt_id for each in session.received("accepted")] == ["waits"]

    run(scenario())


def test_a_cancel_during_prefill_frees_everything_at_once() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as gateway, site_before(gateway, engine=FakeEngine(chunk=2)) as scene:
            session = await gateway.linked()
            await session.send(**assign("a", "x" * 40))
            await session.wait_for("accepted")
            await scene.step(2)
            assert scene.engine.running
            await session.send(cancel=pb.Cancel(attempt_id="a"))
            await session.send(ping=pb.Ping(nonce=1))
            await session.wait_for("pong")
            await scene.step()
            assert await session.finished("a") == pb.Delta.CANCELLED
            assert session.text("a") == ""
            await falls_idle(session)

    run(scenario())


def test_a_cancel_during_decode_frees_everything_and_says_what_was_generated() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as gateway, site_before(gateway) as scene:
            session = await gateway.linked()
            await session.send(**assign("a", n=2, max_tokens=50))
            await session.wait_for("accepted")
            await scene.step(3)
            await session.send(cancel=pb.Cancel(attempt_id="a"))
            await session.send(ping=pb.Ping(nonce=1))
            await session.wait_for("pong")
            await scene.step()
            for index in range(2):
                assert await session.finished("a", index) == pb.Delta.CANCELLED
                assert session.deltas("a", index)[-1].completion_tokens == 3
                assert session.text("a", index) == "abc"
            await falls_idle(session)

    run(scenario())


def test_only_what_has_not_started_is_released() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as gateway, site_before(gateway, engine=FakeEngine(slots=1)) as scene:
            session = await gateway.linked()
            for name in ("a", "b", "c"):
                await session.send(**assign(name))
            await session.wait_for("accepted", 3)
            await scene.step()
            await session.send(release=pb.Release(release_id="r", attempt_ids=["a", "b", "unknown"]))
            released = (await session.wait_for("released"))[0]
            assert (released.release_id, list(released.attempt_ids)) == ("r", ["b"])
            await scene.step(10)
            await session.finished("a")
            await session.finished("c")
            assert session.deltas("b") == []

    run(scenario())


def test_a_slow_reader_holds_nobody_up_and_gets_everything_merged() -> None:
    wide, tokens = 60_000, 50  # a stream takes in one or two of these unread

    async def scenario() -> None:
        async with (
            serving(Gateway(reads=False)) as slow,
            serving(Gateway()) as quick,
            site_before(slow, quick, engine=FakeEngine(width=wide), paced=True) as scene,
        ):
            unread, session = await slow.linked("slow"), await quick.linked("quick")
            await unread.send(**assign("s", max_tokens=tokens))
            await session.send(**assign("q", max_tokens=tokens))
            await session.wait_for("accepted")
            await scene.step(tokens + 2)
            await session.finished("q")
            await falls_idle(session)  # the engine is through, though nothing was read
            assert unread.received("step") == []
            unread.reads.set()
            assert await unread.finished("s") == pb.Delta.LENGTH
            assert unread.text("s") == "".join(each * wide for each in ("abc" * tokens)[:tokens])
            assert len(unread.deltas("s")) < tokens

    run(scenario())


def test_a_kind_of_message_that_only_newer_gateways_know_is_ignored_and_counted() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as gateway, site_before(gateway, stepped=False):
            session = await gateway.linked()
            await session.send()
            await session.send(bunch=pb.GatewayBunch(messages=[pb.GatewayMessage(), pb.GatewayMessage()]))
            await session.send(**assign("a"))
            assert await session.finished("a") == pb.Delta.LENGTH
            await session.until(
                lambda: [load.unknown_messages for load in session.received("load")[-1:]] == [3]
            )

    run(scenario())


def test_answers_to_the_first_of_a_large_bunch_leave_before_its_last_are_read() -> None:
    pings = [pb.GatewayMessage(ping=pb.Ping(nonce=number)) for number in range(1, 1_601)]

    async def scenario() -> None:
        async with serving(Gateway()) as gateway, site_before(gateway, stepped=False):
            session = await gateway.joined()
            await session.welcome(reads_bunches=True)
            await session.send(bunch=pb.GatewayBunch(messages=pings))

            def pongs() -> list[list[int]]:
                """Return the numbers of the pings that each message answers."""
                parts = [each.bunch.messages or [each] for each in session.log]
                every = [[one.pong.nonce for one in part if one.pong.nonce] for part in parts]
                return [each for each in every if each]

            await session.until(lambda: sum(map(len, pongs())) == len(pings))
            assert [number for part in pongs() for number in part] == list(range(1, 1_601))
            assert len(pongs()[0]) < len(pings)

    run(scenario())


def test_a_message_before_welcome_ends_the_stream_not_the_site() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as gateway, site_before(gateway, stepped=False):
            await (await gateway.joined()).send(ping=pb.Ping(nonce=1))
            session = await gateway.linked()
            await session.send(**assign("a"))
            assert await session.finished("a") == pb.Delta.LENGTH

    run(scenario())


def test_a_prompt_is_counted_and_no_attempt_begins() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as gateway, site_before(gateway) as scene:
            session = await gateway.linked()
            await session.send(count=pb.Count(**assign("c", "hello")))
            await session.send(count=pb.Count(**assign("long", "x" * (CONTEXT_TOKENS + 1))))
            unknown = assign("u")
            unknown["assign"].model = "other"
            await session.send(count=pb.Count(**unknown))
            chat = pb.Assign(attempt_id="chat", model="letters", sampling=pb.Sampling(n=1))
            chat.chat.messages.append(pb.ChatMessage(role="user", content="hi"))
            await session.send(count=pb.Count(assign=chat))
            counted = {each.attempt_id: each.prompt_tokens for each in await session.wait_for("counted", 3)}
            assert counted == {"c": 5, "long": CONTEXT_TOKENS + 1, "chat": len("user: hi\n")}
            (rejected,) = await session.wait_for("rejected")
            assert (rejected.attempt_id, rejected.reason) == ("u", pb.Rejected.MODEL_UNKNOWN)
            assert not session.received("accepted")
            assert not scene.site.live

    run(scenario())


MODELS = (*HELLO.models, replace(HELLO.models[0], id="letters-v", parent="letters"))


def test_models_that_come_later_are_told_on_the_same_stream() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as gateway, site_before(gateway, stepped=False) as scene:
            session = await gateway.linked(reads_models=True)
            scene.site.set_models(MODELS)
            (told,) = await session.wait_for("models")
            assert [(each.id, each.parent) for each in told.models] == [
                ("letters", ""),
                ("letters-v", "letters"),
            ]
            assert not session.over.is_set() and gateway.sessions.empty()

    run(scenario())


def test_an_older_gateway_hears_of_models_by_a_new_hello_once_it_waits_for_nothing() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as gateway, site_before(gateway, timeouts=HURRIED) as scene:
            session = await gateway.linked()
            await session.send(**assign("a", "hello", max_tokens=3))
            await session.wait_for("accepted")
            scene.site.set_models(MODELS)
            await scene.step(2)
            assert not session.over.is_set()
            await scene.step(3)
            assert await session.finished("a") == pb.Delta.LENGTH
            again = await gateway.joined()
            hello = await again.welcome()
            assert [each.id for each in hello.models] == ["letters", "letters-v"]
            assert not hello.attempts
            assert not session.received("models")

    run(scenario())
