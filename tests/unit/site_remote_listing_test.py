"""Whatever a server lists as its models, its site can announce what it serves of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
from hypothesis import given
from hypothesis import strategies as st

from site_engine.config import SiteConfig
from site_engine.errors import ConfigError
from site_engine.federation.model_codec import encode_models
from site_engine.remote.dialects import DIALECTS, Dialect
from site_engine.remote.listing import read_cards, select_models, slot_context_tokens, to_models
from site_engine.remote.ollama import described, loaded_contexts
from site_engine.remote.server import MAX_PAGE_BYTES, Server, parse_error

CONFIG = SiteConfig(site="a", gateways=("gateway:1",), engine="openai", url="http://server")
ABSURD = st.one_of(
    st.integers(-(2**70), 2**70),
    st.sampled_from(
        [-1, 0, 2**32, 2**63, True, None, 0.5, [1], {"a": 1}, "\ud800", "x" * 2_000, "9" * 5_000]
    ),
    st.text(max_size=3),
)
FIELDS = (
    "root",
    "parent",
    "created",
    "max_model_len",
    "context_tokens",
    "context_length",
    "meta",
    "capabilities",
    "features",
)
CARDS = st.fixed_dictionaries(
    {"id": st.one_of(st.sampled_from("abc"), ABSURD)},
    optional={
        **dict.fromkeys(FIELDS, ABSURD),
        "architecture": st.builds(lambda each: {"input_modalities": each}, ABSURD),
    },
)


@given(st.lists(CARDS, max_size=4), st.sampled_from(DIALECTS), ABSURD)
def test_what_is_served_of_any_list_can_be_announced(
    listed: list[dict[str, Any]], dialect: Dialect, n_ctx: Any
) -> None:
    cards = read_cards(200, json.dumps({"data": listed}).encode())
    try:
        wanted, _ = select_models(cards, CONFIG)
    except ConfigError:
        return
    if slot_tokens := slot_context_tokens({"default_generation_settings": {"n_ctx": n_ctx}}):
        wanted = [{**each, "context_tokens": slot_tokens} for each in wanted]
    models = to_models(wanted, dialect, {}, CONFIG, {})
    assert [each.id for each in encode_models(models)] == [card["id"] for card in wanted]


@given(ABSURD, ABSURD, ABSURD)
def test_a_context_of_ollama_is_a_number_whatever_its_pages_say(
    loaded: Any, trained: Any, parameter: Any
) -> None:
    body = json.dumps({"models": [{"name": "m", "context_length": loaded}]}).encode()
    shown = {"model_info": {"llama.context_length": trained}, "parameters": f"num_ctx {parameter}"}
    card = described({"id": "m"}, shown, loaded_contexts(body).get("m"))
    assert type(card["context_length"]) is int
    assert card["context_length"] > 0


def test_pages_that_are_nested_too_deeply_say_nothing() -> None:
    deep = b'{"data": ' + b"[" * 100_000
    assert read_cards(200, deep) == []
    assert loaded_contexts(deep) == {}
    assert parse_error(deep)[1:] == ("", "")


def test_of_a_long_page_no_more_is_read_than_is_kept() -> None:
    sent: list[int] = []

    async def long() -> AsyncIterator[bytes]:
        for _ in range(40):
            sent.append(1 << 20)
            yield bytes(sent[-1])

    async def read() -> bytes:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=long()))
        server = Server("http://server", "", silence_s=9, connections=1, transport=transport)
        try:
            return (await server.get("/metrics"))[1]
        finally:
            await server.close()

    assert len(asyncio.run(read())) == MAX_PAGE_BYTES
    assert sum(sent) <= MAX_PAGE_BYTES + (2 << 20)
