"""An answer in Anthropic's format whose arguments nest deeply is written, and read again within a line."""

from __future__ import annotations

import msgspec
import pytest

from gateway.anthropic.message_batch import result_line
from gateway.anthropic.message_body import MAX_DEPTH, message_body
from gateway.batches.answer_line import response_line
from gateway.batches.usage import usage_of
from gateway.domain import Finish, Opening, ToolCall, Usage
from gateway.openai.response_schema import ResponseHead
from gateway.openai.unary_response import Choice, UnaryResponse

HEAD = ResponseHead("msg_1", 0, "m", "")
OPENING = Opening("site", "cloud", "region", 1, 0.0, 3, "")


def message(arguments: str) -> bytes:
    choice = Choice(tool_calls=[ToolCall(0, "call", "add", arguments)], finish=Finish.TOOL_CALLS)
    return message_body(HEAD, UnaryResponse(OPENING, [choice], Usage(3, 5)))


@pytest.mark.parametrize("depth", [1, *range(490, 510), *range(900, 1010)])
def test_arguments_are_an_object_or_text_however_deep_they_nest(depth: int) -> None:
    line = response_line("c", "q", message('{"a":' * depth + "[]" + "}" * depth))
    assert usage_of(line) == Usage(3, 5)
    assert b'"type":"succeeded"' in result_line(line, "expired")


def test_wide_arguments_are_an_object() -> None:
    arguments = msgspec.json.encode({"rows": [{"cells": [{}] * 30}] * 100})
    assert b'"input":' + arguments in message(arguments.decode())


@pytest.mark.parametrize(("depth", "is_text"), [(MAX_DEPTH, False), (MAX_DEPTH + 1, True)])
def test_the_deepest_arguments_that_are_an_object(depth: int, is_text: bool) -> None:
    nested = '{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"
    assert (f'"input":{nested}'.encode() not in message(nested)) is is_text
