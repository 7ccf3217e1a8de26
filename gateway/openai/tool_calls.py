"""Calls of functions in OpenAI's shape: piece by piece in chunks, joined in a whole message."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.domain import ToolCall


def call_news(news: ToolCall) -> dict[str, object]:
    """One entry of a chunk's `delta.tool_calls`: id, type and name come once, when the call begins."""
    if not news.id:
        return {"index": news.index, "function": {"arguments": news.arguments}}
    function = {"name": news.name, "arguments": news.arguments}
    return {"index": news.index, "id": news.id, "type": "function", "function": function}


def whole_calls(news: Iterable[ToolCall]) -> list[dict[str, object]]:
    """A message's `tool_calls`, in order."""
    joined: dict[int, ToolCall] = {}
    for each in news:
        known = joined.get(each.index, ToolCall(each.index))
        joined[each.index] = ToolCall(
            each.index, known.id or each.id, known.name or each.name, known.arguments + each.arguments
        )
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for _, call in sorted(joined.items())
    ]
