"""What a site learns of a server before it serves its models."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import httpx
import pytest

from site_engine.config import SiteConfig
from site_engine.federation.codec import encode_hello
from site_engine.remote.discovery import HEALTH_PATH, METRICS_PATH, MODELS_PATH, Discovery, discover, refresh
from site_engine.remote.server import Server, ServerLost
from site_engine.remote_site import make_hello
from tests.support import metric_pages

CONFIG = SiteConfig(site="front", engine="openai", url="http://server", gateways=("gateway:1",))
T = TypeVar("T")


def with_server(pages: dict[str, httpx.Response], look: Callable[[Server], Awaitable[T]]) -> T:
    def answer(request: httpx.Request) -> httpx.Response:
        return pages.get(request.url.path, httpx.Response(404))

    async def whole() -> T:
        server = Server(CONFIG.url, "", silence_s=9, connections=1, transport=httpx.MockTransport(answer))
        try:
            return await look(server)
        finally:
            await server.close()

    return asyncio.run(whole())


def discovered(pages: dict[str, httpx.Response], **settings: Any) -> Discovery:
    return with_server(pages, lambda server: discover(server, replace(CONFIG, **settings)))


def llama_cpp(meta: dict[str, Any] | None) -> httpx.Response:
    return httpx.Response(200, json={"data": [{"id": "m", "owned_by": "llamacpp", "meta": meta}]})


def test_a_server_that_lists_its_models_while_it_loads_is_waited_for() -> None:
    """llama.cpp does, without their contexts, and its metrics are not there yet."""
    loading = {each: httpx.Response(503) for each in (HEALTH_PATH, METRICS_PATH, "/props")}
    with pytest.raises(ServerLost, match="/health answers 503"):
        discovered({**loading, MODELS_PATH: llama_cpp(None)})
    metrics = httpx.Response(200, text=metric_pages.LLAMA_CPP)
    found = discovered(
        {HEALTH_PATH: httpx.Response(200), METRICS_PATH: metrics, MODELS_PATH: llama_cpp({"n_ctx": 4096})}
    )
    assert found.models[0].context_tokens == 4096 and found.has_metrics


def test_the_context_of_llama_cpp_is_that_of_its_slots_not_of_the_training() -> None:
    trained = llama_cpp({"n_ctx_train": 131072})
    pages = {HEALTH_PATH: httpx.Response(200), MODELS_PATH: trained}
    for settings, context in (({"n_ctx": 4096}, 4096), ({"n_ctx": 0}, 131072), (None, 131072)):
        props = httpx.Response(200, json={"default_generation_settings": settings})
        found = discovered({**pages, "/props": props})
        assert [each.context_tokens for each in found.models] == [context]
        assert found.profile.max_prompt_tokens == context


def test_what_no_gateway_takes_of_a_context_or_a_room_is_told_as_the_most_that_it_takes() -> None:
    cards = {"data": [{"id": "m", "max_model_len": 10_485_760}, {"id": "n", "max_model_len": 2**40}]}
    found = discovered({MODELS_PATH: httpx.Response(200, json=cards)}, slots=512)
    told = encode_hello(make_hello(CONFIG, found))
    assert told.kv_capacity_tokens == 2**32 - 1
    assert [each.context_tokens for each in told.models] == [10_485_760, 100_000_000]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"max_model_len": 4096}, {"max_model_len": 1024}),
        ({"context_length": 4096}, {"context_length": 1024}),
        ({"meta": {"n_ctx": 4096}}, {"meta": {"n_ctx": 1024}}),
        ({"context_tokens": 4096}, {"context_tokens": 1024}),
    ],
)
def test_a_context_that_shrinks_is_told_wherever_a_server_writes_it(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    listed = {"id": "m", **before, "created": 1}
    pages = {MODELS_PATH: httpx.Response(200, json={"data": [listed]})}

    async def look(server: Server) -> list[Discovery]:
        first = await discover(server, CONFIG)
        stamped = {**listed, "created": 2}
        pages[MODELS_PATH] = httpx.Response(200, json={"data": [stamped]})
        same = await refresh(server, CONFIG, first)
        pages[MODELS_PATH] = httpx.Response(200, json={"data": [{**stamped, **after}]})
        return [first, same, await refresh(server, CONFIG, same)]

    first, same, last = with_server(pages, look)
    assert same is first
    assert [first.profile.context_tokens, last.profile.context_tokens] == [4096, 1024]


def test_slots_of_llama_cpp_that_shrink_by_a_quick_restart_are_told() -> None:
    """Its page about itself goes before its list, and was that of before the restart."""

    def pages_of(context: int) -> dict[str, httpx.Response]:
        slots = {"default_generation_settings": {"n_ctx": context}}
        return {
            MODELS_PATH: llama_cpp({"n_ctx": context, "n_ctx_train": 131_072}),
            "/props": httpx.Response(200, json=slots),
        }

    pages = pages_of(4096)

    async def look(server: Server) -> list[Discovery]:
        first = await discover(server, CONFIG)
        pages.update(pages_of(1024))
        return [first, await refresh(server, CONFIG, first)]

    assert [each.models[0].context_tokens for each in with_server(pages, look)] == [4096, 1024]


def test_a_gateway_that_gets_a_feature_is_told_anew() -> None:
    card = {"id": "m", "owned_by": "mico", "max_model_len": 64, "features": ["chat"]}
    pages = {MODELS_PATH: httpx.Response(200, json={"data": [card]})}

    async def look(server: Server) -> list[Discovery]:
        first = await discover(server, CONFIG)
        pages[MODELS_PATH] = httpx.Response(200, json={"data": [{**card, "features": ["chat", "vision"]}]})
        return [first, await refresh(server, CONFIG, first)]

    assert ["vision" in each.models[0].features for each in with_server(pages, look)] == [False, True]


@pytest.mark.parametrize("odd", [7, ["m"], {"id": ["n"]}, {"id": {"n": 1}}, {"id": 7}, {"id": ""}])
def test_what_is_no_model_in_a_list_of_models_is_left_out(odd: object) -> None:
    """An id that is a list ended the site, or the watch over its server, with a fault of its own."""
    named = {"id": "m", "architecture": {"input_modalities": 7}}
    found = discovered({MODELS_PATH: httpx.Response(200, json={"data": [odd, named]})})
    assert [each.id for each in found.models] == ["m"]
