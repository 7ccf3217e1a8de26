"""A server's bytes become outputs: however the network cuts them, the same text, counts and finishes."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from site_engine.core.request import Finish, Output, ToolCall
from site_engine.remote.stream import MAX_EVENT_BYTES, FailedStream, MalformedStream, ResponseStream
from wire import federation_pb2 as pb


def event(**body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def piece(text: str, index: int = 0, finish: str | None = None, **more: Any) -> bytes:
    return event(choices=[{"index": index, "delta": {"content": text}, "finish_reason": finish, **more}])


DONE = b"data: [DONE]\n\n"
USAGE = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 5})


def read(stream: ResponseStream, *parts: bytes) -> list[Output]:
    return [output for part in parts for output in stream.feed(part)]


def text(outputs: list[Output], request_id: str = "a") -> str:
    return "".join(each.text for each in outputs if each.request_id == request_id)


@given(
    st.lists(st.text(max_size=5), max_size=8),
    st.lists(st.integers(0, 4000), max_size=12),
    st.sampled_from([b"\n", b"\r\n"]),
)
def test_cuts_change_nothing(words: list[str], cuts: list[int], newline: bytes) -> None:
    whole = b": hello\n\n" + b"".join(map(piece, words)) + piece("", finish="stop") + USAGE + DONE
    whole = whole.replace(b"\n", newline)
    places = sorted({0, len(whole), *(cut % (len(whole) + 1) for cut in cuts)})
    stream = ResponseStream(["a"])
    outputs = read(stream, *(whole[a:b] for a, b in pairwise(places)))
    assert text(outputs) == "".join(words)
    assert stream.done
    (end,) = stream.end()
    assert (end.finish, end.prompt_tokens) == (Finish.STOP, 9)
    assert end.completion_tokens == max(5, sum(1 for each in words if each))


@pytest.mark.parametrize(
    ("details", "cached"),
    [
        ({}, None),
        ({"prompt_tokens_details": None}, None),
        ({"prompt_tokens_details": {"cached_tokens": None}}, None),
        ({"prompt_tokens_details": {"cached_tokens": 0}}, 0),
        ({"prompt_tokens_details": {"cached_tokens": 7}}, 7),
    ],
)
def test_a_server_may_not_tell_what_it_had_cached(details: dict[str, Any], cached: int | None) -> None:
    stream = ResponseStream(["a"])
    usage = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 1, **details})
    read(stream, piece("x", finish="stop"), usage, DONE)
    assert stream.cached_tokens == cached


def test_reasoning_is_told_and_counted_apart() -> None:
    for name in ("reasoning", "reasoning_content"):
        thoughts = [event(choices=[{"index": 0, "delta": {name: each}}]) for each in ("so ", "then")]
        stream = ResponseStream(["a"])
        outputs = read(stream, *thoughts, piece("42"), piece("", finish="stop"), DONE)
        assert "".join(each.reasoning for each in outputs) == "so then"
        assert text(outputs) == "42" and stream.started
        (end,) = stream.end()
        assert (end.completion_tokens, end.reasoning_tokens) == (3, 2)


def test_a_content_in_chunks_is_text_and_reasoning() -> None:
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}], "closed": True}
    chunks = [thinking, {"type": "reference", "reference_ids": [1]}, {"type": "text", "text": "42"}]
    stream = ResponseStream(["a"])
    outputs = [stream.feed(event(choices=[{"index": 0, "delta": {"content": [each]}}])) for each in chunks]
    told = [[(each.reasoning, each.text) for each in some] for some in outputs]
    assert told == [[("hm", "")], [], [("", "42")]]
    (together,) = ResponseStream(["a"]).feed(event(choices=[{"index": 0, "delta": {"content": chunks}}]))
    assert (together.reasoning, together.text) == ("hm", "42")


def test_the_servers_count_of_its_reasoning_holds_up_to_what_it_said_in_all() -> None:
    for counted, kept in ((4, 4), (9, 5)):
        usage = {"completion_tokens": 5, "completion_tokens_details": {"reasoning_tokens": counted}}
        stream = ResponseStream(["a"])
        read(stream, piece("42", finish="stop"), event(choices=[], usage=usage), DONE)
        assert stream.end()[0].reasoning_tokens == kept


def test_reasoning_is_counted_exactly_where_the_server_counts_each_chunk() -> None:
    def chunk(tokens: int, **delta: str) -> bytes:
        usage = {"prompt_tokens": 9, "completion_tokens": tokens}
        return event(choices=[{"index": 0, "delta": delta}], usage=usage)

    thoughts = (chunk(4, reasoning="so "), chunk(7, reasoning="then"))
    answered = (chunk(9, content="42"), piece("", finish="stop"), DONE)
    for rest, counted in ((answered, (9, 7)), ((piece("", finish="length"), DONE), (7, 7))):
        stream = ResponseStream(["a"])
        read(stream, *thoughts, *rest)
        (end,) = stream.end()
        assert (end.completion_tokens, end.reasoning_tokens) == counted


@pytest.mark.parametrize(
    ("told", "stop"),
    [
        ({"stop_reason": "END"}, "END"),
        ({"matched_stop": "END"}, "END"),
        ({"stop_reason": 151645}, ""),
        ({"matched_stop": None}, ""),
        ({"stop_reason": {"odd": []}}, ""),
    ],
)
def test_the_stop_string_that_a_server_names_is_told(told: dict[str, Any], stop: str) -> None:
    stream = ResponseStream(["a"])
    read(stream, piece("42"), piece("", finish="stop", **told), DONE)
    assert stream.end()[0].stop_sequence == stop


def test_a_refusal_and_a_filter_are_told() -> None:
    stream = ResponseStream(["a"])
    refused = event(choices=[{"index": 0, "delta": {"refusal": "No."}, "finish_reason": "content_filter"}])
    outputs = read(stream, refused, DONE)
    assert [each.refusal for each in outputs] == ["No."]
    assert stream.end()[0].finish is Finish.CONTENT_FILTER


def test_calls_of_functions_are_told_as_the_server_told_them() -> None:
    def news(**call: Any) -> bytes:
        return event(choices=[{"index": 0, "delta": {"tool_calls": [{"index": 1, **call}]}}])

    begun = news(id="c1", type="function", function={"name": "add", "arguments": ""})
    stream = ResponseStream(["a"])
    outputs = read(
        stream, begun, news(function={"arguments": '{"a": 1}'}), piece("", finish="tool_calls"), DONE
    )
    told = [call for output in outputs for call in output.tool_calls]
    assert told == [ToolCall(0, "c1", "add"), ToolCall(0, arguments='{"a": 1}')]
    assert stream.started
    assert stream.end()[0].finish is Finish.TOOL_CALLS


def calls_of(*deltas: dict[str, Any]) -> list[ToolCall]:
    events = [event(choices=[{"index": 0, "delta": {"tool_calls": [delta]}}]) for delta in deltas]
    return [call for output in read(ResponseStream(["a"]), *events) for call in output.tool_calls]


def function(name: str | None = None, arguments: str | None = None) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


@pytest.mark.parametrize("index", [{"index": 0}, {}, {"index": None}])
def test_calls_that_a_server_gives_one_index_are_told_apart_by_their_ids(index: dict[str, Any]) -> None:
    """As Ollama does, each call whole in a chunk of its own."""
    found = calls_of(
        {**index, "id": "c1", "function": function("add", '{"a": 1}')},
        {**index, "id": "c2", "function": function("add", '{"a": ')},
        {**index, "function": function(arguments="2}")},
    )
    assert found == [
        ToolCall(0, "c1", "add", '{"a": 1}'),
        ToolCall(1, "c2", "add", '{"a": '),
        ToolCall(1, arguments="2}"),
    ]


def test_a_call_begins_once_whatever_a_server_repeats() -> None:
    """Some repeat id and name in every chunk, or make an id for each; some give a call none."""
    found = calls_of(
        {"index": 2, "id": "c1", "function": function("add", "{")},
        {"index": 2, "id": "c1", "function": function("add", '"a"')},
        {"index": 2, "id": "other", "function": function(arguments=": 1}")},
        {"index": 3, "id": "", "function": function("sub", "{}")},
    )
    assert found[:3] == [
        ToolCall(0, "c1", "add", "{"),
        ToolCall(0, "", "", '"a"'),
        ToolCall(0, "", "", ": 1}"),
    ]
    assert found[3].id
    assert (found[3].index, found[3].name) == (1, "sub")


@pytest.mark.parametrize("count", [-1, 1 << 32, 1 << 70])
def test_counts_that_cannot_be_are_as_good_as_none(count: int) -> None:
    """A message to the gateway can't hold them: the link would break, and with it all answers."""
    usage = {
        "prompt_tokens": count,
        "completion_tokens": count,
        "prompt_tokens_details": {"cached_tokens": count},
        "completion_tokens_details": {"reasoning_tokens": count},
    }
    for names in (("a",), ("a", "b")):
        stream = ResponseStream(names)
        read(
            stream,
            *(piece("x", at, "stop") for at in range(len(names))),
            event(choices=[], usage=usage),
            DONE,
        )
        assert [each.completion_tokens for each in stream.end()] == [1] * len(names)
        assert (stream.prompt_tokens, stream.cached_tokens) == (0, None)


