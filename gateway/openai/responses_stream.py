"""Encodes an answer as the events of a streamed response, numbered without a gap.

Output items do not overlap: each is closed before the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from gateway.domain import AnswerEvent, Delta, Finish, Opening, TokenLogprob, ToolCall, Usage
from gateway.openai.custom_tools import custom_input
from gateway.openai.error_body import ErrorResponse, incomplete_answer
from gateway.openai.frames import named_frame, one_line
from gateway.openai.logprobs import TextLogprobs, chat_logprobs
from gateway.openai.request import GenerationRequest
from gateway.openai.response_schema import ResponseHead
from gateway.openai.responses_body import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    INCOMPLETE_REASONS,
    Item,
    call_item,
    call_kind,
    item_id,
    output_text,
    part_item,
    reasoning_text,
    refusal_part,
    response_fields,
)
from gateway.openai.responses_tools import CalledTool, called_tools
from gateway.openai.tool_calls import parts_of_earlier_call

_json = msgspec.json.Encoder().encode


class _PartKind(NamedTuple):
    """A kind of content part: its item's type, its events' prefix, the last event's text field, its JSON."""

    item: str
    event: str
    field: str
    render: Callable[[str], Item]


_TEXT: Final = _PartKind("message", "response.output_text", "text", output_text)
_REFUSAL: Final = _PartKind("message", "response.refusal", "refusal", refusal_part)
_REASONING: Final = _PartKind("reasoning", "response.reasoning_text", "text", reasoning_text)


NO_TOOL: Final = CalledTool("")


@dataclass(slots=True)
class _OpenItem:
    """The item that is being written: one content part, or a call. `delta_head` begins its delta events."""

    id: str
    index: int
    delta_head: bytes
    kind: _PartKind | None = None
    call: ToolCall | None = None
    tool: CalledTool = NO_TOOL
    parts: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)  # encoded, each without its brackets


