"""A site in front of a server that others could have written: here a whole federation of real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from site_engine.config import SiteConfig
from site_engine.remote.process import serve
from tests.local_federation import LocalFederation
from tests.site_gateway import TOKEN, Gateway, Session, serving
from wire import federation_pb2 as pb

pytestmark = pytest.mark.e2e

PROMPTS = ("Why is the sky blue?", "Bread?", "Explain rivers to a child.", "Write a line about salt: é ☃")
TOKENS = 24


def in_front(federation: LocalFederation, gateway: Gateway, folder: Path) -> SiteConfig:
    key = folder / "key"
    key.write_text(federation.api_key)
    return SiteConfig(
        site="front",
        engine="openai",
        url=federation.base_url,
        key_file=key,
        gateways=(gateway.address,),
        token=TOKEN,
    )


def chat(federation: LocalFederation, attempt_id: str, prompt: str, **sampling: Any) -> pb.Assign:
    body = pb.Assign(
        attempt_id=attempt_id,
        model=federation.model,
        sampling=pb.Sampling(**{"n": 1, "top_p": 1.0, "max_tokens": TOKENS, **sampling}),
    )
    body.chat.messages.extend([pb.ChatMessage(role="user", content=prompt)])
    return body


def asked_directly(federation: LocalFederation, prompt: str) -> tuple[str, str, int, int]:
    answer = federation.sdk().chat.completions.create(
        model=federation.model,
        messages=[{"role": "user", "content": prompt}],
        max_completion_tokens=TOKENS,
        temperature=0,
    )
    (choice,), usage = answer.choices, answer.usage
    assert usage is not None
    return choice.message.content or "", choice.finish_reason, usage.prompt_tokens, usage.completion_tokens


def through_the_site(session: Session, attempt_id: str) -> tuple[str, str, int, int]:
    last = session.deltas(attempt_id)[-1]
    counted = [each for each in session.said("accepted") if each.attempt_id == attempt_id][-1]
    finish = pb.Delta.Finish.Name(last.finish).lower()
    return session.text(attempt_id), finish, counted.prompt_tokens, last.completion_tokens


def test_greedy_answers_are_those_of_asking_the_server(federation: LocalFederation, tmp_path: Path) -> None:
    expected = {prompt: asked_directly(federation, prompt) for prompt in PROMPTS}

    async def scenario() -> None:
        async with serving(Gateway()) as gateway:
            site = asyncio.create_task(serve(in_front(federation, gateway, tmp_path)))
            session = await gateway.linked()
            hello = session.said("hello")[0]
            assert [each.id for each in hello.models] == [federation.model]
            assert "(mico, load from an estimate" in hello.version
            for prompt in PROMPTS:
                await session.send(assign=chat(federation, prompt, prompt))
            await session.send(assign=chat(federation, "probable", "Bread?", logprobs=2))
            for prompt in PROMPTS:
                await session.finished(prompt)
                assert through_the_site(session, prompt) == expected[prompt]
            await session.finished("probable")
            logprobs = [each for delta in session.deltas("probable") for each in delta.logprobs]
            assert len(logprobs) == expected["Bread?"][3]
            assert all(len(each.top) == 2 for each in logprobs)
            os.kill(os.getpid(), signal.SIGTERM)
            assert await site == 0

    asyncio.run(scenario())
    federation.wait_until_idle()


def test_a_cancel_reaches_the_sites_behind(federation: LocalFederation, tmp_path: Path) -> None:

    async def scenario() -> None:
        async with serving(Gateway()) as gateway:
            site = asyncio.create_task(serve(in_front(federation, gateway, tmp_path)))
            session = await gateway.linked()
            for name in ("a", "b"):
                await session.send(
                    assign=chat(federation, name, "On and on", max_tokens=400, ignore_eos=True)
                )
                await session.until(lambda name=name: session.text(name))
                await session.send(cancel=pb.Cancel(attempt_id=name))
                assert await session.finished(name) == pb.Delta.CANCELLED
            os.kill(os.getpid(), signal.SIGTERM)
            assert await site == 0

    asyncio.run(scenario())
    federation.wait_until_idle()
