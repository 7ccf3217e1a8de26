"""Arguments of calls that nest without end, as a model repeats itself, are passed on as the text they are."""

from __future__ import annotations

import json

import pytest

from gateway.anthropic.message_body import message_body
from gateway.domain import Finish, Opening, ToolCall, Usage
from gateway.openai.custom_tools import custom_input
from gateway.openai.response_schema import ResponseHead
from gateway.openai.unary_response import Choice, UnaryResponse

DEEP = ["[" * 2_000, '{"input":' * 2_000, "[" * 2_000 + "]" * 2_000]


@pytest.mark.parametrize("arguments", DEEP)
def test_the_input_of_a_custom_tool_may_nest_without_end(arguments: str) -> None:
    assert custom_input(arguments) == arguments


@pytest.mark.parametrize("arguments", DEEP)
def test_the_input_of_a_tool_may_nest_without_end(arguments: str) -> None:
    choice = Choice(tool_calls=[ToolCall(0, "c1", "f", arguments)], finish=Finish.TOOL_CALLS)
    answer = UnaryResponse(Opening("a", "", "", 1, 0.0, 7, "rev-1"), [choice], Usage(7, 3))
    message = json.loads(message_body(ResponseHead("msg_1", 0, "m", "rev-1"), answer))
    assert message["content"][0]["input"] == {"arguments": arguments}
