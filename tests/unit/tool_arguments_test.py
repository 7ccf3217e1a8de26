"""Arguments of a tool call are what a model wrote: any text, cut off at the token limit, in any state."""

from __future__ import annotations

import json

import pytest

from gateway.anthropic.message_body import message_body
from gateway.domain import Finish, Opening, ToolCall, Usage
from gateway.openai.custom_tools import custom_input
from gateway.openai.response_schema import ResponseHead
from gateway.openai.unary_response import Choice, UnaryResponse

HEAD = ResponseHead("msg_1", 0, "m", "")
OPENING = Opening("lab", "aws", "us-east-1", 1, 0.0, 7, "")


def message_input(arguments: str) -> object:
    choice = Choice(tool_calls=[ToolCall(0, "call_1", "add", arguments)], finish=Finish.LENGTH)
    (block,) = json.loads(message_body(HEAD, UnaryResponse(OPENING, [choice], Usage(7, 3))))["content"]
    return block["input"]


@pytest.mark.parametrize(
    "arguments", ["[" * 10_000, "[" * 2_000 + "]" * 2_000, '{"a":' * 10_000, '{"a": ', "[1]", "7"]
)
def test_arguments_that_are_no_object_stay_a_text(arguments: str) -> None:
    assert message_input(arguments) == {"arguments": arguments}
    assert custom_input(arguments) == arguments


def test_arguments_that_are_an_object_are_read() -> None:
    assert message_input('{"input": "x"}') == {"input": "x"}
    assert message_input("") == {}
    assert custom_input('{"input": "x"}') == "x"
