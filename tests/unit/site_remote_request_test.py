"""The HTTP request of an attempt."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gateway.openai.sampling import MODEL_DEFAULTS
from site_engine import messages as m
from site_engine.core.remaining_curve import RemainingCurve
from site_engine.core.request import Lane, Sampling
from site_engine.errors import NotServed, Reason
from site_engine.messages import ToolChoice, Tools
from site_engine.remote.dialects import (
    DIALECTS,
    LLAMA_CPP,
    MICO,
    OLLAMA,
    SGLANG,
    TEI,
    TGI,
    UNKNOWN,
    VLLM,
    Dialect,
)
from site_engine.remote.request import build_request, guess_tokens

HI = (m.ChatMessage("user", "hi"),)


def assign(prompt: m.Prompt, sampling: Sampling | None = None, **more: Any) -> m.Assign:
    settings: dict[str, Any] = {"choices": 1, "echo": False, **more}
    return m.Assign(
        attempt_id="a",
        query_id="q",
        model="ours",
        prompt=prompt,
        sampling=sampling or Sampling(),
        remaining=RemainingCurve(),
        lane=Lane.CHAT,
        priority=0,
        deadline_s=None,
        tenant="t",
        **settings,
    )


UNSAID = Sampling(left_out=frozenset(MODEL_DEFAULTS))
"""The sampling of a client that gave none."""
_HEAD = '{"model":"theirs","stream":true,"stream_options":{"include_usage":true'
_CHAT = '"messages":[{"role":"user","content":"hi"}]}'
_OPENAI_OFF = '"temperature":1.0,"top_p":1.0,"presence_penalty":0.0,"frequency_penalty":0.0,'
_VLLM_OFF = '"top_k":-1,"min_p":0.0,"repetition_penalty":1.0,'
RECORDED = {
    VLLM.name: (VLLM, ',"continuous_usage_stats":true},', _OPENAI_OFF + _VLLM_OFF),
    SGLANG.name: (SGLANG, ',"continuous_usage_stats":true},', _OPENAI_OFF + _VLLM_OFF),
    LLAMA_CPP.name: (LLAMA_CPP, "},", _OPENAI_OFF + '"top_k":-1,"min_p":0.0,'),
    TGI.name: (TGI, "},", '"temperature":1.0,"frequency_penalty":0.0,'),
    TEI.name: (TEI, "},", _OPENAI_OFF),
    OLLAMA.name: (OLLAMA, "},", _OPENAI_OFF),
    MICO.name: (MICO, "},", _OPENAI_OFF + _VLLM_OFF),
    UNKNOWN.name: (UNKNOWN, "},", _OPENAI_OFF),
}
"""How each dialect's body goes on after _HEAD, and the fields of sampling that is all turned off."""


def as_sent(assigned: m.Assign, dialect: Dialect) -> str:
    return json.dumps(build_request(assigned, "theirs", dialect).body, separators=(",", ":"))


@pytest.mark.parametrize("name", RECORDED)
def test_a_server_is_told_only_what_the_client_gave(name: str) -> None:
    dialect, usage, off = RECORDED[name]
    assert as_sent(assign(m.ChatPrompt(HI), UNSAID), dialect) == _HEAD + usage + _CHAT
    assert as_sent(assign(m.TextPrompt("hi"), UNSAID), dialect) == _HEAD + usage + '"prompt":"hi"}'
    assert as_sent(assign(m.ChatPrompt(HI), Sampling()), dialect) == _HEAD + usage + off + _CHAT
    cold = replace(UNSAID, temperature=0.0, left_out=UNSAID.left_out - {"temperature"})
    assert as_sent(assign(m.ChatPrompt(HI), cold), dialect) == f'{_HEAD}{usage}"temperature":0.0,{_CHAT}'


def test_every_dialect_has_recorded_bodies() -> None:
    assert RECORDED.keys() == {each.name for each in (*DIALECTS, UNKNOWN)}


