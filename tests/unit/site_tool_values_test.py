"""What models leave out, add or get wrong in their calls, and the types of values written without quotes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from site_engine.core.request import merge_tool_calls
from site_engine.errors import NotServed, Reason
from site_engine.messages import ToolChoice, Tools
from site_engine.text.argument_types import ANY_TYPE, argument_json, schema_types
from site_engine.text.parsed_answer import ParsedAnswer
from site_engine.text.tool_call_parser import answer_parser
from site_engine.text.tool_format import GLM, HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, QWEN_XML, Format
from tests.unit.site_tools_test import follows, prepare

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "label": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "filter": {"$ref": "#/$defs/filter"},
        "loud": {"type": "boolean"},
        "any": {},
    },
    "required": ["text"],
    "additionalProperties": False,
    "$defs": {"filter": {"type": "object", "properties": {"tags": {"type": "array"}}}},
}
SAY = {"type": "function", "function": {"name": "say", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
FUNCTIONS = Tools((SAY, NOW)).functions


def read(form: Format, text: str) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls (name, arguments) of an answer, the same in one part and by characters."""
    results = []
    for parts in ([text], list(text)):
        parser = answer_parser(form, FUNCTIONS, ParsedAnswer(single=False, new_id=str))
        heard = [*map(parser.feed, parts), parser.end()]
        calls = merge_tool_calls(call for each in heard for call in each.calls)
        results.append(
            ("".join(each.text for each in heard), [(call.name, call.arguments) for call in calls])
        )
    assert results[0] == results[1]
    return results[0]


def tagged(form: Format, arguments: dict[str, str]) -> str:
    if form is QWEN_XML:
        inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function=say>\n{inner}</function>\n</tool_call>"
    inner = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items()
    )
    return f"<tool_call>say\n{inner}</tool_call>"


def arguments_of(form: Format, text: str) -> Any:
    said, [(name, arguments)] = read(form, text)
    assert (said, name) == ("", "say")
    return json.loads(arguments)


@pytest.mark.parametrize("key", ["arguments", "parameters"])
@pytest.mark.parametrize(
    ("form", "call"),
    [
        (HERMES, '<tool_call>\n{"name": "say", "KEY": {"text": "a"}}\n</tool_call>'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "say", "KEY": {"text": "a"}}]'),
        (LLAMA, '{"name": "say", "KEY": {"text": "a"}}'),
        (LLAMA, '<|python_tag|>{"type": "function", "name": "say", "KEY": {"text": "a"}}'),
        (LLAMA, 'I look. <|python_tag|>{"name": "say", "KEY": {"text": "a"}}'),
    ],
)
def test_arguments_are_read_under_either_key(form: Format, call: str, key: str) -> None:
    text, calls = read(form, call.replace("KEY", key))
    assert calls == [("say", '{"text": "a"}')]
    assert text == ("I look." if call.startswith("I") else "")


@pytest.mark.parametrize("arguments", ["", ', "arguments": {}', ', "arguments": null', ', "arguments": ""'])
def test_a_call_without_arguments_has_an_empty_object_of_them(arguments: str) -> None:
    call = f'{{"name": "now"{arguments}}}'
    assert read(HERMES, f"<tool_call>\n{call}\n</tool_call>") == ("", [("now", "{}")])
    assert read(LLAMA, call) == ("", [("now", "{}")])


def test_arguments_written_as_a_string_of_json_are_that_object() -> None:
    call = '<tool_call>{"name": "say", "arguments": "{\\"text\\": \\"a\\"}"}</tool_call>'
    assert read(HERMES, call) == ("", [("say", '{"text": "a"}')])
    odd = '<tool_call>{"name": "say", "arguments": "a"}</tool_call>'
    assert read(HERMES, odd) == ("", [("say", '"a"')])


@pytest.mark.parametrize(
    ("form", "mark"),
    [
        (HERMES, "<tool_call>"),
        (QWEN_XML, "<tool_call>"),
        (GLM, "<tool_call>"),
        (MISTRAL_ARGS, "[TOOL_CALLS]"),
    ],
)
def test_a_mark_at_which_an_answer_was_cut_is_no_text(form: Format, mark: str) -> None:
    assert read(form, f"I look.\n{mark}") == ("I look.", [])
    assert read(form, f"I look.\n{mark}\n") == ("I look.", [])


@pytest.mark.parametrize(
    "call",
    [
        "<function=say>\n<parameter=text>\na\n</parameter>\n</function>\n</tool_call>",
        "<tool_call><function=say><parameter=text>a</parameter></function></tool_call>",
        "<tool_call>\n<function=say>\n<parameter=text>\na\n</function>\n</tool_call>",
        "<tool_call>\n<function=say>\n<parameter=text>\na\n</parameter>\n</tool_call>",
    ],
)
def test_tags_of_a_call_may_be_missing_where_the_next_one_tells_its_end(call: str) -> None:
    assert read(QWEN_XML, call) == ("", [("say", '{"text": "a"}')])


