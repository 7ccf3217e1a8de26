"""Encodes tool calls in OpenAI's format: part by part in chunks, merged in a whole message."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.domain import ToolCall


def tool_call_chunk(part: ToolCall) -> dict[str, object]:
    """Encode one entry of a chunk's `delta.tool_calls`: id, type and name come once, when the call begins."""
    if not part.id:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}


def merge_calls(parts: Iterable[ToolCall]) -> list[ToolCall]:
    """Merge the parts of calls into whole calls, in order."""
    calls: dict[int, ToolCall] = {}
    for part in parts:
        call = calls.get(part.index, ToolCall(part.index))
        calls[part.index] = ToolCall(
            part.index, call.id or part.id, call.name or part.name, call.arguments + part.arguments
        )
    return [call for _, call in sorted(calls.items())]


def merge_tool_calls(parts: Iterable[ToolCall]) -> list[dict[str, object]]:
    """Merge the parts of calls into a message's `tool_calls`, in order."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in merge_calls(parts)
    ]