def test_images_are_sent_as_they_came_and_count_by_the_gateways_guess() -> None:
    parts = [
        {"type": "text", "text": "hi"},
        {"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}},
    ]
    shown = assign(m.ChatPrompt((m.ChatMessage("user", "hi", parts=parts),)), image_tokens=64)
    _, body, *_ = build_request(shown, "theirs", VLLM)
    assert body["messages"] == [{"role": "user", "content": parts}]
    assert guess_tokens(shown) == guess_tokens(assign(m.ChatPrompt(HI))) + 64


def test_a_chat_keeps_its_turns() -> None:
    turns = (
        m.ChatMessage("user", "hi", name="ann"),
        m.ChatMessage("assistant", "", tool_calls_json='[{"id": "1"}]'),
        m.ChatMessage("tool", "42", tool_call_id="1"),
    )
    sampling = Sampling(max_tokens=5, stop=("a",), seed=3, logit_bias={7: 1.5}, logprobs=2, top_k=4)
    path, body, *_ = build_request(assign(m.ChatPrompt(turns), sampling, choices=2), "theirs", VLLM)
    assert path == "/v1/chat/completions"
    assert [each["role"] for each in body["messages"]] == ["user", "assistant", "tool"]
    assert body["messages"][1]["tool_calls"] == [{"id": "1"}]
    passed = {name: body[name] for name in ("n", "max_tokens", "stop", "seed", "logit_bias", "top_k")}
    assert passed == {
        "n": 2,
        "max_tokens": 5,
        "stop": ["a"],
        "seed": 3,
        "logit_bias": {"7": 1.5},
        "top_k": 4,
    }
    assert (body["logprobs"], body["top_logprobs"]) == (True, 2)


@pytest.mark.parametrize(
    ("attempt", "param"),
    [
        (assign(m.TextPrompt("a"), Sampling(top_k=3)), "top_k"),
        (assign(m.TextPrompt("a"), Sampling(ignore_eos=True)), "ignore_eos"),
        (assign(m.TextPrompt("a"), Sampling(logprobs=1)), "logprobs"),
        (assign(m.TokenPrompt((1,)), echo=True), "echo"),
        (assign(m.TextPrompt("a"), resumed=(1,), resumed_chars=1), ""),
    ],
)
def test_what_it_could_not_honour_is_refused_with_the_field(attempt: m.Assign, param: str) -> None:
    with pytest.raises(NotServed) as refusal:
        build_request(attempt, "theirs", UNKNOWN)
    assert (refusal.value.reason, refusal.value.param) == (Reason.UNSUPPORTED, param)


ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("attempt", "param"),
    [
        (assign(m.ChatPrompt(HI), choices=2), "n"),
        (assign(m.ChatPrompt(HI), Sampling(logit_bias={1: 1.0})), "logit_bias"),
        (assign(m.ChatPrompt(HI, Tools((ADD,), ToolChoice.REQUIRED))), "tool_choice"),
        (assign(m.ChatPrompt(HI, Tools((ADD,), ToolChoice.NAMED, "add"))), "tool_choice"),
        (assign(m.ChatPrompt(HI, Tools((ADD,), single=True))), "parallel_tool_calls"),
        (assign(m.TokenPrompt((1, 2))), "prompt"),
    ],
)
def test_what_ollama_would_drop_silently_is_refused_with_the_field(attempt: m.Assign, param: str) -> None:
    with pytest.raises(NotServed, match="not honoured by this server") as refusal:
        build_request(attempt, "theirs", OLLAMA)
    assert (refusal.value.reason, refusal.value.param) == (Reason.UNSUPPORTED, param)
    build_request(attempt, "theirs", VLLM)


