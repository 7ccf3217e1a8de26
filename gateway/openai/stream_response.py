"""Encodes an answer as server-sent chunks. Constant parts are encoded once; a delta only encodes its text."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from gateway.domain import AnswerEvent, Delta, Finish, Opening, Usage
from gateway.openai.error_body import ErrorResponse
from gateway.openai.frames import frame, one_line
from gateway.openai.logprobs import text_chars
from gateway.openai.request import StreamOptions
from gateway.openai.response_schema import ResponseHead, ResponseSchema, reasoning_fields, usage_fields
from gateway.openai.tool_calls import CustomCalls, tool_call_chunk

_json = msgspec.json.Encoder().encode
_FINISHES = {finish: b',"logprobs":null,"finish_reason":"%s"}' % finish.value.encode() for finish in Finish}
_UNFINISHED = b',"logprobs":null,"finish_reason":null}'


def _encode(value: object) -> bytes:
    encoded = _json(value)
    return encoded if encoded.isascii() else one_line(encoded)


class ChunkEncoder:
    """Encodes pieces as frames, in which `usage` is absent, null until the last chunk, or cumulative."""

    def __init__(
        self,
        schema: ResponseSchema,
        head: ResponseHead,
        choices: int,
        stream_options: StreamOptions,
        prompt_tokens: int,
        *,
        custom_tools: Collection[str] = (),
    ) -> None:
        self._schema = schema
        self._stream_options = stream_options
        self._prompt_tokens = prompt_tokens
        self._start = b"data: " + _encode(head.fields(schema.chunk_object_type))[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if stream_options.include_usage else b"]}\n\n"
        self._choice = [self._start + b'{"index":%d,' % index for index in range(choices)]
        self._text = [choice + schema.text_prefix for choice in self._choice]
        continuous = stream_options.continuous_usage
        self._text_end = schema.text_suffix + _UNFINISHED + (b"" if continuous else self._end)
        self._tokens = [0] * choices
        self._unfinished = set(range(choices))
        self._has_usage = False
        self._offset_chars = [0] * choices
        self._custom = CustomCalls(custom_tools) if custom_tools else None

    @property
    def complete(self) -> bool:
        """Return whether every choice has a finish reason and the usage was encoded."""
        return self._has_usage and not self._unfinished

    def encode(self, piece: AnswerEvent) -> bytes:
        """Return the frames of one piece, possibly none."""
        if isinstance(piece, Delta):
            return self._encode_delta(piece)
        if isinstance(piece, Opening):
            return self._encode_opening()
        return self._encode_usage(piece)

    def encode_error(self, error: ErrorResponse, request_id: str) -> bytes:
        return frame(error.body())

    def _encode_opening(self) -> bytes:
        """Encode the role of each choice, before any text. Text completions have none."""
        if not self._schema.first:
            return b""
        return b"".join(choice + self._schema.first + _UNFINISHED + self._suffix() for choice in self._choice)

    def _encode_delta(self, delta: Delta) -> bytes:
        self._tokens[delta.index] = delta.completion_tokens
        frames = b""
        if delta.reasoning or delta.refusal:
            frames = self._encode_beside_text(delta)
        if delta.logprobs or delta.prompt_logprobs:
            frames += self._encode_logprobs(delta)
        elif delta.text:
            frames += self._text[delta.index] + _encode(delta.text) + self._text_end
            if self._stream_options.continuous_usage:
                frames += self._suffix()
        if delta.tool_calls:
            frames += self._encode_tool_calls(delta)
        if delta.finish is not None:
            if self._custom is not None:
                frames += self._encode_calls(delta.index, self._custom.end(delta.index))
            self._unfinished.discard(delta.index)
            frames += self._choice[delta.index] + self._schema.last + _FINISHES[delta.finish] + self._suffix()
        return frames

    def _encode_beside_text(self, delta: Delta) -> bytes:
        """Encode reasoning and a refusal. Text completions have no fields for them."""
        if not self._schema.first:
            return b""
        fields: dict[str, str] = reasoning_fields(delta.reasoning) if delta.reasoning else {}
        if delta.refusal:
            fields["refusal"] = delta.refusal
        choice = self._choice[delta.index] + b'"delta":' + _encode(fields)
        return choice + _UNFINISHED + self._suffix()

    def _encode_logprobs(self, delta: Delta) -> bytes:
        tokens = delta.prompt_logprobs + delta.logprobs
        logprobs = _encode(self._schema.logprobs(tokens, self._offset_chars[delta.index]))
        self._offset_chars[delta.index] += sum(map(text_chars, tokens))
        text = self._text[delta.index] + _encode(delta.text) + self._schema.text_suffix
        return text + b',"logprobs":' + logprobs + b',"finish_reason":null}' + self._suffix()

    def _encode_tool_calls(self, delta: Delta) -> bytes:
        if self._custom is not None:
            return self._encode_calls(delta.index, self._custom.chunks(delta.index, delta.tool_calls))
        return self._encode_calls(delta.index, [tool_call_chunk(call) for call in delta.tool_calls])

    def _encode_calls(self, index: int, calls: list[dict[str, object]]) -> bytes:
        if not calls:
            return b""
        choice = self._choice[index] + b'"delta":{"tool_calls":' + _encode(calls) + b"}"
        return choice + _UNFINISHED + self._suffix()

    def _encode_usage(self, usage: Usage) -> bytes:
        self._has_usage = True
        if not self._stream_options.include_usage:
            return b""
        return self._start + b'],"usage":' + _encode(usage_fields(usage)) + b"}\n\n"

    def _suffix(self) -> bytes:
        if not self._stream_options.continuous_usage:
            return self._end
        so_far = Usage(self._prompt_tokens, sum(self._tokens))
        return b'],"usage":' + _encode(usage_fields(so_far)) + b"}\n\n"