def test_nulls_in_the_place_of_lists_are_empty_lists() -> None:
    """As servers in Go write them."""
    stream = ResponseStream(["a"])
    told = {"content": [{"token": "x", "logprob": -1.0, "top_logprobs": None}]}
    (output,) = read(stream, piece("x", finish="stop", logprobs=told))
    assert output.logprobs[0].top == ()
    assert read(stream, event(choices=None, usage={"prompt_tokens": 9, "completion_tokens": 1}), DONE) == []
    assert stream.end()[0].prompt_tokens == 9


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("stop", Finish.STOP),
        ("length", Finish.LENGTH),
        ("model_length", Finish.LENGTH),  # Mistral: the context is full
        ("eos_token", Finish.STOP),
        ("abort", Finish.FAILED),
        ("insufficient_system_resource", Finish.FAILED),  # DeepSeek
    ],
)
def test_reasons_to_end_are_ours_or_a_stop(reason: str, finish: Finish) -> None:
    stream = ResponseStream(["a"])
    read(stream, piece("x"), piece("", finish=reason), DONE)
    assert [each.finish for each in stream.end()] == [finish]


def test_counts_of_the_server_beyond_the_chunks_are_kept() -> None:
    stream = ResponseStream(["a", "b"])
    outputs = read(stream, piece("two tokens"), piece("x", 1), piece("", 0, "stop"), piece("", 1, "length"))
    assert [each.completion_tokens for each in outputs] == [1, 1]
    read(stream, USAGE, DONE)
    assert [(each.completion_tokens, each.finish) for each in stream.end()] == [
        (1, Finish.STOP),
        (4, Finish.LENGTH),
    ]