def test_ollama_gets_tools_and_schemas_in_openais_fields() -> None:
    asked = assign(m.ChatPrompt(HI, Tools((ADD,))), guided_json='{"type":"object","title":"x"}')
    body = build_request(asked, "theirs", OLLAMA).body
    assert (body["tools"], body["tool_choice"]) == ([ADD], "auto")
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object", "title": "x"}


@pytest.mark.parametrize("prompt", [m.ChatPrompt(HI), m.TextPrompt("Once")])
def test_ollama_goes_on_with_nothing_begun_elsewhere(prompt: m.Prompt) -> None:
    with pytest.raises(NotServed, match="goes on with no answer"):
        build_request(begun(prompt, "Hello th"), "theirs", OLLAMA)
    assert not {"resume_text", "resume_chat"} & set(OLLAMA.features)


def begun(prompt: m.Prompt, text: str, sampling: Sampling | None = None, **more: Any) -> m.Assign:
    """An answer of which the client has a text of three tokens."""
    delivered = {"resumed_text": text, "resumed_chars": len(text), "resumed_tokens": 3}
    return assign(prompt, sampling, **{**delivered, **more})


def test_a_text_goes_on_after_what_was_delivered() -> None:
    sampling = Sampling(max_tokens=10, min_tokens=5)
    path, body, delivered, _ = build_request(begun(m.TextPrompt("Once"), " upon a", sampling), "theirs", VLLM)
    assert (path, delivered) == ("/v1/completions", 3)
    assert (body["prompt"], body["max_tokens"], body["min_tokens"]) == ("Once upon a", 7, 2)
    assert "continue_final_message" not in body


@pytest.mark.parametrize("dialect", [VLLM, SGLANG, LLAMA_CPP])
def test_a_chat_goes_on_in_the_servers_own_way(dialect: Dialect) -> None:
    path, body, delivered, _ = build_request(begun(m.ChatPrompt(HI), "Hello th"), "theirs", dialect)
    assert (path, delivered) == ("/v1/chat/completions", 3)
    assert body["messages"][-1] == {"role": "assistant", "content": "Hello th"}
    own = (body.get("continue_final_message"), body.get("add_generation_prompt"))
    asked = (None, None) if dialect is LLAMA_CPP else (True, False)
    assert own == asked


def test_an_answer_of_which_the_client_has_nothing_begins_anew() -> None:
    attempt = assign(m.ChatPrompt(HI), Sampling(max_tokens=9), resumed=(1, 2), resumed_tokens=2)
    _, body, delivered, _ = build_request(attempt, "theirs", UNKNOWN)
    assert (len(body["messages"]), body["max_tokens"], delivered) == (1, 9, 0)


@pytest.mark.parametrize(
    ("attempt", "why"),
    [
        (begun(m.ChatPrompt(HI), "Hello", resumed_text="Hel"), "more than text"),
        (begun(m.ChatPrompt(HI), "Hello", resumed_calls=1), "more than text"),
        (begun(m.TokenPrompt((1,)), "Hello"), "token ids"),
        (begun(m.ChatPrompt(HI, Tools(({"type": "function"},))), "Hello"), "beginning of a call"),
        (begun(m.ChatPrompt(HI), "{", guided_json="{}"), "beginning of a call or of JSON"),
        (begun(m.ChatPrompt(HI), "Hello "), "white space"),
        (begun(m.TextPrompt("a"), "b", Sampling(presence_penalty=0.5)), "presence_penalty"),
        (begun(m.TextPrompt("a"), "b", Sampling(frequency_penalty=0.5)), "frequency_penalty"),
        (begun(m.TextPrompt("a"), "b", Sampling(repetition_penalty=1.5)), "repetition_penalty"),
        (begun(m.TextPrompt("a"), "b", Sampling(seed=1)), "seed"),
        (begun(m.TextPrompt("a"), "b\n", Sampling(stop=("\n\n",))), "stop string"),
    ],
)
def test_what_would_show_at_the_seam_is_refused(attempt: m.Assign, why: str) -> None:
    with pytest.raises(NotServed, match=why) as refusal:
        build_request(attempt, "theirs", VLLM)
    assert refusal.value.reason is Reason.UNSUPPORTED


