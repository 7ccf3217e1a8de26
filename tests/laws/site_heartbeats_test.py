"""Laws of a site under hostile prompts and grammars: its links go on beside whatever it prepares."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from site_engine.text.grammar import Grammars
from tests.support.site_gateway import Gateway, Scene, Session, assign, serving, site_before
from tests.support.tool_models import tool_tokenizer
from wire import federation_pb2 as pb

SCHEMAS, TEXTS = 4, 2
PROPERTIES = 4_000
"""Twice as many as pass: to find that takes a tenth of a second."""
CHARS = 1_000_000
REPLIES = ("rejected", "counted")


def hostile() -> Iterator[dict[str, Any]]:
    """Yield messages that take a site long: grammars that turn out too large, texts of a million tokens."""
    for number in range(SCHEMAS):
        properties = {f"p{number}_{each}": {"type": "string"} for each in range(PROPERTIES)}
        message = assign(f"schema {number}")
        message["assign"].sampling.guided_json = json.dumps({"type": "object", "properties": properties})
        yield message
    for number in range(TEXTS):
        yield {"count": pb.Count(**assign(f"text {number}", "abcdefgh" * (CHARS // 8)))}


async def ask_until_all_is_answered(session: Session, scene: Scene) -> list[str]:
    """Ping and let a report be due, and again once both are answered; return the kinds of what the site said
    until the last of its replies, in order.
    """
    began, nonce = len(session.log), 0
    while sum(len(session.received(kind)) for kind in REPLIES) < SCHEMAS + TEXTS:
        nonce += 1
        reports = len(session.received("load"))
        scene.clock.now += 1.0
        scene.engine_thread.request_load()
        await session.send(ping=pb.Ping(nonce=nonce))
        await session.wait_for("pong", nonce)
        await session.wait_for("load", reports + 1)
    said = [str(each.WhichOneof("body")) for each in session.log[began:]]
    return said[: max(place for place, kind in enumerate(said) if kind in REPLIES)]


def test_pongs_and_reports_do_not_wait_for_what_is_prepared() -> None:
    """A gateway gives a site up after three heartbeats without a word."""

    async def scenario() -> None:
        tokenizer = tool_tokenizer("hermes")
        grammars = Grammars(tokenizer, len(tokenizer), ())
        async with (
            serving(Gateway()) as gateway,
            site_before(gateway, tokenizer=tokenizer, grammars=grammars) as scene,
        ):
            session = await gateway.linked()
            await session.wait_for("load")
            for message in hostile():
                await session.send(**message)
            said = await ask_until_all_is_answered(session, scene)
            assert len(session.received("counted")) == TEXTS, "none was refused unread"
            assert all("too big" in each.message for each in session.received("rejected"))
            assert said.count("pong") > 3 * (SCHEMAS + TEXTS)
            assert said.count("load") > SCHEMAS + TEXTS

    asyncio.run(scenario())