def test_the_last_tag_of_a_value_may_be_missing_in_glm_calls() -> None:
    call = "<tool_call>say<arg_key>text</arg_key><arg_value>a</tool_call>"
    assert read(GLM, call) == ("", [("say", '{"text": "a"}')])
    assert read(GLM, f"{call}\n{call}") == ("", [("say", '{"text": "a"}')] * 2)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (QWEN_XML, "<tool_call>\n<function=other>\n</function>\n</tool_call>"),
        (QWEN_XML, "The tag <function= begins one."),
        (QWEN_XML, "<function=a b>"),
        (GLM, "<tool_call>other</tool_call>."),
        (GLM, "A <tool_call> is a tag."),
        (MISTRAL_ARGS, '[TOOL_CALLS]other[ARGS]{"a": 1}'),
        (MISTRAL_ARGS, "[TOOL_CALLS] no call at all"),
        (LLAMA, '{"a": 1} is a dict'),
        (LLAMA, '<|python_tag|>print("a")'),
    ],
)
def test_a_call_of_nothing_offered_stays_text(form: Format, text: str) -> None:
    assert read(form, text) == (text, [])


def test_a_head_of_a_call_that_has_no_end_soon_becomes_text() -> None:
    for form, begin in ((QWEN_XML, "<function="), (GLM, "<tool_call>"), (MISTRAL_ARGS, "[TOOL_CALLS]")):
        parser = answer_parser(form, FUNCTIONS, ParsedAnswer(single=False, new_id=str))
        text = begin + "a" * 5000
        assert len(parser.feed(text).text) > 4000


def test_an_id_between_the_name_and_the_arguments_is_left_out() -> None:
    call = '[TOOL_CALLS]say[CALL_ID]a1b2c3d4e[ARGS]{"text": "a"}'
    assert read(MISTRAL_ARGS, call) == ("", [("say", '{"text": "a"}')])


@pytest.mark.parametrize("form", [QWEN_XML, GLM], ids=["qwen_xml", "glm"])
def test_values_have_the_types_of_their_schema(form: Format) -> None:
    written = {
        "text": "02139",
        "count": "12",
        "label": "null",
        "filter": '{"tags": ["a"]}',
        "loud": "True",
        "any": "1.5",
    }
    asked = {"text": "02139", "count": 12, "label": None, "filter": {"tags": ["a"]}, "loud": True, "any": 1.5}
    assert arguments_of(form, tagged(form, written)) == asked
    odd = {"text": "", "count": "twelve", "label": "a", "filter": "{'tags'}", "loud": "NaN", "any": "a b"}
    assert arguments_of(form, tagged(form, odd)) == odd


_parts = st.sampled_from(
    [
        *'<>/="\\\n é{}',
        "</parameter",
        "</function>",
        "<parameter=",
        "</arg_value",
        "<tool_call>",
        "</tool_call>",
    ]
)


@given(st.sampled_from([QWEN_XML, GLM]), st.lists(_parts, max_size=12).map("".join))
def test_a_text_of_anything_but_its_closing_tags_comes_as_written(form: Format, value: str) -> None:
    ends = ["</parameter>", "\n<parameter=", "</arg_value>"]
    closes = "</function>" in value and "</tool_call>" in value
    unclosed = form is GLM and "</tool_call>" in value
    if not any(end in f"\n{value}" for end in ends) and not closes and not unclosed:
        assert arguments_of(form, tagged(form, {"text": value, "count": "1"})) == {"text": value, "count": 1}


@pytest.mark.parametrize("form", [QWEN_XML, GLM], ids=["qwen_xml", "glm"])
def test_a_text_may_have_the_tags_of_calls_in_it(form: Format) -> None:
    text = "End it with </parameter>, </arg_value> and </function>; <parameter=a> is one."
    assert arguments_of(form, tagged(form, {"text": text})) == {"text": text}


def test_a_text_is_told_as_it_comes() -> None:
    parser = answer_parser(QWEN_XML, FUNCTIONS, ParsedAnswer(single=False, new_id=str))
    begun = parser.feed("<tool_call>\n<function=say>\n<parameter=text>\nIt was a dark")
    [call] = begun.calls
    assert call.arguments == '{"text": "It was a dark'