def test_a_chat_is_not_continued_where_nobody_knows_how() -> None:
    assert build_request(begun(m.TextPrompt("a"), "b"), "theirs", UNKNOWN).body["prompt"] == "ab"
    with pytest.raises(NotServed, match="not known to continue"):
        build_request(begun(m.ChatPrompt(HI), "b"), "theirs", UNKNOWN)


def test_a_greedy_answer_with_a_seed_goes_on() -> None:
    attempt = begun(m.TextPrompt("a"), "b", Sampling(seed=1, temperature=0.0))
    assert build_request(attempt, "theirs", UNKNOWN).body["prompt"] == "ab"


def test_a_top_p_that_is_off_is_not_told_to_tgi_which_refuses_it() -> None:
    for top_p, told in ((1.0, None), (0.9, 0.9)):
        attempt = assign(m.TextPrompt("abc"), sampling=Sampling(top_p=top_p))
        assert build_request(attempt, "m", TGI).body.get("top_p") == told
    assert build_request(assign(m.TextPrompt("abc")), "m", VLLM).body["top_p"] == 1.0


@pytest.mark.parametrize(
    ("prompt", "more", "param"),
    [
        (m.ChatPrompt(HI), {"choices": 2}, "n"),
        (m.ChatPrompt(HI), {"sampling": Sampling(logit_bias={7: -100.0})}, "logit_bias"),
        (m.ChatPrompt(HI), {"sampling": Sampling(presence_penalty=0.5)}, "presence_penalty"),
        (m.TokenPrompt((1, 2)), {}, "prompt"),
    ],
)
def test_what_tgi_misreads_or_answers_without_goes_to_another_site(
    prompt: m.Prompt, more: dict[str, Any], param: str
) -> None:
    """It makes a penalty of repetition of a presence penalty, plus 2, and one choice whatever `n` says."""
    with pytest.raises(NotServed) as refused:
        build_request(assign(prompt, **more), "m", TGI)
    assert (refused.value.reason, refused.value.param) == (Reason.UNSUPPORTED, param)


def test_servers_honour_different_fields() -> None:
    attempt = assign(m.TextPrompt("a"), Sampling(repetition_penalty=1.1))
    assert build_request(attempt, "theirs", VLLM).body["repetition_penalty"] == 1.1
    with pytest.raises(NotServed):
        build_request(attempt, "theirs", LLAMA_CPP)


ADD = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("tools", "passed"),
    [
        (Tools((ADD,)), {"tools": [ADD], "tool_choice": "auto"}),
        (
            Tools((ADD,), ToolChoice.REQUIRED, single=True),
            {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            Tools((ADD,), ToolChoice.NAMED, "add"),
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}},
        ),
    ],
)
def test_tools_are_passed_on_in_the_servers_own_fields(tools: Tools, passed: dict[str, Any]) -> None:
    body = build_request(assign(m.ChatPrompt(HI, tools)), "theirs", VLLM).body
    assert passed.items() <= body.items()
    with pytest.raises(NotServed) as refusal:
        build_request(assign(m.ChatPrompt(HI, tools)), "theirs", UNKNOWN)
    assert (refusal.value.reason, refusal.value.param) == (Reason.UNSUPPORTED, "tools")


def test_a_schema_is_passed_on_where_it_is_honoured() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    body = build_request(assign(m.ChatPrompt(HI), guided_json=json.dumps(schema)), "theirs", VLLM).body
    assert body["response_format"]["json_schema"]["schema"] == schema
    assert body["response_format"]["json_schema"]["strict"] is True
    any_object = assign(m.ChatPrompt(HI), guided_json='{"type":"object"}')
    assert build_request(any_object, "theirs", VLLM).body["response_format"] == {"type": "json_object"}
    with pytest.raises(NotServed) as refusal:
        build_request(any_object, "theirs", UNKNOWN)
    assert (refusal.value.reason, refusal.value.param) == (Reason.UNSUPPORTED, "response_format")


