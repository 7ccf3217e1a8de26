"""Encodes an answer as the events of a streamed message. A block ends before the next one begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from gateway.anthropic.message_body import (
    error_fields,
    message_fields,
    stop_fields,
    text_block,
    thinking_block,
    tool_block,
    usage_fields,
)
from gateway.domain import AnswerEvent, Delta, Finish, Opening, ToolCall, Usage
from gateway.openai.error_body import ErrorResponse, incomplete_answer
from gateway.openai.frames import named_frame, one_line
from gateway.openai.response_schema import ResponseHead
from gateway.openai.tool_calls import parts_of_earlier_call

_json = msgspec.json.Encoder().encode


class _BlockKind(NamedTuple):
    """A kind of content block: the type of its deltas, their field, its JSON."""

    delta: str
    field: str
    render: Callable[[str], dict[str, object]]


_TEXT: Final = _BlockKind("text_delta", "text", text_block)
_THINKING: Final = _BlockKind("thinking_delta", "thinking", thinking_block)
_TOOL: Final = _BlockKind("input_json_delta", "partial_json", lambda name: tool_block("", name, {}))


class MessageEncoder:
    """Encodes the events of one answer."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._blocks = 0
        self._kind: _BlockKind | None = None  # of the open block
        self._delta_head = b""  # a delta of the open block, up to its text
        self._call_index = 0
        self._finish: Finish | None = None
        self._stop_sequence = ""
        self._has_usage = False

    @property
    def complete(self) -> bool:
        return self._has_usage and self._finish is not None

    def encode(self, piece: AnswerEvent) -> bytes:
        if isinstance(piece, Delta):
            return self._encode_delta(piece)
        if isinstance(piece, Opening):
            usage = usage_fields(Usage(piece.prompt_tokens, 0))
            return _event("message_start", message=message_fields(self._head) | {"usage": usage})
        return self._encode_usage(piece)

    def encode_error(self, error: ErrorResponse, request_id: str) -> bytes:
        return named_frame("error", _json(error_fields(error, request_id)))

    def _encode_delta(self, delta: Delta) -> bytes:
        earlier = parts_of_earlier_call(delta.tool_calls)
        frames = b"".join(map(self._encode_call, delta.tool_calls[:earlier]))
        if delta.reasoning:
            frames += self._encode_text(_THINKING, delta.reasoning)
        if text := delta.text + delta.refusal:
            frames += self._encode_text(_TEXT, text)
        for part in delta.tool_calls[earlier:]:
            frames += self._encode_call(part)
        if delta.finish is not None:
            self._finish, self._stop_sequence = delta.finish, delta.stop_sequence
            if not self._blocks:
                frames += self._start(_TEXT, text_block(""))
            frames += self._close()
        return frames

    def _encode_text(self, kind: _BlockKind, text: str) -> bytes:
        frames = b""
        if self._kind is not kind:
            frames = self._close() + self._start(kind, kind.render(""))
        return frames + self._delta_head + one_line(_json(text)) + b"}}\n\n"

    def _encode_call(self, part: ToolCall) -> bytes:
        frames = b""
        if part.id:
            frames = self._close()
            frames += self._start(_TOOL, tool_block(part.id, part.name, {}))
            self._call_index = part.index
        if self._kind is not _TOOL or self._call_index != part.index:
            raise incomplete_answer()  # continues a call that is already complete
        if not part.arguments:
            return frames
        return frames + self._delta_head + one_line(_json(part.arguments)) + b"}}\n\n"

    def _encode_usage(self, usage: Usage) -> bytes:
        self._has_usage = True
        if self._finish is None:
            raise incomplete_answer()
        why = stop_fields(self._finish, self._stop_sequence)
        delta = {**why, "stop_details": None, "container": None}
        ended = _event("message_delta", delta=delta, usage=usage_fields(usage))
        return ended + _event("message_stop")

    def _start(self, kind: _BlockKind, block: dict[str, object]) -> bytes:
        index, self._kind = self._blocks, kind
        self._blocks += 1
        head = {"type": "content_block_delta", "index": index, "delta": {"type": kind.delta}}
        start = _json(head)[:-2] + b',"%s":' % kind.field.encode()
        self._delta_head = b"event: content_block_delta\ndata: " + start
        return _event("content_block_start", index=index, content_block=block)

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        self._kind = None
        return _event("content_block_stop", index=self._blocks - 1)


def _event(kind: str, **fields: object) -> bytes:
    return named_frame(kind, _json({"type": kind, **fields}))
