"""Collect the text, reasoning and calls of a parsed answer, without the parts delivered before."""

from __future__ import annotations

from collections.abc import Callable

from site_engine.core.request import ToolCall, merge_tool_calls
from site_engine.engine_client import Delivered, ParsedText

NOTHING = Delivered()


class ParsedAnswer:
    """Collect the parts of one answer. `single`: calls after the first are dropped."""

    def __init__(self, *, single: bool, new_id: Callable[[int], str], delivered: Delivered = NOTHING) -> None:
        self.calls = 0
        self._single = single
        self._new_id = new_id
        self._delivered = delivered
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._deltas: list[ToolCall] = []

    def add_text(self, text: str) -> None:
        skipped = min(self._delivered.chars, len(text))
        self._delivered = self._delivered._replace(chars=self._delivered.chars - skipped)
        self._text.append(text[skipped:])

    def add_reasoning(self, text: str) -> None:
        skipped = min(self._delivered.reasoning_chars, len(text))
        self._delivered = self._delivered._replace(reasoning_chars=self._delivered.reasoning_chars - skipped)
        self._reasoning.append(text[skipped:])

    def begin_call(self, name: str) -> None:
        self._add_call(ToolCall(self.calls, self._new_id(self.calls), name))
        self.calls += 1

    def add_arguments(self, arguments: str) -> None:
        """Append to the arguments of the current call."""
        if arguments:
            self._add_call(ToolCall(self.calls - 1, arguments=arguments))

    def take(self) -> ParsedText:
        """Return the parts added since the last `take`."""
        calls = merge_tool_calls(self._deltas)
        parsed = ParsedText("".join(self._text), calls, "".join(self._reasoning))
        self._text, self._reasoning, self._deltas = [], [], []
        return parsed

    def _add_call(self, delta: ToolCall) -> None:
        last = self._delivered.calls - 1
        if (self._single and delta.index) or delta.index < last:
            return
        if delta.index == last:
            left = self._delivered.argument_chars
            skipped = min(left, len(delta.arguments))
            self._delivered = self._delivered._replace(argument_chars=left - skipped)
            delta = ToolCall(delta.index, arguments=delta.arguments[skipped:])
            if not delta.arguments:
                return
        self._deltas.append(delta)
