"""The API's promises about the fields of a request, and how a wrong one is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from openai.types.chat import ChatCompletion

from gateway.domain import Sampling
from gateway.errors import ContextTooLong
from gateway.openai.sampling import MAX_STOP_CHARS, MODEL_DEFAULTS
from gateway.prompt import Chat, Message
from tests.support.fakes.edge import (
    MODEL,
    MODELS,
    Edge,
    Script,
    chat,
    chat_body,
    error_of,
    fail,
    post,
    refused,
    run,
    text,
)


def asked(**fields: Any) -> Sampling:
    """Return the sampling parameters that a site gets for a chat with these fields."""
    response, script = chat(**fields)
    assert response.status_code == 200, response.text
    return script.query.sampling


def turns(*messages: dict[str, Any]) -> tuple[Message, ...]:
    response, script = chat(messages=list(messages))
    assert response.status_code == 200, response.text
    prompt = script.query.prompt
    assert isinstance(prompt, Chat)
    return prompt.messages


# ---- model and messages ----


@pytest.mark.parametrize("model", [None, ""])
def test_a_model_is_required(model: str | None) -> None:
    error = refused("model", model=model)
    if model is None:
        assert error["code"] == "missing_required_parameter"


@pytest.mark.parametrize("messages", [None, [], "Hi", {"role": "user"}])
def test_messages_are_a_list_of_at_least_one(messages: Any) -> None:
    refused("messages", messages=messages)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_five_roles_are_accepted(role: str) -> None:
    (turn,) = turns({"role": role, "content": "x", "tool_call_id": "call_1", "name": "Ann"})
    assert (turn.role, turn.content, turn.name) == (role, "x", "Ann")
    assert turn.tool_call_id == ("call_1" if role == "tool" else "")


@pytest.mark.parametrize("role", ["function", "User", 1, None])
def test_other_roles_are_refused(role: Any) -> None:
    refused("messages.0.role", messages=[{"role": role, "content": "x"}])


def test_a_tool_message_names_its_call() -> None:
    refused("messages.0.tool_call_id", messages=[{"role": "tool", "content": "x"}])


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert turns({"role": "user", "content": parts})[0].content == "one two"


@pytest.mark.parametrize("kind", ["image", "input_audio", "file"])
def test_parts_of_other_kinds_are_refused_by_name(kind: str) -> None:
    content = [{"type": "text", "text": "x"}, {"type": kind, kind: {}}]
    error = refused("messages.0.content.1.type", messages=[{"role": "user", "content": content}])
    assert kind in error["message"]


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (5, "messages.0.content"),
        (None, "messages.0.content"),
        (["x"], "messages.0.content.0"),
        ([{"type": "text"}], "messages.0.content.0.text"),
        ([{"text": "x"}], "messages.0.content.0.type"),
    ],
)
def test_content_of_another_kind_is_refused(content: Any, param: str) -> None:
    refused(param, messages=[{"role": "user", "content": content}])


def test_an_assistant_message_may_consist_of_tool_calls_alone() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turn = turns({"role": "assistant", "content": None, "tool_calls": [call | {"index": 0}]})[0]
    assert turn.content == ""
    assert turn.tool_calls_json == (
        '[{"id":"call_1","type":"function","function":{"name":"add","arguments":"{\\"a\\": 1}"}}]'
    )


@pytest.mark.parametrize(
    "refusing",
    [
        {"content": None, "refusal": "I can't help."},  # as an answer is, sent back as it came
        {"content": [{"type": "refusal", "refusal": "I can't help."}]},
    ],
)
def test_an_assistant_message_may_be_a_refusal(refusing: dict[str, Any]) -> None:
    assert turns({"role": "assistant", **refusing})[0].content == "I can't help."


def test_a_call_of_a_custom_tool_becomes_one_of_a_function_of_one_text() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": 'a "b"'}}
    turn = turns({"role": "assistant", "tool_calls": [call]})[0]
    [read] = json.loads(turn.tool_calls_json)
    assert read["function"]["name"] == "patch"
    assert json.loads(read["function"]["arguments"]) == {"input": 'a "b"'}


@pytest.mark.parametrize(
    ("call", "param"),
    [
        ({}, "messages.0.tool_calls.0.id"),
        ({"id": "c", "type": "function"}, "messages.0.tool_calls.0.function"),
        ({"id": "c", "type": "other", "function": {"name": "f"}}, "messages.0.tool_calls.0.type"),
        ({"id": "c", "type": "custom", "function": {"name": "f"}}, "messages.0.tool_calls.0.custom"),
        ({"id": "c", "type": "function", "function": {"name": 1}}, "messages.0.tool_calls.0.function.name"),
        ("x", "messages.0.tool_calls.0"),
    ],
)
def test_a_malformed_tool_call_is_refused(call: Any, param: str) -> None:
    refused(param, messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])


# ---- lengths ----


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert asked(max_tokens=5, max_completion_tokens=9).max_tokens == 9
    assert asked(max_tokens=5).max_tokens == 5


def test_without_a_limit_the_context_is_the_limit() -> None:
    assert asked().max_tokens is None


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_limit_over_the_context_is_refused_by_its_name(field: str) -> None:
    error = refused(field, **{field: 1025})
    assert "1025" in error["message"] and "1024" in error["message"]
    assert asked(**{field: 1024}).max_tokens == 1024


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_is_refused_with_both_numbers(stream: bool) -> None:
    too_long = ContextTooLong("The prompt has 1100 tokens, the context 1024.", param="messages")
    response, _ = chat(fail(too_long), stream=stream)
    error = error_of(response, 400)
    assert error["code"] == "context_length_exceeded"
    assert "1100" in error["message"] and "1024" in error["message"]


def bounded_chat(messages: list[dict[str, Any]]) -> tuple[httpx2.Response, Script]:
    """A chat with a model whose context holds at most 2,000 characters."""
    models = [replace(model, max_prompt_chars=2000) for model in MODELS]
    return post("/v1/chat/completions", chat_body(messages=messages), models=lambda: models)


def test_a_prompt_that_fits_no_context_is_refused_unread() -> None:
    for fields in ({"content": "x" * 2001}, {"content": [{"type": "text", "text": "x" * 1001}] * 2}):
        messages = [{"role": "user", **fields}]
        response, script = bounded_chat(messages)
        error = error_of(response, 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert "2000" in error["message"] and "1024" in error["message"]
        assert not script.queries


def test_what_a_template_may_leave_out_counts_nothing_towards_that() -> None:
    said = {"role": "assistant", "content": "y" * 5000}
    padded = {"role": "user", "content": " " * 3000 + "x" * 1999 + "\n" * 3000}
    for messages in ([said, padded], [padded]):
        response, _ = bounded_chat(messages)
        assert response.status_code == 200, response.text


def test_token_ids_beyond_the_context_are_refused_unread() -> None:
    response, script = text(prompt=[5] * 1024)
    assert error_of(response, 400)["code"] == "context_length_exceeded"
    assert not script.queries
    response, _ = text(prompt=[5] * 1023)
    assert response.status_code == 200, response.text


# ---- sampling ----

RANGES = [
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("min_p", 0, 1),
    ("n", 1, 128),
]


@pytest.mark.parametrize(("field", "low", "high"), RANGES)
def test_sampling_ranges_hold_at_both_ends(field: str, low: float, high: float) -> None:
    for value in (low, high):
        assert getattr(asked(**{field: value}), field) == value
    for value in (low - 1, high + 1, -1e300, 10**400):
        refused(field, **{field: value})


UNSAID = Sampling(left_out=MODEL_DEFAULTS)
"""The sampling of a request that has no field of it."""


def test_sampling_that_is_left_out_is_left_to_the_model_else_openais() -> None:
    assert asked() == UNSAID
    assert asked(temperature=None, top_p=0.5, stop="a") == Sampling(
        top_p=0.5, stop=("a",), left_out=tuple(name for name in MODEL_DEFAULTS if name != "top_p")
    )
    neutral = {name: getattr(Sampling(), name) for name in MODEL_DEFAULTS}
    assert asked(**neutral) == Sampling()


def test_seeds_reach_the_site_unchanged() -> None:
    assert asked(seed=42).seed == 42
    assert asked(seed=2**64 - 1).seed == 2**64 - 1
    refused("seed", seed=2**64)


def test_a_negative_seed_is_a_distinct_seed() -> None:
    assert asked(seed=-1).seed == 2**64 - 1


def test_the_fingerprint_names_the_model_revision() -> None:
    response, _ = chat()
    assert response.json()["system_fingerprint"] == "rev-1"


@pytest.mark.parametrize(
    ("stop", "read"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), (list("abcd"), tuple("abcd")), (None, ()), ([], ())],
)
def test_stop_is_a_text_or_up_to_four(stop: Any, read: tuple[str, ...]) -> None:
    assert asked(stop=stop).stop == read


@pytest.mark.parametrize(
    ("stop", "param"),
    [
        (list("abcde"), "stop"),
        (5, "stop"),
        ("", "stop.0"),
        (["a", 5], "stop.1"),
        (["a" * MAX_STOP_CHARS, "b" * (MAX_STOP_CHARS + 1)], "stop.1"),
    ],
)
def test_malformed_stops_are_refused(stop: Any, param: str) -> None:
    refused(param, stop=stop)


def test_logprobs_are_read_within_their_bounds() -> None:
    assert asked(logprobs=True).logprobs == 0
    assert asked(logprobs=True, top_logprobs=20).logprobs == 20
    assert asked(logprobs=False).logprobs is None
    refused("top_logprobs", top_logprobs=3)
    refused("top_logprobs", logprobs=True, top_logprobs=21)
    refused("logprobs", logprobs=1)


def test_stream_options_need_a_stream() -> None:
    refused("stream_options", stream_options={"include_usage": True})
    refused("stream_options.include_usage", stream=True, stream_options={"include_usage": "yes"})


# ---- what is refused, what is taken ----


def test_a_text_response_format_changes_nothing() -> None:
    assert asked(response_format={"type": "text"}) == UNSAID


REFUSED = {
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "modalities": ["text", "audio"],
    "audio": {"voice": "x"},
    "prediction": {"type": "content", "content": "x"},
    "web_search_options": {"search_context_size": "low"},
    "moderation": {"model": "omni-moderation-latest"},
    "guided_json": {"type": "object"},
    "structured_outputs": {"regex": "a+"},
    "use_beam_search": True,
}


@pytest.mark.parametrize("field", REFUSED)
def test_fields_that_cannot_be_honoured_are_refused(field: str) -> None:
    refused(field, **{field: REFUSED[field]})
    assert asked(**{field: None}) == UNSAID


def test_an_empty_object_asks_for_a_search_too() -> None:
    refused("web_search_options", web_search_options={})


@pytest.mark.parametrize("field", ["audio", "function_call"])
def test_what_an_assistant_said_is_read_or_refused(field: str) -> None:
    said = {"role": "assistant", "content": "x"}
    asked(messages=[said | {field: None}])
    refused(f"messages.0.{field}", messages=[said | {field: {"id": "a", "name": "f", "arguments": "{}"}}])


def test_fields_without_effect_are_accepted() -> None:
    fields = {
        "user": "u-1",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "parallel_tool_calls": False,
        "modalities": ["text"],
    }
    assert asked(**fields) == UNSAID


def test_vllms_sampling_extras_are_honoured() -> None:
    extras = {
        "ignore_eos": True,
        "min_tokens": 3,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "stop_token_ids": [1, 2.0],
        "logit_bias": {"17": -100, "18": 1.5},
    }
    read = asked(max_tokens=5, **extras)
    assert (read.ignore_eos, read.min_tokens, read.top_k, read.min_p) == (True, 3, 40, 0.05)
    assert (read.repetition_penalty, read.stop_token_ids) == (1.1, (1, 2))
    assert read.logit_bias == {17: -100.0, 18: 1.5}


def test_priority_is_read_and_top_k_minus_one_is_off() -> None:
    _, script = chat(priority=3, top_k=-1)
    assert script.query.priority == 3
    assert script.query.sampling.top_k == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {str(t): 0 for t in range(1025)}}, "logit_bias"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"priority": 2**31}, "priority"),
    ],
)
def test_sampling_extras_out_of_bounds_are_refused(fields: dict[str, Any], param: str) -> None:
    refused(param, **fields)


def test_usage_counts_the_prompt_once_and_sums_the_choices() -> None:
    response, _ = chat(n=3)
    completion = ChatCompletion.model_validate(response.json(), strict=True)
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (7, 6)


def test_suffix_and_best_of_are_refused() -> None:
    for field, value in (("suffix", "end"), ("best_of", 2)):
        response, script = text(**{field: value})
        assert error_of(response, 400)["param"] == field
        assert not script.queries
    assert text(best_of=2, n=2)[0].status_code == 200


def test_a_query_carries_caller_times_and_trace() -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    async def with_trace(edge: Edge) -> None:
        await edge.post("/v1/completions", {"model": MODEL, "prompt": "x"}, traceparent=traceparent)

    query = run(with_trace, clock=lambda: 50.0, timeout_s=9.0).query
    assert (query.caller.tenant, query.received_s, query.deadline_s) == ("tenant-1", 50.0, 59.0)
    assert query.traceparent == traceparent
    assert post("/v1/completions", {"model": MODEL, "prompt": "x"})[1].query.traceparent == ""
