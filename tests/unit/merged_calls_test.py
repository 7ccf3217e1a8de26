"""Parts of calls become whole calls, in time that grows with their number."""

from __future__ import annotations

import pytest

from gateway.domain import ToolCall
from gateway.openai import tool_calls
from gateway.openai.tool_calls import merge_calls


def test_calls_are_merged_by_index_whatever_comes_between() -> None:
    parts = [ToolCall(1, "id-1", "one", "{"), ToolCall(0, "id-0", "zero"), ToolCall(1, arguments="}")]
    parts += [ToolCall(0, arguments="["), ToolCall(0, arguments="]")]
    assert merge_calls(parts) == [ToolCall(0, "id-0", "zero", "[]"), ToolCall(1, "id-1", "one", "{}")]
    assert merge_calls([]) == []


def test_a_long_call_is_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call for each part would copy all arguments before it."""
    parts = [ToolCall(0, "id", "write"), *(ToolCall(0, arguments="abcd") for _ in range(500))]
    made: list[str] = []

    def counted(index: int, *fields: str) -> ToolCall:
        made.append(fields[-1] if fields else "")
        return ToolCall(index, *fields)

    monkeypatch.setattr(tool_calls, "ToolCall", counted)
    assert merge_calls(parts) == [ToolCall(0, "id", "write", "abcd" * 500)]
    assert len(made) == 1
