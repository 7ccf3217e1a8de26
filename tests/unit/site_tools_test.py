"""Calls of functions at a site: known formats, grammars that force them, and separating them from text."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from site_engine import messages as m
from site_engine.core.remaining_curve import RemainingCurve
from site_engine.core.request import Lane, Sampling, ToolCall, merge_tool_calls
from site_engine.engine_client import Delivered, Prepared
from site_engine.errors import NotServed, Reason
from site_engine.messages import ToolChoice, Tools
from site_engine.text.grammar import Grammars
from site_engine.text.parsed_answer import ParsedAnswer
from site_engine.text.tokenize import PromptTokenizer
from site_engine.text.tool_call_parser import answer_parser
from site_engine.text.tool_format import (
    GLM,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN_XML,
    AnswerFormat,
    recognize,
)
from tests.support.tool_models import END, SPECIAL, TEMPLATES, tool_tokenizer

FORMATS = {form.name: form for form in (HERMES, QWEN_XML, GLM, MISTRAL, MISTRAL_ARGS, LLAMA, HARMONY)}
VOCABULARY = 300
WHERE = {
    "type": "function",
    "function": {
        "name": "where",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Oslo", "Rome"]}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ONE = {
    "hermes": '<tool_call>\n{"name": "where", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "mistral": '[TOOL_CALLS] [{"name": "where", "arguments": {"city": "Oslo"}}]',
    "mistral_args": '[TOOL_CALLS]where[ARGS]{"city": "Oslo"}',
    "llama": '{"name": "where", "parameters": {"city": "Oslo"}}',
    "qwen_xml": "<tool_call>\n<function=where>\n<parameter=city>\nOslo\n</parameter>\n</function>\n"
    "</tool_call>",
    "harmony": '<|channel|>commentary to=functions.where <|constrain|>json<|message|>{"city": "Oslo"}',
    "glm": "<tool_call>where\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>",
}
TWO = {
    "hermes": ONE["hermes"] + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "mistral": ONE["mistral"][:-1] + ', {"name": "now", "arguments": {}}]',
    "mistral_args": ONE["mistral_args"] + "[TOOL_CALLS]now[ARGS]{}",
    "llama": ONE["llama"] + '; {"name": "now", "parameters": {}}',
    "qwen_xml": ONE["qwen_xml"] + "\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "harmony": ONE["harmony"]
    + "<|call|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{}",
    "glm": ONE["glm"] + "\n<tool_call>now\n</tool_call>",
}
FUNCTIONS = {
    "where": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "near": {"type": ["array", "null"]},
        },
    },
    "now": {},
}


@cache
def prompts(name: str) -> PromptTokenizer:
    tokenizer = tool_tokenizer(name)
    grammars = Grammars(tokenizer, VOCABULARY, (tokenizer.eos_token_id,))
    return PromptTokenizer(tokenizer, VOCABULARY, lambda call: None, grammars)


def prepare(name: str, tools: Tools | None, *turns: m.ChatMessage, schema: str = "") -> Prepared:
    chat = m.ChatPrompt(turns or (m.ChatMessage("user", "hi"),), tools)
    assign = m.Assign(
        "a",
        "q",
        "m",
        chat,
        Sampling(),
        1,
        False,
        RemainingCurve(),
        Lane.CHAT,
        0,
        None,
        "",
        guided_json=schema,
    )
    return prompts(name).prepare_now(assign)


def follows(prepared: Prepared, name: str, text: str) -> bool:
    """Return whether the text is a complete answer by the grammar."""
    assert prepared.grammar is not None
    guide = prepared.grammar.start()
    ids = tool_tokenizer(name).encode(text, add_special_tokens=False)
    return all(guide.take(token_id) for token_id in ids) and guide.matcher.is_accepting()


def read(form: AnswerFormat, parts: list[str], **rules: Any) -> tuple[str, list[tuple[str, str, str]]]:
    """The text and the calls (id, name, arguments) of an answer that comes in these parts."""
    settings = {"single": False} | rules
    reader = answer_parser(form, FUNCTIONS, ParsedAnswer(new_id=lambda number: f"id{number}", **settings))
    heard = [*(reader.feed(part) for part in parts), reader.end()]
    calls = merge_tool_calls(news for each in heard for news in each.calls)
    return "".join(each.text for each in heard), [(call.id, call.name, call.arguments) for call in calls]


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_known_from_its_template(name: str) -> None:
    assert recognize(TEMPLATES[name]).form is FORMATS[name]
    assert "tools" in prompts(name).features


@pytest.mark.parametrize(
    ("name", "reason"),
    [("none", "chat template takes no tools"), ("deepseek", "teaches calls as DeepSeek does")],
)
def test_a_template_that_teaches_no_known_calls_is_refused_tools(name: str, reason: str) -> None:
    assert "tools" not in prompts(name).features
    with pytest.raises(NotServed, match=reason) as refused:
        prepare(name, Tools((NOW,)))
    assert (refused.value.reason, refused.value.param) == (Reason.UNSUPPORTED, "tools")
    prepare(name, None)


@pytest.mark.parametrize("name", FORMATS)
def test_the_template_gets_the_tools_and_arguments_as_objects(name: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "where", "arguments": '{"city": "Oslo"}'}}
    asked = m.ChatMessage("assistant", "", tool_calls_json=json.dumps([call]))
    answered = m.ChatMessage("tool", "north", tool_call_id="1")
    prepared = prepare(name, Tools((WHERE, NOW)), asked, answered)
    text = tool_tokenizer(name).decode(prepared.token_ids)
    assert json.dumps(NOW).rstrip("}") in text
    assert 'CALL where {"city": "Oslo"}' in text
    assert "<|tool|>north" in text


@pytest.mark.parametrize("name", FORMATS)
def test_a_control_token_in_a_call_or_a_tool_is_text(name: str) -> None:
    arguments = json.dumps({"city": [f"{END}"]})
    call = {"id": "1", "type": "function", "function": {"name": "where", "arguments": arguments}}
    tool = {"type": "function", "function": {"name": "now", "description": f"the {END} of time"}}
    asked = m.ChatMessage("assistant", "", tool_calls_json=json.dumps([call]))
    prepared = prepare(name, Tools((tool,)), m.ChatMessage("user", "hi"), asked)
    ids = list(prepared.token_ids)
    assert ids.count(tool_tokenizer(name).convert_tokens_to_ids(END)) == 2  # of the two turns
    assert tool_tokenizer(name).decode(ids).count(END) == 4


def test_a_tool_without_a_description_has_an_empty_one_where_the_template_reads_it() -> None:
    text = tool_tokenizer("harmony").decode(prepare("harmony", Tools((NOW,))).token_ids)
    assert '"description": ""' in text


@pytest.mark.parametrize("arguments", ["{", '{"city": "\\ud83c"}'])
def test_arguments_that_are_not_json_are_refused(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "where", "arguments": arguments}}
    with pytest.raises(NotServed, match="not JSON") as refused:
        prepare("hermes", None, m.ChatMessage("assistant", "", tool_calls_json=json.dumps([call])))
    assert (refused.value.reason, refused.value.param) == (Reason.INVALID, "messages.0.tool_calls")


@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call_is_a_call(name: str) -> None:
    required = prepare(name, Tools((WHERE, NOW), ToolChoice.REQUIRED))
    assert follows(required, name, ONE[name])
    assert follows(required, name, TWO[name]) is (name != "harmony")  # which stops after a call
    assert not follows(required, name, "no")
    assert not follows(required, name, ONE[name].replace("Oslo", "Bonn"))
    single = prepare(name, Tools((WHERE, NOW), ToolChoice.REQUIRED, single=True))
    assert follows(single, name, ONE[name])
    assert not follows(single, name, TWO[name])


@pytest.mark.parametrize("name", FORMATS)
def test_a_named_call_is_of_that_function(name: str) -> None:
    named = prepare(name, Tools((WHERE, NOW), ToolChoice.NAMED, "where", single=True))
    assert follows(named, name, ONE[name])
    other = prepare(name, Tools((WHERE, NOW), ToolChoice.NAMED, "now", single=True))
    assert not follows(other, name, ONE[name])


@pytest.mark.parametrize("name", FORMATS)
def test_strict_functions_are_held_to_their_schema_where_the_model_may_also_talk(name: str) -> None:
    strict = {"type": "function", "function": {**WHERE["function"], "strict": True}}
    held = prepare(name, Tools((strict,)))
    head = "<|channel|>final<|message|>" if name == "harmony" else ""
    assert follows(held, name, f"{head}Just text, <tool and [all] {{that}}.")
    assert follows(held, name, ONE[name])
    assert not follows(held, name, ONE[name].replace("Oslo", "Bonn"))
    assert prepare(name, Tools((WHERE,))).grammar is None


def test_a_model_may_call_or_answer_by_the_schema() -> None:
    either = prepare("hermes", Tools((WHERE,)), schema='{"type": "integer"}')
    assert follows(either, "hermes", ONE["hermes"])
    assert follows(either, "hermes", "12")
    assert not follows(either, "hermes", "hello")
    with pytest.raises(NotServed, match="can't be told") as refused:
        prepare("llama", Tools((WHERE,)), schema='{"type": "integer"}')
    assert refused.value.param == "response_format"


def test_a_function_whose_schema_cannot_be_enforced_is_refused_where_it_must_be() -> None:
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"not": {}}}}
    with pytest.raises(NotServed, match="not") as refused:
        prepare("hermes", Tools((odd,), ToolChoice.REQUIRED))
    assert (refused.value.reason, refused.value.param) == (Reason.UNSUPPORTED, "tools")
    prepare("hermes", Tools((odd,)))


def test_the_reason_for_a_wrong_schema_shows_no_grammar() -> None:
    parameters = {"type": "object", "properties": {"city": {"$ref": "#/$defs/town"}}}
    wrong = {"type": "function", "function": {"name": "wrong", "parameters": parameters}}
    with pytest.raises(NotServed) as refused:
        prepare("hermes", Tools((wrong,), ToolChoice.REQUIRED))
    assert refused.value.message == "the schema can't be enforced: Pointer '/$defs/town' does not exist"


@pytest.mark.parametrize("name", FORMATS)
def test_marks_that_are_special_tokens_are_shown(name: str) -> None:
    assert list(prepare(name, Tools((NOW,))).shown.values()) == (SPECIAL.get(name, []))
    assert bool(prepare(name, None).shown) == (name == "harmony")  # whose answers have marks in any case


# ---- telling calls from text


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read(name: str) -> None:
    expected = [("id0", "where", '{"city": "Oslo"}'), ("id1", "now", "{}")]
    assert read(FORMATS[name], [TWO[name]]) == ("", expected)
    assert read(FORMATS[name], [TWO[name]], single=True) == ("", expected[:1])


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"llama", "harmony"}))
def test_text_before_calls_is_text(name: str) -> None:
    text, calls = read(FORMATS[name], ["I will look.\n\n" + ONE[name]])
    assert (text, len(calls)) == ("I will look.", 1)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "a <tool_call> is <tool"),
        ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call> '),
        ("hermes", "  "),
        ("mistral", "[TOOL_CALLS] none\n"),
        ("llama", '{"city": "Oslo"}'),
        ("llama", 'Well: {"name": "where", "parameters": {}}'),
        ("llama", '{"name": ["where"], "parameters": {}} '),
        ("llama", '{"name": ' + "[" * 2_000 + "]" * 2_000 + ', "parameters": {}}'),
    ],
)
def test_what_only_looks_like_a_call_stays_text(name: str, text: str) -> None:
    assert read(FORMATS[name], list(text)) == (text, [])


def test_a_call_that_was_cut_is_told_as_far_as_it_came() -> None:
    assert read(HERMES, ['<tool_call>{"name": "where", "arg']) == ("", [("id0", "where", "")])
    assert read(LLAMA, ['{"name": "where", "parameters": {"ci']) == ("", [("id0", "where", '{"ci')])
    assert read(HERMES, ['<tool_call>{"na']) == ('<tool_call>{"na', [])


def test_arguments_may_come_before_the_name() -> None:
    text = '<tool_call>{"arguments": {"a": "}\\"{"}, "name": "now"}</tool_call>'
    assert read(HERMES, [text]) == ("", [("id0", "now", '{"a": "}\\"{"}')])


def test_arguments_as_a_string_with_half_a_character_stay_as_they_are() -> None:
    for written, told in (
        ("\\ud83c\\udf0a", '{"a": "\U0001f30a"}'),
        ("\\ud83c", '"{\\"a\\": \\"\\ud83c\\"}"'),
    ):
        text = '<tool_call>{"name": "now", "arguments": "{\\"a\\": \\"' + written + '\\"}"}</tool_call>'
        assert read(HERMES, [text]) == ("", [("id0", "now", told)])


_MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", '"name"', '"where"', '"arguments"', "; ", "é", "x"]
_MARKS += [
    "<function=where>",
    "<parameter=city>",
    "<parameter=days>",
    "</parameter>",
    "</function>",
    "where",
    "12",
]
_MARKS += [
    "<arg_key>",
    "city</arg_key>",
    "near</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "[ARGS]",
    "[CALL_ID]",
]
_MARKS += [
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|start|>assistant",
    "<|call|>",
    "analysis",
    "commentary",
]
_MARKS += [" to=functions.now", "<|constrain|>json", "<|channel|>analysis<|message|>"]
_MARKS += ["<|python_tag|>", "</", "<", "\n\n", "null", *ONE.values()]
_CALLS = ['{"name": "now", "arguments": {}}', '{"name": "where", "parameters": {"a": 1}}']
pieces = st.sampled_from([*'{}[],: \n"\\', *_MARKS, *_CALLS])


@given(st.sampled_from(sorted(FORMATS)), st.lists(pieces, max_size=25), st.data())
def test_what_is_read_does_not_depend_on_the_parts(name: str, made: list[str], data: st.DataObject) -> None:
    text = "".join(made)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(FORMATS[name], parts) == read(FORMATS[name], [text])


@given(st.sampled_from(sorted(FORMATS)), st.lists(pieces, max_size=25), st.data())
def test_a_resumed_answer_adds_what_was_not_delivered(
    name: str, made: list[str], data: st.DataObject
) -> None:
    text = "Hm. " * data.draw(st.integers(0, 1)) + TWO[name] + "".join(made)
    cut = data.draw(st.integers(0, len(text)))
    reader = answer_parser(
        FORMATS[name], FUNCTIONS, ParsedAnswer(single=False, new_id=lambda number: f"id{number}")
    )
    before = reader.feed(text[:cut])
    begun = [(call.id, call.name, call.arguments) for call in before.calls]
    have = Delivered(len(before.text), len(begun), len(begun[-1][2]) if begun else 0, len(before.reasoning))
    after, calls = read(FORMATS[name], [text], delivered=have)
    whole_text, whole_calls = read(FORMATS[name], [text])
    assert before.text + after == whole_text
    if begun and calls and not calls[0][0]:
        begun[-1] = (*begun[-1][:2], begun[-1][2] + calls.pop(0)[2])
    assert begun + calls == whole_calls


def test_news_of_one_call_melt_and_others_do_not() -> None:
    news = [
        ToolCall(0, "a", "f"),
        ToolCall(0, arguments="{"),
        ToolCall(1, "b", "g"),
        ToolCall(0, arguments="}"),
    ]
    assert merge_tool_calls(news) == (
        ToolCall(0, "a", "f", "{"),
        ToolCall(1, "b", "g"),
        ToolCall(0, arguments="}"),
    )
