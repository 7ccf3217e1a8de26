"""Bad training data is named by line before training; good lines are read as chat templates take them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage

from wire.training_rows import MAX_LINE_BYTES, MAX_VALUES, BadRow, Row, read_row

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "2"}


def chat(*messages: Any, **more: Any) -> bytes:
    return json.dumps({"messages": list(messages)} | more).encode()


def called(**changes: Any) -> bytes:
    """Return a chat with one call, changed."""
    return chat(USER, {"role": "assistant", "tool_calls": [CALL | changes]}, RESULT, ANSWER, tools=[TOOL])


def function(**changes: Any) -> bytes:
    return called(function={"name": "add", "arguments": "{}"} | changes)


def tool(**changes: Any) -> bytes:
    return chat(USER, ANSWER, tools=[TOOL | changes])


BAD: list[tuple[bytes, str]] = [
    (b"", "is empty"),
    (b"   \n", "is empty"),
    (b"\xef\xbb\xbf{}", "byte order mark"),
    (b'{"prompt": "\xff"}', "is not UTF-8 from byte 13 on"),
    (b"{'prompt': 1}", "is not JSON at character 2"),
    (b'{"prompt": "a", "completion": "b"', "is not JSON"),
    (chat(USER, ANSWER) + chat(USER, ANSWER), "is not JSON at character .*: Extra data"),
    (b"[" * 100_000, "nested too deeply|is not JSON"),
    (b"[" + b"[]," * MAX_VALUES + b"0]", "has more than 131,072 objects, lists, fields and items"),
    (b'{"prompt": [' + b"0," * MAX_VALUES + b"0]}", "has more than 131,072"),
    (b'{"prompt": NaN}', "has NaN"),
    (b'{"prompt": ' + b"1" * 5000 + b"}", "too many digits"),
    (b'{"prompt": -1e999}', "a number that is too large"),
    (b'{"prompt": "a", "prompt": "b"}', "'prompt' twice"),
    (b'{"%b": 0, "%b": 1}' % (b"x" * 99, b"x" * 99), "has text twice in one object"),
    (b'{"prompt": "a", "completion": "\\ud800"}', "lone surrogate"),
    (b'"' + b"x" * MAX_LINE_BYTES + b'"', "a line has at most"),
    (b"[1]", "is an array, not an object"),
    (b"17", "is a number, not an object"),
    (b"null", "is missing or null, not an object"),
    (b"{}", "has neither"),
    (b'{"text": "a"}', "has neither"),
    (b'{"messages": [], "prompt": "a"}', "is one or the other"),
    (b'{"prompt": "a", "completion": "b", "extra": 1}', "extra is not a known field"),
    (b'{"prompt": "a"}', "completion is missing"),
    (b'{"completion": "a"}', "prompt is missing"),
    (b'{"prompt": 1, "completion": "a"}', "prompt is a number, not text"),
    (b'{"prompt": "a", "completion": ["b"]}', "completion is an array, not text"),
    (b'{"prompt": "a", "completion": ""}', "completion is empty"),
    (b'{"messages": {}}', "messages is an object, not an array"),
    (b'{"messages": null}', "messages is missing or null"),
    (b'{"tools": []}', "messages is missing"),
    (chat(), "messages is empty"),
    (chat(*[USER] * 4097, ANSWER), "messages has 4,098 messages"),
    (chat(USER, ANSWER, functions=[]), "functions is not a known field"),
    (chat(USER, ANSWER, parallel_tool_calls=1), "parallel_tool_calls is a number"),
    (chat("Hi", ANSWER), r"messages\[0\] is text, not an object"),
    (chat({"content": "Hi"}, ANSWER), r"messages\[0\].role is missing"),
    (chat({"role": 7, "content": "Hi"}, ANSWER), r"role is a number, not text"),
    (chat({"role": "bot", "content": "Hi"}, ANSWER), "role is 'bot'; it is one of system"),
    (chat(USER, ANSWER | {"refusal": "no"}), r"messages\[1\].refusal is not a known field"),
    (chat(USER, ANSWER | {"function_call": {}}), "use tool_calls"),
    (chat({"role": "user"}, ANSWER), r"messages\[0\].content is missing"),
    (chat(USER, {"role": "assistant", "content": None}), r"messages\[1\].content is missing"),
    (chat(USER, {"role": "assistant", "content": ""}), "of the assistant is empty"),
    (chat({"role": "user", "content": 3}, ANSWER), "content is a number, not text"),
    (chat({"role": "user", "content": []}, ANSWER), "content is an empty array"),
    (chat({"role": "user", "content": ["Hi"]}, ANSWER), r"content\[0\] is text, not an object"),
    (chat({"role": "user", "content": [{"type": "image_url"}]}, ANSWER), "training reads 'text' alone"),
    (chat({"role": "user", "content": [{"type": "text"}]}, ANSWER), r"content\[0\].text is missing"),
    (chat(USER | {"name": 1}, ANSWER), "name is a number, not text"),
    (chat(USER | {"weight": 1}, ANSWER), "only the assistant is learned"),
    (chat(USER, ANSWER | {"weight": 0.5}), "weight is 0.5, not 0 or 1"),
    (chat(USER, ANSWER | {"weight": True}), "weight is True, not 0 or 1"),
    (chat(USER, ANSWER | {"weight": []}), "weight is an array, not 0 or 1"),
    (chat(USER, ANSWER | {"weight": 0}), "every message of the assistant has weight 0"),
    (chat(USER), "no message of the assistant"),
    (chat(ANSWER, USER), "the last message is of 'user'"),
    (chat(USER | {"tool_call_id": "c1"}, ANSWER), "only 'tool' answers a call"),
    (chat(USER, {"role": "tool", "content": "2"}, ANSWER), "tool_call_id is missing"),
    (chat(USER, RESULT, ANSWER), "which no earlier message makes"),
    (chat(USER | {"tool_calls": [CALL]}, ANSWER, tools=[TOOL]), "only the assistant calls"),
    (chat(USER, ANSWER | {"tool_calls": []}, tools=[TOOL]), "tool_calls is empty"),
    (chat(USER, ANSWER | {"tool_calls": {}}, tools=[TOOL]), "tool_calls is an object, not an array"),
    (chat(USER, ANSWER | {"tool_calls": [1]}, tools=[TOOL]), r"tool_calls\[0\] is a number"),
    (chat(USER, ANSWER | {"tool_calls": [CALL, CALL]}, tools=[TOOL]), "has the id 'c1' of an earlier call"),
    (chat(USER, ANSWER | {"tool_calls": [CALL]}), "'add', which is none of the line's tools"),
    (
        chat(USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT, RESULT, ANSWER, tools=[TOOL]),
        "has its answer already",
    ),
    (called(type="web"), "type is 'web', not 'function'"),
    (called(id=None), r"\.id is missing"),
    (called(function="add"), "function is text, not an object"),
    (function(name=None), "function.name is missing"),
    (function(name="sub"), "none of the line's tools"),
    (function(arguments={}), "arguments is an object, not text"),
    (function(arguments="{a}"), "arguments is not JSON"),
    (function(arguments="[1]"), "arguments is JSON of an array"),
    (chat(USER, ANSWER, tools={}), "tools is an object, not an array"),
    (chat(USER, ANSWER, tools=[1]), r"tools\[0\] is a number"),
    (tool(type="retrieval"), "type is 'retrieval', not 'function'"),
    (tool(function=None), "function is missing"),
    (tool(function={}), "function.name is missing"),
    (tool(function={"name": "a", "parameters": 1}), "parameters is a number"),
    (chat(USER, ANSWER, tools=[TOOL, TOOL]), "names are unlike"),
]


@pytest.mark.parametrize(("line", "reason"), BAD)
def test_each_kind_of_bad_line_is_named(line: bytes, reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        read_row(line)


def test_a_chat_is_read_as_templates_take_it() -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    row = read_row(
        chat(
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": parts, "name": "Ann"},
            {"role": "assistant", "tool_calls": [CALL], "weight": 0},
            RESULT,
            ANSWER,
            tools=[TOOL],
        )
        + b"\r\n"
    )
    assert row.learned == (4,)
    assert row.messages[1] == USER | {"name": "Ann"}
    assert row.messages[2]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert row.messages[2]["content"] == ""
    assert row.tools == (TOOL,)


def test_null_is_as_good_as_left_out() -> None:
    """Messages that OpenAI's SDK has written have a null in each field without a value."""
    written = ChatCompletionMessage(role="assistant", content="Hello").model_dump()
    assert {"refusal", "audio", "function_call", "tool_calls"} <= {
        name for name, value in written.items() if value is None
    }
    nulls = {"name": None, "weight": None}
    row = read_row(chat(USER | nulls, written | nulls, tools=None, parallel_tool_calls=None))
    assert row == read_row(chat(USER, ANSWER))
    assert read_row(b'{"prompt": "a", "completion": "b", "extra": null}') == Row(prompt="a", completion="b")