@pytest.mark.parametrize(
    ("text", "types", "json_text"),
    [
        ("a", {"string"}, '"a"'),
        (" 5 ", {"integer"}, "5"),
        ("1e20", {"number"}, "1e20"),
        ("5", {"integer", "string"}, "5"),
        ("05", {"integer", "string"}, '"05"'),
        ("None", {"string", "null"}, "null"),
        ("None", ANY_TYPE, '"None"'),
        ("[1]", ANY_TYPE, "[1]"),
        ("Infinity", {"number"}, '"Infinity"'),
        ("[" * 100_000, {"array"}, json.dumps("[" * 100_000)),
        ("1" * 5000, {"integer"}, json.dumps("1" * 5000)),
    ],
)
def test_an_argument_becomes_json_of_its_type(text: str, types: set[str], json_text: str) -> None:
    assert argument_json(text, frozenset(types)) == json_text


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": ["a", 1]}, {"string", "integer"}),
        ({"const": True}, {"boolean"}),
        ({"$ref": "#/$defs/a~1b"}, {"array"}),
        ({"$ref": "#/$defs/loop"}, ANY_TYPE),
        ({"$ref": "elsewhere.json"}, ANY_TYPE),
        ({"allOf": [{"title": "x"}, {"type": "object"}]}, {"object"}),
        ({"oneOf": [{"type": "string"}, {}]}, ANY_TYPE),
        (True, ANY_TYPE),
    ],
)
def test_the_types_of_a_schema(schema: object, types: set[str]) -> None:
    root = {"$defs": {"a/b": {"type": "array"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert schema_types(schema, root) == types


def test_a_reference_is_followed_once_however_often_it_is_made() -> None:
    parts: dict[str, Any] = {str(at): {"anyOf": [{"$ref": f"#/$defs/{at + 1}"}] * 50} for at in range(7)}
    parts["7"] = {"type": "string"}
    assert schema_types({"$ref": "#/$defs/0"}, {"$defs": parts}) == {"string"}


@pytest.mark.parametrize("form", [QWEN_XML, GLM], ids=["qwen_xml", "glm"])
def test_a_forced_call_has_its_required_values_in_order_and_of_their_types(form: Format) -> None:
    forced = prepare(form.name, Tools((SAY, NOW), ToolChoice.NAMED, "say", single=True))
    assert follows(
        forced, form.name, tagged(form, {"text": "a <b> </b>\n\n  é", "count": "3", "any": '{"a": 1}'})
    )
    assert follows(forced, form.name, tagged(form, {"text": "", "label": "null", "filter": '{"tags": []}'}))
    assert not follows(forced, form.name, tagged(form, {"count": "3"}))
    assert not follows(forced, form.name, tagged(form, {"text": "a", "count": "three"}))
    assert not follows(forced, form.name, tagged(form, {"count": "3", "text": "a"}))
    assert not follows(forced, form.name, tagged(form, {"text": "a", "other": "3"}))
    smuggled = tagged(form, {"text": tagged(form, {"text": "a", "count": "three"})})
    assert not follows(forced, form.name, smuggled)


@pytest.mark.parametrize("form", [QWEN_XML, GLM], ids=["qwen_xml", "glm"])
@pytest.mark.parametrize(
    ("parameters", "what"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}}, "'a'"),
        ({"type": "object", "properties": {"a": {"type": ["string", "integer"]}}}, "'a'"),
        ({"type": "object", "properties": {"a": {"anyOf": [{"type": "string", "format": "date"}]}}}, "'a'"),
        ({"type": "object", "properties": {"<a>": {"type": "integer"}}}, "'<a>'"),
        ({"anyOf": [{"type": "object"}]}, "'anyOf'"),
        ({"type": "object", "required": ["b"]}, "'b'"),
    ],
)
def test_a_schema_that_raw_values_cannot_follow_is_refused_by_name(
    form: Format, parameters: dict[str, Any], what: str
) -> None:
    odd = {"type": "function", "function": {"name": "odd", "parameters": parameters}}
    with pytest.raises(NotServed, match=f"{what}.* of odd can't be enforced") as refused:
        prepare(form.name, Tools((odd,), ToolChoice.REQUIRED))
    assert (refused.value.reason, refused.value.param) == (Reason.UNSUPPORTED, "tools")
    prepare(form.name, Tools((odd,)))


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.sampled_from(["string", "object", "#", "#/$defs/a", "a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "properties", "required", "enum", "anyOf", "$ref", "$defs", "maxLength", "a"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=40)
@given(
    st.sampled_from([QWEN_XML, GLM]),
    st.dictionaries(st.sampled_from(["type", "properties", "required"]), _values),
)
def test_a_schema_of_any_kind_is_enforced_or_refused(form: Format, parameters: dict[str, Any]) -> None:
    odd = {"type": "function", "function": {"name": "say", "parameters": parameters}}
    try:
        prepare(form.name, Tools((odd,), ToolChoice.REQUIRED))
    except NotServed as refused:
        assert refused.param == "tools"
    parser = answer_parser(form, Tools((odd,)).functions, ParsedAnswer(single=False, new_id=str))
    parser.feed(tagged(form, {"a": "1", "b": "x"}))
    parser.end()


@pytest.mark.parametrize("form", [QWEN_XML, GLM], ids=["qwen_xml", "glm"])
def test_lengths_and_choices_of_texts_are_enforced(form: Format) -> None:
    properties = {
        "short": {"type": "string", "minLength": 2, "maxLength": 3},
        "one": {"$ref": "#/$defs/one"},
    }
    parameters = {"type": "object", "properties": properties, "$defs": {"one": {"enum": ["a b", None]}}}
    say = {"type": "function", "function": {"name": "say", "parameters": parameters}}
    forced = prepare(form.name, Tools((say,), ToolChoice.REQUIRED))
    for value, is_allowed in (("a", False), ("ab", True), ("abcd", False)):
        assert follows(forced, form.name, tagged(form, {"short": value})) is is_allowed
    for value, is_allowed in (("a b", True), ("null", True), ("a", False)):
        assert follows(forced, form.name, tagged(form, {"one": value})) is is_allowed
