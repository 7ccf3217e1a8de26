"""A site in front of a server that others could have written: here a whole federation of real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import APIError

from site_engine.config import SiteConfig
from site_engine.remote_site import serve
from tests.support.local_federation import LocalFederation
from tests.support.site_gateway import TOKEN, Gateway, Session, serving
from wire import federation_pb2 as pb

pytestmark = pytest.mark.e2e

PROMPTS = ("Why is the sky blue?", "Bread?", "Explain rivers to a child.", "Write a line about salt: é ☃")
TOKENS = 24
ROOT = Path(__file__).parents[2]


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
    with federation.sdk() as sdk:
        answer = sdk.chat.completions.create(
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
    counted = [each for each in session.received("accepted") if each.attempt_id == attempt_id][-1]
    finish = pb.Delta.Finish.Name(last.finish).lower()
    return session.text(attempt_id), finish, counted.prompt_tokens, last.completion_tokens


def test_greedy_answers_are_those_of_asking_the_server(federation: LocalFederation, tmp_path: Path) -> None:
    expected = {prompt: asked_directly(federation, prompt) for prompt in PROMPTS}

    async def scenario() -> None:
        async with serving(Gateway()) as gateway:
            site = asyncio.create_task(serve(in_front(federation, gateway, tmp_path)))
            session = await gateway.linked()
            hello = session.received("hello")[0]
            assert federation.model in [each.id for each in hello.models]  # beside routes of other tests
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


def test_a_foreign_server_killed_in_mid_answer(federation: LocalFederation, tmp_path: Path) -> None:
    """Each server and each site is a process. While there is another server the answer goes on there to the
    letter; then it ends with an error that says so. No server ends what it began, however late it is killed.
    """
    ids = ["outlives-its-server", "has-no-other-server"]
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(foreign(federation, name, tmp_path / name)) for name in ("one", "two")
        }
        whole = ask_and_kill(federation, ids[0], servers)
        assert whole == (ANSWER, "length")
        text, error = ask_and_kill(federation, ids[1], servers)
        assert error == "upstream_lost"
        assert ANSWER.startswith(text) and 0 < len(text) < len(ANSWER)
        federation.wait_until_idle()
    records = federation.recorded_once(ids)
    counted = [(record.usage.status, record.usage.completion_tokens) for record in records.values()]
    assert counted[0] == ("answered", len(ANSWER))
    assert counted[1][0] == "failed" and counted[1][1] >= len(text)
    assert len(records[ids[0]].attempts) == 2


SAID = "Say-something."  # a chat that broke off behind white space would go on nowhere
ANSWER = (SAID * 10)[:80]


def ask_and_kill(
    federation: LocalFederation, query_id: str, servers: dict[str, subprocess.Popen[str]]
) -> tuple[str, str]:
    """The text that came, though the server that began it was killed, and how it ended."""
    text, end = "", ""
    with federation.sdk() as sdk:
        raw = sdk.chat.completions.with_raw_response.create(
            model="letters",
            messages=[{"role": "user", "content": SAID}],
            max_tokens=len(ANSWER),
            stream=True,
            extra_headers={"x-request-id": query_id},
        )
        try:
            for chunk in raw.parse():
                text += chunk.choices[0].delta.content or ""
                end = chunk.choices[0].finish_reason or end
                if text and (server := servers.pop(raw.headers["x-mico-site"], None)):
                    os.kill(server.pid, signal.SIGKILL)
        except APIError as error:
            end = str(error.code)
    return text, end


@contextmanager
def foreign(federation: LocalFederation, name: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A server of somebody else's, with a site in front of it."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.openai_server"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert server.stdout is not None
    try:
        with federation.site_before(server.stdout.readline().strip(), name, folder):
            yield server
    finally:
        server.kill()
        server.communicate()