def test_counts_that_come_with_every_chunk_are_used_at_once() -> None:
    stream = ResponseStream(["a"])
    body = {"choices": [{"index": 0, "text": "abc"}], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}
    (output,) = read(stream, event(**body))
    assert (stream.tokens, stream.prompt_tokens, output.completion_tokens) == (3, 2, 3)


def test_thoughts_that_only_the_sum_of_tokens_includes_are_counted() -> None:
    """As xAI and Gemini count, whose thoughts cost as much as their words."""
    told = {"completion_tokens_details": {"reasoning_tokens": 386}}
    for details, reasoning_tokens in ((told, 386), ({}, 0)):
        stream = ResponseStream(["a"])
        usage = {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 399, **details}
        read(stream, piece("6"), piece("", finish="stop"), event(choices=[], usage=usage), DONE)
        (end,) = stream.end()
        assert (end.prompt_tokens, end.completion_tokens) == (12, 387)
        assert end.reasoning_tokens == reasoning_tokens


def test_several_chunks_of_one_step_count_once_where_each_has_the_count() -> None:
    """As SGLang sends the name of a call, its arguments and what is left of them."""

    def chunk(tokens: int, **delta: Any) -> bytes:
        return event(choices=[{"index": 0, "delta": delta}], usage={"completion_tokens": tokens})

    calls = [{"id": "c", "function": function("add", "")}, {"function": function(arguments="{}")}]
    stream = ResponseStream(["a"], delivered=2)
    counted = [
        output.completion_tokens
        for part in (
            chunk(0, role="assistant", content=""),
            chunk(4, reasoning_content="so"),
            chunk(4, content="I add"),
            *(chunk(9, tool_calls=[each]) for each in calls),
            chunk(10, content="."),
        )
        for output in stream.feed(part)
    ]
    assert counted == [6, 6, 11, 11, 12]


