"""A streamed response writes one item after the other, however its deltas were joined."""

from __future__ import annotations

import json

from gateway.domain import AnswerEvent, Delta, Finish, TokenLogprob, ToolCall, Usage
from gateway.openai.fields import Fields, Problems
from gateway.openai.response_schema import ResponseHead
from gateway.openai.responses_body import response_body
from gateway.openai.responses_request import read_response
from gateway.openai.responses_stream import ResponseEncoder
from gateway.openai.unary_response import Choice, UnaryResponse
from tests.support.event_streams import response_events
from tests.support.fakes.edge import MODEL, OPENING

HEAD = ResponseHead("resp_q1", 1_750_000_000, MODEL, "rev-1", lambda: 1_750_000_002.5)
ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
REQUEST = read_response(Fields({"model": MODEL, "input": "Hi", "tools": [ADD]}, Problems()))


def test_text_that_comes_with_the_end_of_a_call_follows_it() -> None:
    pieces: list[AnswerEvent] = [
        OPENING,
        Delta(0, "", 1, tool_calls=(ToolCall(0, "call_1", "add", '{"a":'),)),
        Delta(0, "Done.", 4, tool_calls=(ToolCall(0, arguments="1}"), ToolCall(1, "call_2", "add", "{"))),
        Delta(0, "Bye.", 6, tool_calls=(ToolCall(1, arguments="}"),), finish=Finish.TOOL_CALLS),
        Usage(7, 6),
    ]
    encoder = ResponseEncoder(REQUEST, HEAD)
    events = response_events(b"".join(map(encoder.encode, pieces)))
    output = events[-1]["response"]["output"]
    shown = [item.get("arguments") or item["content"][0]["text"] for item in output]
    assert shown == ['{"a":1}', "Done.", "{}", "Bye."]


def test_the_log_probabilities_of_a_call_do_not_end_it() -> None:
    logprobs = (TokenLogprob("x", b"x", -1.0),)
    pieces: list[AnswerEvent] = [
        OPENING,
        Delta(0, "", 1, logprobs=logprobs, reasoning="Hm."),
        Delta(0, "", 2, logprobs=logprobs),
        Delta(0, "", 3, logprobs=logprobs, reasoning=" Add."),
        Delta(0, "", 4, logprobs=logprobs),
        Delta(0, "", 5, logprobs=logprobs, tool_calls=(ToolCall(0, "call_1", "add"),)),
        Delta(0, "", 6, logprobs=logprobs),
        Delta(0, "", 7, logprobs=logprobs, tool_calls=(ToolCall(0, arguments="{}"),)),
        Delta(0, "", 7, finish=Finish.TOOL_CALLS),
        Usage(7, 7),
    ]
    encoder, choice = ResponseEncoder(REQUEST, HEAD), Choice()
    events = response_events(b"".join(map(encoder.encode, pieces)))
    output = events[-1]["response"]["output"]
    assert [(item["type"], item["status"]) for item in output] == [
        ("reasoning", "completed"),
        ("function_call", "completed"),
    ]
    for piece in pieces:
        if isinstance(piece, Delta):
            choice.add(piece)
    whole = json.loads(response_body(REQUEST, HEAD, UnaryResponse(OPENING, [choice], Usage(7, 7))))
    assert whole["output"] == output
