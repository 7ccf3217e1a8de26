"""Answers in the channels of gpt-oss models: what is reasoning, text or a call, and what a grammar allows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from site_engine.core.request import Output, merge_tool_calls
from site_engine.engine_client import Delivered
from site_engine.federation.attempts import _Choice, separate_calls
from site_engine.messages import ToolChoice, Tools
from site_engine.text.parsed_answer import NOTHING, ParsedAnswer
from site_engine.text.tool_call_parser import answer_parser
from site_engine.text.tool_format import HARMONY
from tests.unit.site_tools_test import NOW, WHERE, follows, prepare, prompts

THOUGHT = "<|channel|>analysis<|message|>Where is it?<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.where <|constrain|>json<|message|>{"city": "Oslo"}'
FINAL = "<|channel|>final<|message|>"
FUNCTIONS: dict[str, Any] = {"where": {}, "now": {}}


def read(text: str, delivered: Delivered = NOTHING) -> tuple[str, str, list[tuple[str, str]]]:
    """The reasoning, the text and the calls of an answer, the same in one part and by characters."""
    results = []
    for parts in ([text], list(text)):
        parser = answer_parser(
            HARMONY, FUNCTIONS, ParsedAnswer(single=False, new_id=str, delivered=delivered)
        )
        heard = [*map(parser.feed, parts), parser.end()]
        calls = merge_tool_calls(call for each in heard for call in each.calls)
        reasoning, told = ("".join(getattr(each, what) for each in heard) for what in ("reasoning", "text"))
        results.append((reasoning, told, [(call.name, call.arguments) for call in calls]))
    assert results[0] == results[1]
    return results[0]


@pytest.mark.parametrize(
    ("answer", "reasoning", "text"),
    [
        (f"{THOUGHT}{FINAL}There.", "Where is it?", "There."),
        (f"{FINAL}There.<|return|>", "", "There."),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + FINAL + "There.",
            "",
            "I look.There.",
        ),
        ("<|channel|>analysis<|message|>It is <|call|> or <|chan", "It is <|call|> or <|chan", ""),
        ("<|channel|>analysis to=python<|message|>print(1)", "print(1)", ""),
        ("<|channel|>commentary to=assistant<|channel|>analysis<|message|>Hm.", "Hm.", ""),
        ("<|channel|>??<|end|><|start|>assistant<|channel|>final<|message|>There.", "", "There."),
        (f"{THOUGHT} to=functions.where<|channel|>commentary <|constr", "Where is it?", ""),
        ('<|channel|>final {"a": 1}', "", '{"a": 1}'),
        ("Just text, <|end| and all.", "", "Just text, <|end| and all."),
        (
            f"{FINAL}{json.dumps({'name': 'where', 'arguments': {}})}",
            "",
            '{"name": "where", "arguments": {}}',
        ),
        ("<|channel|>commentary to=functions.other<|message|>{}", "", "{}"),
        ("x" * 300 + FINAL, "", "x" * 300 + FINAL),
        ("<|start|>" + "x" * 300, "", "x" * 300),
        (f"{FINAL}There.<|start|>{'x' * 300}<|end|>{FINAL}Or not.", "", f"There.{'x' * 300}Or not."),
        ("<|channel|>" + "<ab" * 60 + "!", "", "<|channel|>" + "<ab" * 60 + "!"),
    ],
)
def test_channels_tell_reasoning_from_text(answer: str, reasoning: str, text: str) -> None:
    assert read(answer) == (reasoning, text, [])


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        CALL + "<|call|>",
        CALL + "<|end|>",
        ' to=functions.where<|channel|>commentary json<|message|>{"city": "Oslo"}',
        '<|channel|>analysis to=functions.where<|message|>{"city": "Oslo"}',
        '<|channel|>commentary to=where<|constrain|>json<|message|> {"city": "Oslo"}\n',
        '<|channel|>commentary to=functions.where<|message|>"{\\"city\\": \\"Oslo\\"}"<|call|>',
    ],
)
def test_a_recipient_makes_a_message_a_call(call: str) -> None:
    expected = json.loads('{"city": "Oslo"}')
    for before, reasoning in (("", ""), (THOUGHT, "Where is it?")):
        thought, text, [(name, arguments)] = read(before + call)
        assert (thought, text, name, json.loads(arguments)) == (reasoning, "", "where", expected)


def test_a_call_may_have_marks_in_its_texts() -> None:
    arguments = json.dumps({"city": "<|call|> and <|start|>assistant<|channel|>final<|message|>"})
    assert read(f"<|channel|>commentary to=functions.where<|message|>{arguments}<|call|>") == (
        "",
        "",
        [("where", arguments)],
    )


def test_a_call_without_arguments_has_an_empty_object_of_them() -> None:
    assert read("<|channel|>commentary to=functions.now<|message|><|call|>") == ("", "", [("now", "{}")])


def test_messages_after_a_call_are_read() -> None:
    assert read(f"{THOUGHT}{CALL}<|call|><|start|>assistant{FINAL}Done") == (
        "Where is it?",
        "Done",
        [("where", '{"city": "Oslo"}')],
    )


def test_a_resumed_answer_leaves_out_the_reasoning_that_was_delivered() -> None:
    whole = f"{THOUGHT}{FINAL}There."
    assert read(whole, Delivered(reasoning_chars=6)) == ("is it?", "There.", [])
    assert read(whole, Delivered(chars=2, reasoning_chars=12)) == ("", "ere.", [])


def test_an_answer_is_read_in_channels_without_tools_too() -> None:
    prepared = prepare("harmony", None)
    assert prepared.tool_calling is not None
    assert set(prepared.shown.values()) == set(HARMONY.marks)
    assert "resume_chat" not in prompts("harmony").features
    assert "resume_chat" in prompts("hermes").features


def test_a_model_may_think_before_what_it_is_held_to() -> None:
    forced = prepare("harmony", Tools((WHERE, NOW), ToolChoice.NAMED, "where"))
    for thought in ("", THOUGHT):
        assert follows(forced, "harmony", thought + CALL)
        assert not follows(forced, "harmony", thought + FINAL)
    answer = prepare("harmony", None, schema='{"type": "integer"}')
    assert follows(answer, "harmony", f"{THOUGHT}{FINAL}12")
    assert not follows(answer, "harmony", f"{FINAL}twelve")
    either = prepare("harmony", Tools((WHERE,)), schema='{"type": "integer"}')
    assert follows(either, "harmony", THOUGHT + CALL)
    assert follows(either, "harmony", f"{FINAL}12")
    assert not follows(either, "harmony", THOUGHT + CALL.replace("Oslo", "Bonn"))


def test_reasoning_is_counted_up_to_its_last_token() -> None:
    choice = _Choice("r")
    parser = answer_parser(HARMONY, {}, ParsedAnswer(single=False, new_id=str))
    parts = ["<|channel|>analysis<|message|>Where", " is it?", "<|end|><|start|>assistant" + FINAL, "There."]
    heard = [
        separate_calls(choice, parser, Output("r", part, (7,), completion_tokens=number))
        for number, part in enumerate(parts, start=1)
    ]
    assert [(each.reasoning, each.text) for each in heard] == [
        ("Where", ""),
        (" is it?", ""),
        ("", ""),
        ("", "There."),
    ]
    assert [each.reasoning_tokens for each in heard] == [1, 2, 2, 2]