@pytest.mark.parametrize(
    "parts",
    [
        [piece("x")],  # no end
        [piece("x"), DONE],  # no finish
        [b"data: {nonsense\n\n"],
        [b'data: {"choices": 7}\n\n'],
        [b'data: {"choices": [{"stop_reason": ' + b"[" * 10_000 + b"\n\n"],
        [b"data: \xff\xfe\n\n"],
        [b'data: {"choices": [{"text": "\xff"}]}\n\n'],
        [event(error={"message": "out of memory"})],
        [piece("x", index=1)],
        [b"data: " + b"x" * (MAX_EVENT_BYTES + 1)],
    ],
)
def test_what_is_no_whole_answer_is_garbage(parts: list[bytes]) -> None:
    stream = ResponseStream(["a"])
    with pytest.raises(MalformedStream):
        read(stream, *parts)
        stream.end()


@pytest.mark.parametrize("last", [b"", b"\n\n", b"\n\ndata: [DO"])
def test_a_last_line_needs_no_end(last: bytes) -> None:
    stream = ResponseStream(["a"])
    outputs = read(stream, piece("x"), piece("y", finish="stop").rstrip() + last) + stream.end()
    assert (text(outputs), outputs[-1].finish) == ("xy", Finish.STOP)


def test_a_failure_in_the_stream_keeps_its_reason() -> None:
    with pytest.raises(MalformedStream, match="out of memory"):
        ResponseStream(["a"]).feed(event(error={"message": "out of memory"}))
    assert ResponseStream(["a"]).feed(event(choices=[], error=None)) == []


def test_a_failure_in_a_line_of_its_own_is_read_as_llama_cpp_writes_it() -> None:
    said = b'error: {"code":400,"message":"no room","type":"exceed_context_size_error"}\n\n'
    with pytest.raises(FailedStream) as failed:
        read(ResponseStream(["a"]), said + DONE)
    assert json.loads(failed.value.error)["message"] == "no room"


def test_what_came_before_a_failure_in_one_read_is_told_before_it() -> None:
    stream = ResponseStream(["a"])
    assert text(stream.feed(piece("x") + event(error={"message": "out of memory"}) + piece("y"))) == "x"
    assert stream.done
    with pytest.raises(MalformedStream, match="out of memory"):
        stream.end()


def test_log_probabilities_of_chats_and_of_completions() -> None:
    of_chat = {
        "token": "é",
        "bytes": [195, 169],
        "logprob": -0.5,
        "top_logprobs": [{"token": "e", "logprob": -1}],
    }
    stream = ResponseStream(["a"])
    (output,) = stream.feed(piece("é", logprobs={"content": [of_chat]}))
    (found,) = output.logprobs
    assert (found.token, found.raw, found.logprob, found.top[0].token) == ("é", "é".encode(), -0.5, "e")
    of_text = {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0], "top_logprobs": [{"a": -1.0}, None]}
    (output,) = stream.feed(event(choices=[{"index": 0, "text": "ab", "logprobs": of_text}]))
    assert [each.logprob for each in output.logprobs] == [-1.0, -2.0]
    assert output.completion_tokens == 3


