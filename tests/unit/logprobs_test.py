"""Log probabilities are encoded as they come, once, and those of a response are of its text alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import pytest

from gateway.domain import AnswerEvent, Delta, Finish, TokenLogprob, Usage
from gateway.openai.fields import Fields, Problems
from gateway.openai.generation_format import CHAT_COMPLETIONS, COMPLETIONS, GenerationFormat
from gateway.openai.request import GenerationRequest
from gateway.openai.response_schema import ResponseHead
from gateway.openai.responses_format import RESPONSES
from gateway.openai.unary_response import collect
from tests.support.event_streams import response_events
from tests.support.fakes.edge import MODEL, OPENING

HEAD = ResponseHead("resp_q1", 1_750_000_000, MODEL, "rev-1", lambda: 1_750_000_002.5)
BODIES = {
    CHAT_COMPLETIONS: {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 1},
    COMPLETIONS: {"prompt": "Hi", "logprobs": 1},
    RESPONSES: {"input": "Hi", "top_logprobs": 1},
}
TOKENS = 20


class CountedReads(tuple[TokenLogprob, ...]):
    """The alternatives of a token, which count how often the token is encoded."""

    reads = 0

    def __iter__(self) -> Iterator[TokenLogprob]:
        self.reads += 1
        return super().__iter__()


def token_of(text: str) -> TokenLogprob:
    return TokenLogprob(text, text.encode(), -0.5, CountedReads([TokenLogprob("z", b"z", -1.5)]))


def reads_of(tokens: list[TokenLogprob]) -> list[int]:
    return [token.top.reads for token in tokens if isinstance(token.top, CountedReads)]


def read_request(api_format: GenerationFormat) -> GenerationRequest:
    problems = Problems()
    request = api_format.read(Fields({"model": MODEL, **BODIES[api_format]}, problems))
    problems.raise_any()
    return request


def whole(api_format: GenerationFormat, pieces: list[AnswerEvent], reads: list[TokenLogprob]) -> bytes:
    """Return the body of an answer, of whose tokens each was encoded before the last one came."""

    async def replay() -> AsyncIterator[AnswerEvent]:
        for piece in pieces:
            yield piece
        assert reads_of(reads) == [1] * len(reads)

    request = read_request(api_format)
    answer = asyncio.run(collect(replay(), 1, api_format.logprobs))
    body = api_format.body(request, HEAD, answer)
    assert isinstance(body, bytes)
    return body


@pytest.mark.parametrize("api_format", BODIES)
def test_nothing_is_left_to_encode_at_the_end_of_a_whole_answer(api_format: GenerationFormat) -> None:
    tokens = [token_of(f"t{number} ") for number in range(TOKENS)]
    deltas = [Delta(0, each.token, number, logprobs=(each,)) for number, each in enumerate(tokens, 1)]
    pieces = [OPENING, *deltas, Delta(0, "", TOKENS, finish=Finish.STOP), Usage(7, TOKENS)]
    assert whole(api_format, pieces, tokens).count(b'"z"') == TOKENS
    assert reads_of(tokens) == [1] * TOKENS


def test_the_last_events_of_a_response_encode_no_log_probability_again() -> None:
    tokens = [token_of(f"t{number} ") for number in range(TOKENS)]
    encoder = RESPONSES.encoder(read_request(RESPONSES), HEAD, 7)
    frames = encoder.encode(OPENING)
    for number, each in enumerate(tokens, 1):
        frames += encoder.encode(Delta(0, each.token, number, logprobs=(each,)))
    frames += encoder.encode(Delta(0, "", TOKENS, finish=Finish.STOP)) + encoder.encode(Usage(7, TOKENS))
    events = response_events(frames)
    shown = events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert [each["token"] for each in shown] == [each.token for each in tokens]
    assert reads_of(tokens) == [1] * TOKENS


def test_a_response_has_the_log_probabilities_of_its_text_not_of_its_reasoning() -> None:
    thought, text, end = token_of("Hm."), token_of("Hi"), token_of("!")
    pieces: list[AnswerEvent] = [
        OPENING,
        Delta(0, "", 1, logprobs=(thought,), reasoning="Hm."),
        Delta(0, "Hi", 2, logprobs=(text,)),
        Delta(0, "!", 3, logprobs=(end,), finish=Finish.STOP),
        Usage(7, 3),
    ]
    body = json.loads(whole(RESPONSES, pieces, [text, end]))
    (shown,) = body["output"][1]["content"]
    assert [each["token"] for each in shown["logprobs"]] == ["Hi", "!"]
    encoder = RESPONSES.encoder(read_request(RESPONSES), HEAD, 7)
    events = response_events(b"".join(map(encoder.encode, pieces)))
    assert events[-1]["response"]["output"] == body["output"]