OFF = {"enable_thinking": False, "thinking": False}


@pytest.mark.parametrize(
    ("dialect", "effort", "fields"),
    [
        (VLLM, "none", {"reasoning_effort": "low", "chat_template_kwargs": OFF}),
        (SGLANG, "minimal", {"reasoning_effort": "low", "chat_template_kwargs": OFF}),
        (VLLM, "xhigh", {"reasoning_effort": "high"}),
        (LLAMA_CPP, "none", {"chat_template_kwargs": OFF | {"reasoning_effort": "low"}}),
        (
            LLAMA_CPP,
            "medium",
            {
                "chat_template_kwargs": {
                    "enable_thinking": True,
                    "thinking": True,
                    "reasoning_effort": "medium",
                }
            },
        ),
        (MICO, "none", {"reasoning_effort": "none"}),
        (UNKNOWN, "minimal", {"reasoning_effort": "minimal"}),
        (TGI, "", {}),
        (VLLM, "", {}),
    ],
)
def test_an_effort_is_told_in_the_servers_own_way(
    dialect: Dialect, effort: str, fields: dict[str, Any]
) -> None:
    body = build_request(assign(m.ChatPrompt(HI, reasoning_effort=effort)), "theirs", dialect).body
    told = {name: body[name] for name in ("reasoning_effort", "chat_template_kwargs") if name in body}
    assert told == fields


@pytest.mark.parametrize("dialect", [VLLM, SGLANG, LLAMA_CPP, MICO])
def test_a_clients_own_arguments_of_the_template_win(dialect: Dialect) -> None:
    prompt = m.ChatPrompt(HI, template_kwargs={"enable_thinking": True, "a": [1]}, reasoning_effort="none")
    told = build_request(assign(prompt), "theirs", dialect).body["chat_template_kwargs"]
    assert (told["enable_thinking"], told["a"]) == (True, [1])
    assert "template_kwargs" in dialect.features


@pytest.mark.parametrize("dialect", [TGI, UNKNOWN])
def test_arguments_of_a_template_that_may_be_dropped_are_refused(dialect: Dialect) -> None:
    with pytest.raises(NotServed) as refusal:
        build_request(assign(m.ChatPrompt(HI, template_kwargs={"a": 1})), "theirs", dialect)
    assert (refusal.value.reason, refusal.value.param) == (Reason.UNSUPPORTED, "chat_template_kwargs")
    assert "template_kwargs" not in dialect.features


@pytest.mark.parametrize(
    ("dialect", "names"),
    [
        (VLLM, {"reasoning", "reasoning_content"}),
        (SGLANG, {"reasoning_content"}),
        (LLAMA_CPP, {"reasoning_content"}),
        (UNKNOWN, {"reasoning_content"}),
    ],
)
def test_earlier_reasoning_is_told_under_the_servers_own_name(dialect: Dialect, names: set[str]) -> None:
    turns = (*HI, m.ChatMessage("assistant", "42", reasoning="Six sevens."), *HI)
    told = build_request(assign(m.ChatPrompt(turns)), "theirs", dialect).body["messages"]
    assert told[1] == {"role": "assistant", "content": "42", **dict.fromkeys(names, "Six sevens.")}
    assert told[0] == {"role": "user", "content": "hi"}


def test_prompts_are_guessed_by_their_length() -> None:
    assert guess_tokens(assign(m.TextPrompt("x" * 40))) == 11
    assert guess_tokens(assign(m.TokenPrompt((1, 2, 3)))) == 3
    assert guess_tokens(assign(m.ChatPrompt((m.ChatMessage("user", "x" * 40),)))) == 14
