"""The API's promises about reasoning: its effort, the arguments of templates, reasoning of earlier turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.domain import Model
from gateway.prompt import Chat, Message
from tests.support.fakes.edge import MODEL, Edge, error_of, refused, run

REASONS = Model(MODEL, "rev-1", 1024, 1_700_000_000, "mico", frozenset({"chat", "template_kwargs"}))
QUESTION = {"role": "user", "content": "6 * 7?"}


def chat_at(path: str, body: dict[str, Any]) -> Chat:
    """Return the chat that a request becomes."""

    async def ask(edge: Edge) -> None:
        response = await edge.post(path, {"model": MODEL, **body})
        assert response.status_code == 200, response.text

    script = run(ask, models=lambda: (REASONS,))
    assert isinstance(script.query.prompt, Chat)
    return script.query.prompt


def chat(**fields: Any) -> Chat:
    return chat_at("/v1/chat/completions", {"messages": [QUESTION], **fields})


def response(**fields: Any) -> Chat:
    return chat_at("/v1/responses", {"input": "6 * 7?", **fields})


def message(**fields: Any) -> Chat:
    return chat_at("/v1/messages", {"messages": [QUESTION], "max_tokens": 9, **fields})


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh"])
def test_an_effort_reaches_the_site(effort: str) -> None:
    assert chat(reasoning_effort=effort).reasoning_effort == effort
    assert response(reasoning={"effort": effort}).reasoning_effort == effort


def test_the_greatest_effort_of_openai_is_the_greatest_that_sites_know() -> None:
    assert chat(reasoning_effort="max").reasoning_effort == "xhigh"
    assert response(reasoning={"effort": "max"}).reasoning_effort == "xhigh"


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, ""),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "medium"),
        ({"thinking": {"type": "adaptive"}}, ""),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "xhigh"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "none"),
        ({"output_config": {"effort": "low"}}, "low"),
    ],
)
def test_thinking_is_an_effort(fields: dict[str, Any], effort: str) -> None:
    assert message(**fields).reasoning_effort == effort


@pytest.mark.parametrize("ask", [chat, response])
def test_arguments_of_the_template_reach_the_site(ask: Callable[..., Chat]) -> None:
    kwargs = {"enable_thinking": False, "names": ["a", {"b": 1}]}
    assert json.loads(ask(chat_template_kwargs=kwargs).template_kwargs_json) == kwargs
    assert ask(chat_template_kwargs={}).template_kwargs_json == ""
    assert ask(chat_template_kwargs=None).template_kwargs_json == ""


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("reasoning_effort", {"reasoning_effort": "enormous"}),
        ("chat_template_kwargs", {"chat_template_kwargs": [1]}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"a": "x" * 70_000}}),
        ("chat_template_kwargs.chat_template", {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
        ("chat_template", {"chat_template": "{{ 1 }}"}),
        ("include_reasoning", {"include_reasoning": False}),
        ("separate_reasoning", {"separate_reasoning": False}),
        ("cache_salt", {"cache_salt": "x"}),
        ("mm_processor_kwargs", {"mm_processor_kwargs": {"fps": 1}}),
    ],
)
def test_what_would_have_no_effect_is_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    refused(param, **fields)


def test_reasoning_that_is_included_anyway_may_be_asked_for() -> None:
    assert chat(include_reasoning=True, separate_reasoning=True).messages


def test_a_model_whose_sites_take_no_arguments_of_the_template_is_named() -> None:
    async def ask(edge: Edge) -> None:
        kwargs = {"enable_thinking": False}
        answer = await edge.chat(chat_template_kwargs=kwargs)
        assert error_of(answer, 400)["param"] == "chat_template_kwargs"
        assert not edge.script.queries

    run(ask)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_chats_earlier_reasoning_reaches_the_site(name: str) -> None:
    turns = [QUESTION, {"role": "assistant", "content": "42", name: "Six sevens."}, QUESTION]
    assert chat(messages=turns).messages[1] == Message("assistant", "42", reasoning="Six sevens.")
    cut = [QUESTION, {"role": "assistant", "content": None, name: "Six"}, QUESTION]
    assert chat(messages=cut).messages[1] == Message("assistant", "", reasoning="Six")


def test_a_responses_earlier_reasoning_is_that_of_the_message_or_calls_behind_it() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    call = {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"}
    asked = response(
        input=[
            QUESTION,
            {**thought, "content": [{"type": "reasoning_text", "text": "Add."}], "encrypted_content": "x"},
            call,
            {"type": "function_call_output", "call_id": "a", "output": "42"},
            {**thought, "summary": [{"type": "summary_text", "text": "Done."}]},
            {"role": "assistant", "content": "Now "},
            call,
            {"type": "function_call_output", "call_id": "a", "output": "43"},
            {**thought, "content": None},
            {"role": "assistant", "content": "42"},
        ]
    )
    said = [(each.content, each.reasoning) for each in asked.messages if each.role == "assistant"]
    assert said == [("", "Add."), ("Now ", "Done."), ("42", "")]
    assert [bool(each.tool_calls_json) for each in asked.messages] == [0, 1, 0, 1, 0, 0]


def test_a_messages_earlier_thinking_reaches_the_site() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Six sevens.", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "42"},
    ]
    asked = message(messages=[QUESTION, {"role": "assistant", "content": blocks}, QUESTION])
    assert asked.messages[1] == Message("assistant", "42", reasoning="Six sevens.")
