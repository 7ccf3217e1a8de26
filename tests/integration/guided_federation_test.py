"""From the OpenAI SDK to sites with a real model and back: schemas, calls, refusals, the death of a site."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from functools import cache, partial
from typing import Any, Literal

import jsonschema
import openai
import pytest
import torch
import transformers
from pydantic import BaseModel, Field

from site_engine.app import serve
from site_engine.config import SiteConfig
from site_engine.engine.build import packed_engine
from site_engine.engine.loading import Loaded, facts_of
from site_engine.engine.settings import EngineSettings
from site_engine.model.loader import LoadedModel, from_model
from tests.support.answers import backend_of
from tests.support.fakes.edge import Edge, Script, on_loopback
from tests.support.fakes.federation import TOKEN, Scene, scene, until
from tests.support.model_families import random_model
from tests.support.tool_models import tool_tokenizer

torch.set_num_threads(1)

DEADLINE_S = 60.0
CONTEXT_TOKENS = 2048
DAYS = {"type": "integer", "minimum": 0, "maximum": 99}  # a random model counts on for ever
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"days": DAYS, "city": {"type": "string", "maxLength": 30}},
            "required": ["days", "city"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "age": DAYS},
    "required": ["name", "age"],
    "additionalProperties": False,
}
AS_PERSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
ASK: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 300,
    "seed": 3,
}


class Person(BaseModel):
    name: str = Field(max_length=9)
    age: int = Field(ge=0, le=99)
    likes: Literal["tea", "coffee"] | None


@cache
def model(name: str) -> LoadedModel:
    tokenizer = tool_tokenizer(name)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return from_model(random_model(config), tokenizer, name="m", eos_token_ids=(tokenizer.eos_token_id,))


def loaded(name: str, _: SiteConfig) -> Loaded:
    made = model(name)
    settings = EngineSettings(slots=4, token_budget=256, kv_tokens=4 * CONTEXT_TOKENS)
    engine = packed_engine(made, settings, time.monotonic)
    return Loaded(engine, made.tokenizer, facts_of(made, engine)._replace(name="m", revision="r1"))


class Stage:
    """A gateway with its edge, and sites that can be ended."""

    def __init__(self, here: Scene, edge: Edge) -> None:
        self.here, self.edge = here, edge
        self.sites: dict[str, asyncio.Task[int]] = {}

    async def site(self, name: str, family: str = "hermes", **settings: Any) -> None:
        config = SiteConfig(
            site=name, model="m", gateways=(self.here.address,), token=TOKEN, slots=4, **settings
        )
        self.sites[name] = asyncio.create_task(serve(config, partial(loaded, family)))
        await until(lambda: name in self.ready(), f"{name} is ready")

    def ready(self) -> set[str]:
        return {site.name for site in self.here.gateway.directory.sites if site.state == "ready"}

    async def end(self, name: str) -> None:
        self.sites[name].cancel()
        await asyncio.gather(self.sites.pop(name), return_exceptions=True)

    async def ask(self, **fields: Any) -> Any:
        return await self.edge.sdk.chat.completions.create(**(ASK | fields))

    async def refused(self, **fields: Any) -> Any:
        with pytest.raises(openai.BadRequestError) as refused:
            await self.ask(**fields)
        return refused.value.body


def play(scenario: Callable[[Stage], Awaitable[None]]) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            scene() as here,
            on_loopback(Script(), backend_of(here)) as (edge, _),
        ):
            stage = Stage(here, edge)
            try:
                await scenario(stage)
                await here.gateway.wait_settled()
                await until(here.nothing_is_left, "all counters at zero")
            finally:
                for name in list(stage.sites):
                    await stage.end(name)

    asyncio.run(main())


def arguments(call: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call.function.arguments)
    return found


def test_an_answer_satisfies_its_schema() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.site("a")
        for at in range(3):
            answered = await stage.ask(response_format=AS_PERSON, n=2, seed=at, logprobs=True)
            for choice in answered.choices:
                assert choice.finish_reason == "stop"
                jsonschema.validate(json.loads(choice.message.content), PERSON)
                assert len(choice.logprobs.content) > 0
        cut = await stage.ask(response_format=AS_PERSON, max_tokens=4)
        assert cut.choices[0].finish_reason == "length"
        assert cut.choices[0].message.content.startswith("{")
        parse = stage.edge.sdk.chat.completions.parse
        parsed = await parse(**ASK, response_format=Person)
        assert isinstance(parsed.choices[0].message.parsed, Person)
        some = await stage.ask(response_format={"type": "json_object"}, max_tokens=20)
        assert some.choices[0].message.content.startswith("{")

    play(scenario)


def test_a_schema_that_cannot_be_enforced_costs_no_token() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.site("a")
        wrong = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "strin"}}}
        error = await stage.refused(response_format=wrong)
        assert error["param"] == "response_format"
        assert "strin" in error["message"]
        odd = {"type": "function", "function": {"name": "odd", "parameters": {"not": {}}}}
        assert (await stage.refused(tools=[odd], tool_choice="required"))["param"] == "tools"
        assert [outcome.completion_tokens for outcome in stage.here.outcomes] == [0, 0]

    play(scenario)


@pytest.mark.parametrize("family", ["hermes", "mistral", "llama"])
def test_a_forced_call_has_openais_finish_reason(family: str) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.site("a", family)
        named = {"type": "function", "function": {"name": "weather"}}
        single = {"tools": [WEATHER], "parallel_tool_calls": False}
        required = (await stage.ask(tool_choice="required", **single)).choices[0]
        (call,) = required.message.tool_calls
        assert (required.finish_reason, required.message.content) == ("tool_calls", None)
        jsonschema.validate(arguments(call), WEATHER["function"]["parameters"])
        assert call.function.name == "weather"
        forced = (await stage.ask(tool_choice=named, **single)).choices[0]
        assert forced.finish_reason == "stop"
        assert forced.message.tool_calls[0].function.name == "weather"
        cut = (await stage.ask(tool_choice="required", max_tokens=60, **single)).choices[0]
        assert cut.finish_reason == "length"
        free = (await stage.ask(tools=[WEATHER], max_tokens=10)).choices[0]
        assert free.message.tool_calls is None
        called = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        await stage.ask(messages=[*ASK["messages"], called, result], tools=[WEATHER], max_tokens=5)

    play(scenario)


def test_a_call_chosen_by_the_model_has_finish_reason_tool_calls() -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    begins = tool_tokenizer("hermes").convert_tokens_to_ids("<tool_call>")

    async def scenario(stage: Stage) -> None:
        await stage.site("a")
        asked = {"tools": [strict], "parallel_tool_calls": False, "n": 2, "temperature": 0}
        called = await stage.ask(**asked, logit_bias={str(begins): 100})
        for choice in called.choices:
            (call,) = choice.message.tool_calls
            assert choice.finish_reason == "tool_calls"
            jsonschema.validate(arguments(call), WEATHER["function"]["parameters"])
        ids = {choice.message.tool_calls[0].id for choice in called.choices}
        assert len(ids) == 2
        assert all(each.startswith("call_") for each in ids)
        talked = await stage.ask(**asked, logit_bias={str(begins): -100}, max_tokens=10)
        assert [choice.finish_reason for choice in talked.choices] == ["length", "length"]

    play(scenario)


def test_a_model_without_tools_is_refused_before_any_site() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.site("a", "none")
        listed = (await stage.edge.http.get("/v1/models")).json()["data"][0]
        assert listed["features"] == [
            "chat",
            "count",
            "guided",
            "logprobs",
            "resume",
            "resume_chat",
            "resume_text",
            "template_kwargs",
        ]
        error = await stage.refused(tools=[WEATHER])
        assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
        assert not stage.here.outcomes
        await stage.ask(tools=[WEATHER], tool_choice="none", max_tokens=3)

    play(scenario)


def test_a_query_with_tools_goes_to_the_site_that_has_them() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.site("without", "none")
        await stage.site("with", "hermes")
        for at in range(4):
            await stage.ask(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, seed=at)
        assert {outcome.site for outcome in stage.here.outcomes} == {"with"}

    play(scenario)


@pytest.mark.parametrize("is_call", [True, False])
def test_an_answer_goes_on_at_another_site_in_the_middle_of_its_schema(is_call: bool) -> None:
    forced = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    fields = forced if is_call else {"response_format": AS_PERSON}

    def content_of(delta: Any) -> str:
        calls = delta.tool_calls or []
        return "".join(call.function.arguments for call in calls) if is_call else delta.content or ""

    async def scenario(stage: Stage) -> None:
        for name in ("a", "b"):
            await stage.site(name, iteration_floor_s=0.02)
        whole = (await stage.ask(**fields, temperature=0)).choices[0].message
        expected = whole.tool_calls[0].function.arguments if is_call else whole.content
        parts: list[str] = []
        ids: list[str] = []
        finish = None
        async for chunk in await stage.ask(**fields, temperature=0, stream=True):
            delta = chunk.choices[0].delta
            ids += [call.id for call in delta.tool_calls or [] if call.id]
            finish = chunk.choices[0].finish_reason or finish
            parts.append(content_of(delta))
            if stage.sites.keys() == {"a", "b"} and len("".join(parts)) > 3:
                (state,) = stage.here.gateway.live_queries.values()
                await stage.end(state.current.site.name)
        assert "".join(parts) == expected
        assert (len(ids), finish) == ((1, "tool_calls") if is_call else (0, "stop"))
        assert len(stage.here.outcomes[-1].attempts) == 2

    play(scenario)
