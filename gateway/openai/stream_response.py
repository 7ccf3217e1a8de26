"""An answer as server-sent chunks: what never changes is encoded once, a delta only encodes its text."""

from __future__ import annotations

import msgspec

from gateway.domain import Delta, Finish, Opening, Piece, Usage
from gateway.openai.frames import one_line
from gateway.openai.request import Streaming
from gateway.openai.shapes import Head, Shape, usage_fields
from gateway.openai.tool_calls import call_news

_json = msgspec.json.Encoder().encode
_FINISHES = {finish: b',"logprobs":null,"finish_reason":"%s"}' % finish.value.encode() for finish in Finish}
_UNFINISHED = b',"logprobs":null,"finish_reason":null}'


def _encode(value: object) -> bytes:
    return one_line(_json(value))


class Chunks:
    """Turns pieces into frames. Their `usage`: absent, null until the last chunk, or cumulative in each."""

    def __init__(
        self, shape: Shape, head: Head, choices: int, streaming: Streaming, prompt_tokens: int
    ) -> None:
        self._shape = shape
        self._streaming = streaming
        self._prompt_tokens = prompt_tokens
        self._start = b"data: " + _encode(head.fields(shape.chunk_object))[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if streaming.usage else b"]}\n\n"
        self._choice = [self._start + b'{"index":%d,' % index for index in range(choices)]
        self._text = [choice + shape.text_open for choice in self._choice]
        self._text_end = shape.text_close + _UNFINISHED
        self._tokens = [0] * choices
        self._unfinished = set(range(choices))
        self._counted = False
        self._offset_chars = [0] * choices

    @property
    def complete(self) -> bool:
        """Every choice has its finish, and the usage came."""
        return self._counted and not self._unfinished

    def first(self) -> bytes:
        """The role of each choice, before any text. Text completions have none."""
        if not self._shape.first:
            return b""
        return b"".join(choice + self._shape.first + _UNFINISHED + self._tail() for choice in self._choice)

    def of(self, piece: Piece) -> bytes:
        """The frames of one piece, possibly none."""
        if isinstance(piece, Delta):
            return self._of_delta(piece)
        if isinstance(piece, Opening):
            return self.first()
        return self._of_usage(piece)

    def _of_delta(self, delta: Delta) -> bytes:
        self._tokens[delta.index] = delta.completion_tokens
        frames = b""
        if delta.logprobs or delta.prompt_logprobs:
            frames = self._with_logprobs(delta)
        elif delta.text:
            frames = self._text[delta.index] + _encode(delta.text) + self._text_end + self._tail()
        if delta.tool_calls:
            frames += self._with_calls(delta)
        if delta.finish is not None:
            self._unfinished.discard(delta.index)
            frames += self._choice[delta.index] + self._shape.last + _FINISHES[delta.finish] + self._tail()
        return frames

    def _with_logprobs(self, delta: Delta) -> bytes:
        tokens = delta.prompt_logprobs + delta.logprobs
        logprobs = _encode(self._shape.logprobs(tokens, self._offset_chars[delta.index]))
        self._offset_chars[delta.index] += sum(len(token.token) for token in tokens)
        text = self._text[delta.index] + _encode(delta.text) + self._shape.text_close
        return text + b',"logprobs":' + logprobs + b',"finish_reason":null}' + self._tail()

    def _with_calls(self, delta: Delta) -> bytes:
        calls = _encode([call_news(call) for call in delta.tool_calls])
        choice = self._choice[delta.index] + b'"delta":{"tool_calls":' + calls + b"}"
        return choice + _UNFINISHED + self._tail()

    def _of_usage(self, usage: Usage) -> bytes:
        self._counted = True
        if not self._streaming.usage:
            return b""
        return self._start + b'],"usage":' + _encode(usage_fields(usage)) + b"}\n\n"

    def _tail(self) -> bytes:
        if not self._streaming.usage_in_each:
            return self._end
        so_far = Usage(self._prompt_tokens, sum(self._tokens))
        return b'],"usage":' + _encode(usage_fields(so_far)) + b"}\n\n"