class ResponseEncoder:
    """Encodes the events of one answer. `_output` holds the items that are complete."""

    def __init__(self, request: GenerationRequest, head: ResponseHead) -> None:
        self._request = request
        self._head = head
        self._tools = called_tools(request.repeated["tools"])
        self._output: list[Item] = []
        self._open: _OpenItem | None = None
        self._logprobs = TextLogprobs()
        self._number = 0
        self._finish: Finish | None = None
        self._has_usage = False

    @property
    def complete(self) -> bool:
        return self._has_usage and self._finish is not None

    def encode(self, piece: AnswerEvent) -> bytes:
        if isinstance(piece, Delta):
            return self._encode_delta(piece)
        if isinstance(piece, Opening):
            response = self._response(IN_PROGRESS)
            created = self._event("response.created", response=response)
            return created + self._event("response.in_progress", response=response)
        return self._encode_usage(piece)

    def encode_error(self, error: ErrorResponse, request_id: str) -> bytes:
        frames = self._close(INCOMPLETE)
        fields = response_fields(self._request, self._head, "failed", self._output, error=error)
        return frames + self._event("response.failed", response=fields)

    # ---- events of the answer

    def _encode_delta(self, delta: Delta) -> bytes:
        earlier = parts_of_earlier_call(delta.tool_calls)
        frames = b"".join(map(self._encode_call, delta.tool_calls[:earlier]))
        if delta.reasoning:
            frames += self._encode_part(_REASONING, delta.reasoning)
        logprobs = self._logprobs.of_text(delta)
        if delta.text or logprobs:
            frames += self._encode_part(_TEXT, delta.text, logprobs)
        if delta.refusal:
            frames += self._encode_part(_REFUSAL, delta.refusal)
        for part in delta.tool_calls[earlier:]:
            frames += self._encode_call(part)
        if delta.finish is not None:
            self._finish = delta.finish
            if self._open is None and not self._output:
                frames += self._open_part(_TEXT)
            frames += self._close(self._status())
        return frames

    def _encode_part(self, kind: _PartKind, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        frames = b""
        if self._open is None or self._open.kind is not kind:
            frames = self._close(COMPLETED) + self._open_part(kind)
        item = self._open
        assert item is not None, "a part was opened"
        item.parts.append(text)
        body = _json(text)
        if kind is _TEXT:
            encoded = _json(chat_logprobs(logprobs)["content"])
            if logprobs:
                item.logprobs.append(encoded[1:-1])
            body += b',"logprobs":' + encoded
        return frames + item.delta_head + b"%d" % self._next() + b',"delta":' + one_line(body) + b"}\n\n"

    def _encode_call(self, part: ToolCall) -> bytes:
        frames = b""
        if part.id:
            frames = self._close(COMPLETED) + self._open_call(part)
        item = self._open
        if item is None or item.call is None or item.call.index != part.index:
            raise incomplete_answer()  # continues a call that is already complete
        if not part.arguments:
            return frames
        item.parts.append(part.arguments)
        if item.tool.custom:
            return frames  # the input is known only at the end of the call
        arguments = one_line(_json(part.arguments))
        return frames + item.delta_head + b"%d" % self._next() + b',"delta":' + arguments + b"}\n\n"

    def _encode_usage(self, usage: Usage) -> bytes:
        self._has_usage = True
        fields = response_fields(
            self._request, self._head, self._status(), self._output, usage=usage, finish=self._finish
        )
        return self._event(f"response.{self._status()}", response=fields)

    # ---- items

    def _open_part(self, kind: _PartKind) -> bytes:
        index = len(self._output)
        identity = item_id(kind.item, self._head, index)
        delta_head = _delta_head(f"{kind.event}.delta", identity, index, content_index=0)
        self._open = _OpenItem(identity, index, delta_head, kind)
        item = part_item(identity, IN_PROGRESS, [], reasoning=kind is _REASONING)
        added = self._event("response.output_item.added", output_index=index, item=item)
        return added + self._event(
            "response.content_part.added",
            item_id=identity,
            output_index=index,
            content_index=0,
            part=kind.render(""),
        )

    def _open_call(self, part: ToolCall) -> bytes:
        index, tool = len(self._output), self._tools.get(part.name, CalledTool(part.name))
        identity = item_id(call_kind(tool), self._head, index)
        delta_head = _delta_head("response.function_call_arguments.delta", identity, index)
        call = ToolCall(part.index, part.id, part.name)
        self._open = _OpenItem(identity, index, delta_head, call=call, tool=tool)
        item = call_item(identity, IN_PROGRESS, call, tool)
        return self._event("response.output_item.added", output_index=index, item=item)

    def _close(self, status: str) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        text = "".join(item.parts)
        if item.call is None:
            done, finished = self._close_part(item, text, status)
        else:
            call = ToolCall(item.call.index, item.call.id, item.call.name, text)
            done, finished = self._close_call(item, call, status)
        self._output.append(finished)
        return done + self._event("response.output_item.done", output_index=item.index, item=finished)

    def _close_part(self, item: _OpenItem, text: str, status: str) -> tuple[bytes, Item]:
        kind = item.kind
        assert kind is not None, "an item that is no call has a content part"
        where = {"item_id": item.id, "output_index": item.index, "content_index": 0}
        fields: dict[str, object] = {kind.field: text}
        part = kind.render(text)
        if kind is _TEXT:
            fields["logprobs"] = part["logprobs"] = msgspec.Raw(b"[%b]" % b",".join(item.logprobs))
        done = self._event(f"{kind.event}.done", **where, **fields)
        done += self._event("response.content_part.done", **where, part=part)
        return done, part_item(item.id, status, [part], reasoning=kind is _REASONING)

    def _close_call(self, item: _OpenItem, call: ToolCall, status: str) -> tuple[bytes, Item]:
        where = {"item_id": item.id, "output_index": item.index}
        if item.tool.custom:
            value = custom_input(call.arguments)
            done = self._event("response.custom_tool_call_input.delta", **where, delta=value)
            done += self._event("response.custom_tool_call_input.done", **where, input=value)
        else:
            arguments = {"name": item.tool.name, "arguments": call.arguments}
            done = self._event("response.function_call_arguments.done", **where, **arguments)
        return done, call_item(item.id, status, call, item.tool)

    # ---- frames

    def _status(self) -> str:
        return INCOMPLETE if self._finish in INCOMPLETE_REASONS else COMPLETED

    def _response(self, status: str) -> dict[str, object]:
        return response_fields(self._request, self._head, status, self._output)

    def _next(self) -> int:
        number, self._number = self._number, self._number + 1
        return number

    def _event(self, kind: str, **fields: object) -> bytes:
        return named_frame(kind, _json({"type": kind, "sequence_number": self._next(), **fields}))


def _delta_head(kind: str, identity: str, output_index: int, **fields: object) -> bytes:
    """Return the frame of a delta up to its sequence number. That number and the delta follow."""
    body = {"type": kind, "item_id": identity, "output_index": output_index, **fields}
    return b"event: " + kind.encode() + b"\ndata: " + _json(body)[:-1] + b',"sequence_number":'
