"""Functions that a model may call, and calls as they stream: plain values, shared by every part of a site.

Does not know how a model writes a call; `text/tool_format.py` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from site_engine.core.request import ToolCall


class ToolChoice(StrEnum):
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions a model may call, as OpenAI's tools array has them. `name` is the one it must call."""

    offered: tuple[Mapping[str, Any], ...]
    choice: ToolChoice = ToolChoice.AUTO
    name: str = ""
    single: bool = False

    @property
    def names(self) -> frozenset[str]:
        return frozenset(str(each["function"]["name"]) for each in self.offered)

    @property
    def forced(self) -> bool:
        return self.choice is not ToolChoice.AUTO

    @property
    def strict(self) -> bool:
        return any(each["function"].get("strict") for each in self.offered)

    @property
    def callable(self) -> tuple[Mapping[str, Any], ...]:
        functions = (each["function"] for each in self.offered)
        return tuple(each for each in functions if not self.name or each["name"] == self.name)


class Delivered(NamedTuple):
    """The part of a resumed answer that the client has; `argument_chars` are those of the last call begun."""

    chars: int = 0
    calls: int = 0
    argument_chars: int = 0


class ParsedText(NamedTuple):
    """Text of an answer without its calls of functions, and the calls."""

    text: str
    calls: tuple[ToolCall, ...]


def merge_tool_calls(deltas: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    """Merge neighbouring deltas of one call into one, in their order."""
    merged: list[ToolCall] = []
    for delta in deltas:
        if merged and merged[-1].index == delta.index and not delta.id:
            merged[-1] = replace(merged[-1], arguments=merged[-1].arguments + delta.arguments)
        else:
            merged.append(delta)
    return tuple(merged)
