"""Laws of encoding: the joined chunks of an answer equal its unary body, however it is cut into pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import AnswerEvent, Delta, Finish, Opening, TokenLogprob, Usage
from gateway.openai.logprobs import LogprobLists
from gateway.openai.request import StreamOptions
from gateway.openai.response_schema import CHAT, TEXT, ResponseHead, ResponseSchema
from gateway.openai.stream_response import ChunkEncoder
from gateway.openai.unary_response import collect

CHOICES = 3
HEAD = ResponseHead("id-1", 1_750_000_000, 'mo"del', "rev")
OPENING = Opening("alpha", "aws", "r", 1, 0.0, 7, "rev")

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
numbers = st.floats(-50, 0) | st.just(float("-inf"))
tokens = st.builds(
    lambda t, p: TokenLogprob(t, t.encode(), p, (TokenLogprob("z", b"z", -0.5),)), texts, numbers
)
deltas = st.tuples(st.integers(0, CHOICES - 1), texts, st.lists(tokens, max_size=2), texts, texts)


@st.composite
def answers(draw: Any) -> list[AnswerEvent]:
    """Draw any interleaving of the choices; each ends once, with or without text in its last delta."""
    counts = [0] * CHOICES
    pieces: list[AnswerEvent] = [OPENING]
    for index, words, drawn, thought, refusal in draw(st.lists(deltas, max_size=12)):
        counts[index] += 1
        beside = {"reasoning": thought, "refusal": refusal}
        pieces.append(Delta(index, words, counts[index], logprobs=tuple(drawn), **beside))
    for index in draw(st.permutations(range(CHOICES))):
        finish = draw(st.sampled_from(Finish))
        pieces.append(Delta(index, draw(texts), counts[index] + 1, finish=finish))
    return [*pieces, Usage(7, sum(counts) + CHOICES)]


def streamed(
    shape: ResponseSchema, pieces: list[AnswerEvent], streaming: StreamOptions
) -> list[dict[str, Any]]:
    chunks = ChunkEncoder(shape, HEAD, CHOICES, streaming, OPENING.prompt_tokens)
    frames = b"".join(chunks.encode(piece) for piece in pieces).decode().split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: {") for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def whole(shape: ResponseSchema, pieces: list[AnswerEvent], with_logprobs: bool) -> dict[str, Any]:
    async def replay() -> AsyncIterator[AnswerEvent]:
        for piece in pieces:
            yield piece

    body: dict[str, Any] = json.loads(
        asyncio.run(collect(replay(), CHOICES, lambda: LogprobLists(shape.logprobs))).body(
            shape, HEAD, with_logprobs
        )
    )
    return body


def text_of(choice: dict[str, Any]) -> str:
    """Return the text of a choice of either endpoint, in a unary body or in a chunk."""
    words: str = choice.get("text") or choice.get("message", choice.get("delta", {})).get("content", "")
    return words or ""


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join chunks by index as a client does: text, finish reasons, the entries of every logprobs list."""
    grown: list[dict[str, Any]] = [{"text": "", "finish": [], "logprobs": {}} for _ in range(CHOICES)]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        into = grown[choice["index"]]
        into["text"] += text_of(choice)
        into["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
        for name, values in (choice["logprobs"] or {}).items():
            into["logprobs"][name] = into["logprobs"].get(name, []) + (values or [])
    return grown


@pytest.mark.parametrize("shape", [CHAT, TEXT])
@given(pieces=answers())
def test_the_pieces_joined_equal_the_whole(shape: ResponseSchema, pieces: list[AnswerEvent]) -> None:
    body = whole(shape, pieces, with_logprobs=True)
    for choice, into in zip(
        body["choices"], joined(streamed(shape, pieces, StreamOptions(True))), strict=True
    ):
        assert into["text"] == text_of(choice)
        assert into["finish"] == [choice["finish_reason"]]
        entries = {name: values or [] for name, values in choice["logprobs"].items()}
        assert {name: into["logprobs"].get(name, []) for name in entries} == entries


@given(pieces=answers())
def test_what_is_said_beside_the_text_is_told_under_every_name(pieces: list[AnswerEvent]) -> None:
    chunks = streamed(CHAT, pieces, StreamOptions(True))
    said = [choice for chunk in chunks for choice in chunk["choices"]]
    for choice in whole(CHAT, pieces, with_logprobs=False)["choices"]:
        own = [each["delta"] for each in said if each["index"] == choice["index"]]
        for name in ("reasoning", "reasoning_content", "refusal"):
            joined = "".join(each.get(name, "") for each in own)
            assert joined == (choice["message"].get(name) or "")


@given(pieces=answers())
def test_text_completions_say_their_text_alone(pieces: list[AnswerEvent]) -> None:
    said = [choice for chunk in streamed(TEXT, pieces, StreamOptions(True)) for choice in chunk["choices"]]
    assert said and all(each.keys() == {"index", "text", "logprobs", "finish_reason"} for each in said)


@pytest.mark.parametrize("shape", [CHAT, TEXT])
@given(pieces=answers())
def test_usage_only_grows_and_ends_at_the_total(shape: ResponseSchema, pieces: list[AnswerEvent]) -> None:
    chunks = streamed(shape, pieces, StreamOptions(True, include_usage=True, continuous_usage=True))
    totals = [chunk["usage"]["total_tokens"] for chunk in chunks]
    assert totals == sorted(totals)
    assert totals[-1] == whole(shape, pieces, with_logprobs=False)["usage"]["total_tokens"]
    assert chunks[-1]["choices"] == []


@pytest.mark.parametrize("shape", [CHAT, TEXT])
@given(pieces=answers())
def test_every_choice_ends_in_its_last_chunk(shape: ResponseSchema, pieces: list[AnswerEvent]) -> None:
    last = {c["index"]: c for chunk in streamed(shape, pieces, StreamOptions(True)) for c in chunk["choices"]}
    assert all(choice["finish_reason"] for choice in last.values())
    assert len(last) == CHOICES


def test_a_site_without_a_fingerprint_has_no_such_field() -> None:
    assert "system_fingerprint" not in ResponseHead("i", 1, "m", "").fields("x")