def test_a_pair_is_read_as_it_is() -> None:
    pair = {"prompt": "", "completion": "née Zoë 🦀"}
    assert read_row(json.dumps(pair).encode()) == Row(**pair)
    assert read_row(json.dumps(pair, ensure_ascii=False).encode()) == Row(**pair)


def test_text_may_hold_any_signs() -> None:
    pair = {"prompt": "[0, 1], {}: " * MAX_VALUES, "completion": "ok"}
    assert read_row(json.dumps(pair).encode()) == Row(**pair)


def test_arguments_of_a_call_are_bounded_too() -> None:
    with pytest.raises(BadRow, match=r"arguments has more than 131,072"):
        read_row(function(arguments=json.dumps({"a": [0] * MAX_VALUES})))


def test_a_name_that_stands_twice_is_found_in_one_pass() -> None:
    """It took a second where 10,000 other names stand before it, and sixteen where there are 40,000."""
    names = [f'"{number}": 0' for number in [*range(40_000), 39_999]]
    begun_s = time.process_time()
    with pytest.raises(BadRow, match="'39999' twice"):
        read_row(f"{{{', '.join(names)}}}".encode())
    assert time.process_time() - begun_s < 2.0


FIELDS = (
    *("messages", "role", "content", "weight", "tool_calls", "tools", "prompt", "completion"),
    *("type", "text", "id", "function", "name", "arguments", "tool_call_id"),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(FIELDS),
            inner | st.sampled_from(["user", "assistant", "tool", "function", "text", "{}"]),
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(JSON, st.binary(max_size=3))
def test_any_line_is_read_or_named(value: Any, noise: bytes) -> None:
    """A reader that fails otherwise would end a gateway's request or a site's job without a reason."""
    for line in (json.dumps(value).encode(), json.dumps(value).encode() + noise, noise):
        try:
            row = read_row(line)
        except BadRow as bad:
            assert str(bad)
        else:
            assert row.completion or row.learned
