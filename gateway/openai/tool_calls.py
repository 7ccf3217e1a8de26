"""Encodes tool calls in OpenAI's format: part by part in chunks, merged in a whole message."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from gateway.domain import ToolCall
from gateway.openai.custom_tools import custom_input


def tool_call_chunk(part: ToolCall) -> dict[str, object]:
    """Encode one entry of a chunk's `delta.tool_calls`: id, type and name come once, when the call begins."""
    if not part.id:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}


def parts_of_earlier_call(parts: Sequence[ToolCall]) -> int:
    """Return the number of leading parts of a delta that continue a call of an earlier delta.

    A stream that writes one item after the other writes these parts before the delta's text.
    """
    return next((number for number, part in enumerate(parts) if part.id), len(parts))


class CustomCalls:
    """The calls of custom tools in one answer. The input of a call is known only once it is complete."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._parts: dict[tuple[int, int], list[str]] = {}  # by choice and call

    def chunks(self, choice: int, parts: Iterable[ToolCall]) -> list[dict[str, object]]:
        """Return the entries of a chunk's `delta.tool_calls`, possibly none."""
        chunks = []
        for part in parts:
            if part.name in self._names and part.id:
                self._parts[choice, part.index] = [part.arguments]
                custom = {"name": part.name, "input": ""}
                chunks.append({"index": part.index, "id": part.id, "type": "custom", "custom": custom})
            elif (choice, part.index) in self._parts:
                self._parts[choice, part.index].append(part.arguments)
            else:
                chunks.append(tool_call_chunk(part))
        return chunks

    def end(self, choice: int) -> list[dict[str, object]]:
        """Return the entries with the inputs of a choice that has ended, and forget its calls."""
        ended = [place for place in self._parts if place[0] == choice]
        inputs = [(place[1], custom_input("".join(self._parts.pop(place)))) for place in ended]
        return [{"index": index, "custom": {"input": text}} for index, text in inputs]


def merge_calls(parts: Iterable[ToolCall]) -> list[ToolCall]:
    """Merge the parts of calls into whole calls, in order."""
    calls: dict[int, list[ToolCall]] = {}
    for part in parts:
        calls.setdefault(part.index, []).append(part)
    return [
        ToolCall(
            index,
            next((part.id for part in of_call if part.id), ""),
            next((part.name for part in of_call if part.name), ""),
            "".join(part.arguments for part in of_call),
        )
        for index, of_call in sorted(calls.items())
    ]


def merge_tool_calls(parts: Iterable[ToolCall], custom: Collection[str] = ()) -> list[dict[str, object]]:
    """Merge the parts of calls into a message's `tool_calls`, in order. `custom`: names of custom tools."""
    return [
        {
            "id": call.id,
            "type": "custom",
            "custom": {"name": call.name, "input": custom_input(call.arguments)},
        }
        if call.name in custom
        else {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in merge_calls(parts)
    ]
