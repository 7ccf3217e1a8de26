"""Laws of reading: any JSON is read as a request within bounds or refused by the name of a field."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.anthropic.messages_request import read_message_request
from gateway.bounded_json import decode
from gateway.errors import BadRequest
from gateway.openai import chat_tools, sampling
from gateway.openai.chat_request import MAX_MESSAGES, read_chat
from gateway.openai.completion_request import read_completion
from gateway.openai.fields import MAX_OBJECTS, MAX_PROBLEMS, Fields, Problems, echo, whole_number
from gateway.openai.request import GenerationRequest
from gateway.openai.responses_request import read_response

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
TOOL_FIELDS = [
    "n",
    "seed",
    "stop",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "echo",
    "ignore_eos",
    "stop_token_ids",
    "priority",
    "stream",
    "stream_options",
    "tools",
    "tool_choice",
    "response_format",
    "modalities",
    "functions",
    "best_of",
    "suffix",
    "model",
    "messages",
    "prompt",
    "guided_json",
    "input",
    "text",
    "reasoning",
    "include",
    "metadata",
    "system",
    "thinking",
    "output_config",
    "stop_sequences",
]
SANE: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "x"}],
    "prompt": "x",
    "input": "x",
    "max_tokens": 9,
}
bodies = st.dictionaries(st.sampled_from(TOOL_FIELDS), anything, max_size=6).map(lambda body: SANE | body)


def read(reader: Any, body: dict[str, Any]) -> GenerationRequest:
    problems = Problems()
    asked: GenerationRequest = reader(Fields(body, problems))
    problems.raise_any()
    return asked


def check_bounds(asked: GenerationRequest) -> None:
    """Check the bounds of the wire to the sites and of the cost of one request."""
    sampling = asked.sampling
    assert asked.model
    assert asked.prompts
    assert 1 <= asked.choices <= 128
    assert sampling.max_tokens is None or 0 <= sampling.max_tokens < 2**31
    assert sampling.seed is None or 0 <= sampling.seed < 2**64
    assert 0 <= sampling.temperature <= 2
    assert 0 <= sampling.top_p <= 1
    assert 0 <= sampling.top_k < 2**31
    assert len(sampling.stop) <= 16
    assert all(0 <= token < 2**32 for token in (*sampling.stop_token_ids, *sampling.logit_bias))
    assert all(
        type(value) is int for value in (sampling.n, sampling.top_k, sampling.min_tokens, asked.priority)
    )


@pytest.mark.parametrize("reader", [read_chat, read_completion, read_response, read_message_request])
@given(body=bodies)
def test_a_body_is_read_within_bounds_or_refused_by_name(reader: Any, body: dict[str, Any]) -> None:
    try:
        check_bounds(read(reader, body))
    except BadRequest as refusal:
        assert refusal.param
        assert refusal.code
        assert len(refusal.message) <= MAX_PROBLEMS * 450


@pytest.mark.parametrize("reader", [read_chat, read_completion, read_response, read_message_request])
@given(body=bodies)
def test_null_and_absent_read_the_same(reader: Any, body: dict[str, Any]) -> None:
    present = {name: value for name, value in body.items() if value is not None}
    padded = dict.fromkeys(TOOL_FIELDS) | present
    results = []
    for variant in (present, padded):
        try:
            with patch.object(msgspec, "Raw", bytes):  # whose representation shows what it holds
                results.append(repr(read(reader, variant)))
        except BadRequest as refusal:
            results.append(refusal.message)
    assert results[0] == results[1]


@given(st.binary(max_size=60) | anything.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_decode_to_an_object_or_a_refusal(raw: bytes) -> None:
    try:
        assert isinstance(decode(raw), dict)
    except BadRequest as refusal:
        assert refusal.code in {"invalid_json", "invalid_type"}


@given(anything)
def test_an_echo_is_short(value: Any) -> None:
    assert len(echo(value)) <= 200


@given(st.integers(-(2**53), 2**53))
def test_an_integer_is_the_same_with_its_point(number: int) -> None:
    assert whole_number(number) == whole_number(float(number)) == number


@given(st.booleans() | st.text() | st.none() | st.floats().filter(lambda x: not x.is_integer()))
def test_nothing_else_is_an_integer(value: Any) -> None:
    assert whole_number(value) is None


def test_reading_ends_at_the_first_problem_beyond_the_limit() -> None:
    problems = Problems()
    for number in range(MAX_PROBLEMS):
        problems.add(f"field_{number}", "is wrong")
    with pytest.raises(BadRequest) as refusal:
        problems.add("field_10", "is wrong")
    assert refusal.value.param == "field_0"
    assert "field_9" in refusal.value.message
    assert "field_10" not in refusal.value.message
    assert refusal.value.message.endswith("There are more problems.")


class Asked(dict[str, object]):
    """Notes the names that a reader asks for one by one."""

    def __init__(self, body: dict[str, object]) -> None:
        super().__init__(body)
        self.names: set[str] = set()

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)


@pytest.mark.parametrize(
    ("quick", "name"), [(sampling.SAMPLING_FIELDS, "seed"), (chat_tools.TOOL_FIELDS, "tool_choice")]
)
def test_what_is_read_only_if_something_of_it_was_sent_names_all_of_it(
    quick: frozenset[str], name: str
) -> None:
    body = Asked({name: None})
    fields = Fields(body, Problems())
    if quick is sampling.SAMPLING_FIELDS:
        sampling.read_sampling(fields, max_tokens=None, logprobs=None)
    else:
        chat_tools.read_chat_tools(fields)
    assert body.names == quick


class Watched(list[object]):
    """Counts the items that a reader looks at one by one; passes over all of them are not counted."""

    read = 0

    def __iter__(self) -> Iterator[object]:
        for item in super().__iter__():
            self.read += 1
            yield item


WRONG: dict[str, Callable[[Watched], tuple[Any, dict[str, object]]]] = {
    "messages": lambda items: (read_chat, {"messages": items}),
    "parts": lambda items: (read_chat, {"messages": [{"role": "user", "content": items}]}),
    "calls": lambda items: (read_chat, {"messages": [{"role": "assistant", "tool_calls": items}]}),
    "prompts": lambda items: (read_completion, {"prompt": ["a", *items]}),
    "stop_token_ids": lambda items: (read_completion, {"prompt": "a", "stop_token_ids": items}),
}


@pytest.mark.parametrize("where", WRONG)
def test_a_list_of_wrong_items_is_not_read_to_its_end(where: str) -> None:
    for number in (4_000, 100_000):
        items = Watched([1.5] * number)
        read, body = WRONG[where](items)
        items.read = 0
        with pytest.raises(BadRequest) as refused:
            problems = Problems()
            read(Fields({"model": "m", **body}, problems))
            problems.raise_any()
        assert items.read <= MAX_MESSAGES + 2 * MAX_PROBLEMS
        assert len(str(refused.value)) < 5_000


PART = {"type": "text", "text": "a"}
INPUT_PART = {"type": "input_text", "text": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f"}}
FUNCTION = {"type": "function", "name": "f"}


def asks(*messages: dict[str, object]) -> dict[str, object]:
    return {"max_tokens": 1, "messages": list(messages)}


def result(number: int) -> dict[str, object]:
    return {"type": "tool_result", "tool_use_id": "c", "content": [PART] * number}


NESTED: dict[str, Callable[[int], tuple[Any, dict[str, object]]]] = {
    "parts": lambda n: (read_chat, asks(*[{"role": "user", "content": [PART] * n}] * 4)),
    "calls": lambda n: (read_chat, asks(*[{"role": "assistant", "tool_calls": [CALL] * (n // 2)}] * 4)),
    "items": lambda n: (read_response, {"input": [{"role": "user", "content": [INPUT_PART] * n}] * 4}),
    "outputs": lambda n: (
        read_response,
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [INPUT_PART] * n}] * 4},
    ),
    "namespaces": lambda n: (
        read_response,
        {"input": "a", "tools": [{"type": "namespace", "name": "s", "tools": [FUNCTION] * (4 * n)}]},
    ),
    "blocks": lambda n: (read_message_request, asks(*[{"role": "user", "content": [PART] * n}] * 4)),
    "results": lambda n: (read_message_request, asks({"role": "user", "content": [result(n)] * 4})),
    "system": lambda n: (
        read_message_request,
        {"system": [PART] * (4 * n), **asks({"role": "user", "content": "a"})},
    ),
}


@pytest.mark.parametrize("where", NESTED)
def test_reading_ends_at_one_object_more_than_a_request_may_hold(where: str) -> None:
    excess = f"one more than the {MAX_OBJECTS} objects"
    for number, refused in ((MAX_OBJECTS // 4 - 4, False), (MAX_OBJECTS // 4 + 1, True)):
        reader, body = NESTED[where](number)
        problems = Problems()
        try:
            reader(Fields({"model": "m", **body}, problems))
            problems.raise_any()
        except BadRequest as refusal:
            assert (excess in refusal.message) == refused  # two functions of one name are refused for that
        else:
            assert not refused


@given(st.lists(st.integers(-1, 2**32) | st.booleans() | st.floats(0, 9), max_size=6))
def test_token_ids_are_read_alike_one_by_one_and_all_at_once(items: list[object]) -> None:
    problems = Problems()
    ids = sampling.token_ids(Fields({}, problems), "prompt", items)
    numbers = [whole_number(item) for item in items]
    good = all(number is not None and 0 <= number <= sampling.MAX_TOKEN_ID for number in numbers)
    assert not good or list(ids) == numbers
    try:
        problems.raise_any()
    except BadRequest:
        assert not good
    else:
        assert good


def test_items_of_reasoning_are_joined_in_time_with_their_size() -> None:
    """They were joined one by one: 8 MiB of them took the process seconds."""
    text = "x" * 1_900
    item = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}
    said = {"role": "assistant", "content": "hi"}
    body: dict[str, Any] = {"model": "m", "input": [*[item] * 4_000, said, {"role": "user", "content": "hi"}]}
    problems, begun_s = Problems(), time.process_time()
    read = read_response(Fields(body, problems))
    problems.raise_any()
    assert time.process_time() - begun_s < 0.3
    (chat,) = read.prompts
    assert chat.messages[0].reasoning == text * 4_000