def test_an_empty_list_of_log_probabilities_is_no_token() -> None:
    """It comes with the role before the first token, as OpenAI writes it, or with the finish."""
    empty: dict[str, Any] = {"content": [], "refusal": None}
    told: dict[str, Any] = {"content": [{"token": "x", "logprob": -1.0, "top_logprobs": []}]}
    stream = ResponseStream(["a"])
    assert read(stream, piece("", logprobs=empty)) == []
    assert not stream.started
    read(stream, piece("x", logprobs=told), piece("", logprobs=told))  # the second: a part of a character
    read(stream, piece("", finish="stop", logprobs=empty))
    read(stream, event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 2}), DONE)
    assert stream.end()[0].completion_tokens == 2


@pytest.mark.parametrize("figure", [-1, 2**40])
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens"])
def test_a_count_that_is_none_ends_no_link(name: str, figure: int) -> None:
    """No message holds it: with the link, all other answers of the site ended."""
    usage: dict[str, Any] = {"prompt_tokens": 9, "completion_tokens": 5}
    if name in usage:
        usage[name] = figure
    else:
        kind = "prompt" if name == "cached_tokens" else "completion"
        usage[f"{kind}_tokens_details"] = {name: figure}
    stream = ResponseStream(["a"])
    outputs = read(stream, piece("a", finish="stop"), event(choices=[], usage=usage), DONE) + stream.end()
    counts = [stream.cached_tokens or 0]
    for each in outputs:
        counts += [each.prompt_tokens, each.completion_tokens, each.reasoning_tokens]
    assert text(outputs) == "a"
    assert all(0 <= each < 2**32 for each in counts)


@pytest.mark.parametrize(
    "part",
    [
        {"delta": {"tool_calls": [{"index": -1}]}},
        {"delta": {"content": "a"}, "logprobs": {"content": [{"token": "a", "bytes": [300]}]}},
    ],
)
def test_a_place_or_a_byte_that_is_none_breaks_the_answer_alone(part: dict[str, Any]) -> None:
    with pytest.raises(MalformedStream):
        read(ResponseStream(["a"]), event(choices=[{"index": 0, **part}]))


ABSURD = st.one_of(st.integers(-(2**70), 2**70), st.sampled_from([-1, 2**32, 2**63]))


@given(ABSURD, ABSURD, ABSURD, ABSURD)
def test_absurd_counts_fit_the_link(prompt: int, completion: int, cached: int, of_it: int) -> None:
    """One that did not would end the link, and with it every answer of the site."""
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": of_it},
    }
    for choices in (["a"], ["a", "b"]):
        stream = ResponseStream(choices, delivered=3)
        ends = [
            {"index": at, "delta": {"content": "x"}, "finish_reason": "stop"} for at in range(len(choices))
        ]
        outputs = read(stream, event(choices=ends, usage=usage), DONE)
        for each in (*outputs, *stream.end()):
            pb.Delta(completion_tokens=each.completion_tokens, reasoning_tokens=each.reasoning_tokens)
            pb.Accepted(prompt_tokens=each.prompt_tokens)
        pb.Timings(cached_prompt_tokens=stream.cached_tokens or 0)


@pytest.mark.parametrize("index", [-1, 2**32])
def test_a_call_of_no_possible_number_is_malformed(index: int) -> None:
    call = {"index": index, "id": "c", "function": {"name": "f", "arguments": ""}}
    with pytest.raises(MalformedStream):
        ResponseStream(["a"]).feed(event(choices=[{"index": 0, "delta": {"tool_calls": [call]}}]))


@pytest.mark.parametrize("byte", [-1, 256])
def test_log_probabilities_of_bytes_that_are_none_are_malformed(byte: int) -> None:
    logprobs = {"content": [{"token": "x", "logprob": -0.5, "bytes": [byte]}]}
    with pytest.raises(MalformedStream):
        ResponseStream(["a"]).feed(piece("x", logprobs=logprobs))


def test_a_last_line_with_an_error_after_the_end_is_none() -> None:
    """Raised from `end`, it left the request in its slot."""
    stream = ResponseStream(["a"])
    stream.feed(piece("x", 0, "stop") + b'data: {"error": {"message": "late"}}')
    assert [each.finish for each in stream.end()] == [Finish.STOP]
