"""Separate calls of functions from text while an answer grows.

The result depends on the text alone, not on how it is cut into parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from hashlib import blake2b
from typing import NamedTuple

from site_engine.core.request import ToolCall, merge_tool_calls
from site_engine.engine_client import Delivered, ParsedText
from site_engine.text.detokenize import overlap
from site_engine.text.tool_format import Format

_OPEN, _CLOSE, _SPACE = "{[", "}]", " \t\r\n"
NOTHING = Delivered()


class CallObjectParser:
    """Parses one call as a model writes it, a JSON object, character by character.

    `name` is set once it is known; `take` returns the arguments since the last `take`, as they were written.
    Lenient: faults of the object show in the result, and anything but an object has no name.
    """

    def __init__(self, arguments_key: str) -> None:
        self.name = ""
        self.done = False
        self._arguments_key = arguments_key
        self._arguments: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key = ""
        self._in_value = False  # of a key of the object itself
        self._part: list[str] = []  # of a key, or of a value that is not the arguments

    def push(self, char: str) -> None:
        if self._in_string:
            self._keep(char)
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
            return
        separates = char in ",}" or char in _SPACE or (char == ":" and not self._in_value)
        if self._depth == 1 and separates:
            self._separate(char)
        else:
            self._in_string = char == '"'
            self._keep(char)
        if char in _OPEN:
            self._depth += 1
        elif char in _CLOSE:
            self._depth -= 1
            self.done = self._depth <= 0

    def take(self) -> str:
        taken, self._arguments = "".join(self._arguments), []
        return taken

    def _separate(self, char: str) -> None:
        """End a key or a value of the object itself."""
        if char == ":":
            self._key, self._part, self._in_value = _string("".join(self._part)), [], True
        elif char in ",}":
            if self._in_value and self._key == "name":
                self.name = _string("".join(self._part))
            self._key, self._part, self._in_value = "", [], False

    def _keep(self, char: str) -> None:
        if self._in_value and self._key == self._arguments_key:
            self._arguments.append(char)
        elif self._depth:
            self._part.append(char)


def _string(text: str) -> str:
    """Decode a JSON string; return an empty one for anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


class _State(Enum):
    TEXT = "text"
    BETWEEN = "between"  # after a mark that begins calls, outside any of them
    CALL = "call"


class ToolCallParser:
    """The parser of one answer. Whatever only looks like a call, or calls nothing offered, stays text."""

    def __init__(
        self,
        form: Format,
        names: Collection[str],
        *,
        single: bool,
        new_id: Callable[[int], str],
        delivered: Delivered = NOTHING,
    ) -> None:
        self.calls = 0
        self._form = form
        self._names = names
        self._single = single
        self._new_id = new_id
        self._delivered = delivered
        self._state = _State.TEXT if form.begin else _State.BETWEEN
        self._buffer = ""
        self._undecided = ""  # read already, and may turn out to be text
        self._object = CallObjectParser(form.arguments)
        self._is_named = False
        self._text: list[str] = []
        self._deltas: list[ToolCall] = []

    def feed(self, text: str) -> ParsedText:
        """Return the text and the calls that are certain after `text`."""
        self._buffer += text
        goes_on = True
        while self._buffer and goes_on:
            if self._state is _State.TEXT:
                goes_on = self._parse_text()
            elif self._state is _State.BETWEEN:
                goes_on = self._parse_between()
            else:
                goes_on = self._parse_call()
        return self._take_parsed()

    def end(self) -> ParsedText:
        """Return the rest, once nothing can follow."""
        if self._state is _State.CALL and not self._is_named:
            self._emit_text(self._undecided)
        elif self._state is not _State.CALL and not self.calls:
            self._emit_text(self._undecided + self._buffer)
        elif self._state is _State.TEXT:
            self._emit_text(self._buffer.rstrip(_SPACE))
        self._buffer = self._undecided = ""
        return self._take_parsed()

    # steps: each reads on from the buffer, and returns False if more text has to come first

    def _parse_text(self) -> bool:
        begin = self._form.begin
        found = self._buffer.find(begin) if begin else -1
        if found >= 0:
            before = self._buffer[:found].rstrip(_SPACE)
            self._emit_text(before)
            self._undecided = self._buffer[len(before) : found + len(begin)]
            self._buffer, self._state = self._buffer[found + len(begin) :], _State.BETWEEN
            return True
        certain = self._buffer
        if begin:  # white space and the beginning of a mark may turn out to belong to a call
            certain = certain[: len(certain) - overlap(certain, begin)].rstrip(_SPACE)
        self._emit_text(certain)
        self._buffer = self._buffer[len(certain) :]
        return False

    def _parse_between(self) -> bool:
        form = self._form
        rest = self._buffer.lstrip(_SPACE + form.opening + form.between)
        self._undecided += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        if not rest:
            return False
        if rest.startswith("{"):
            self._object, self._is_named = CallObjectParser(form.arguments), False
            self._state = _State.CALL
        elif form.end and rest.startswith(form.end):
            self._buffer, self._undecided, self._state = rest[len(form.end) :], "", _State.TEXT
        elif form.end.startswith(rest):
            return False
        else:
            self._return_to_text()
        return True

    def _parse_call(self) -> bool:
        call, buffer = self._object, self._buffer
        for at, char in enumerate(buffer, start=1):
            call.push(char)
            if call.done or (call.name and not self._is_named):
                self._buffer = buffer[at:]
                self._undecided += buffer[:at]
                return self._check_call()
        self._undecided += buffer
        self._buffer = ""
        self._emit_arguments()
        return False

    def _check_call(self) -> bool:
        """Go on after the call's name or its end."""
        call = self._object
        if not self._is_named:
            if call.name not in self._names:
                self._return_to_text()
                return True
            self._is_named, self._undecided = True, ""
            self.calls += 1
            self._emit_call(ToolCall(self.calls - 1, self._new_id(self.calls - 1), call.name))
        self._emit_arguments()
        if call.done:
            self._undecided, self._state = "", _State.BETWEEN
        return True

    def _return_to_text(self) -> None:
        self._emit_text(self._undecided)
        self._undecided, self._state = "", _State.TEXT

    # output, without the part that the client has

    def _emit_text(self, text: str) -> None:
        skipped = min(self._delivered.chars, len(text))
        self._delivered = self._delivered._replace(chars=self._delivered.chars - skipped)
        self._text.append(text[skipped:])

    def _emit_arguments(self) -> None:
        if self._is_named and (arguments := self._object.take()):
            self._emit_call(ToolCall(self.calls - 1, arguments=arguments))

    def _emit_call(self, delta: ToolCall) -> None:
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

    def _take_parsed(self) -> ParsedText:
        parsed = ParsedText("".join(self._text), merge_tool_calls(self._deltas))
        self._text, self._deltas = [], []
        return parsed


class ToolCallStyle(NamedTuple):
    """The style in which one attempt's model calls functions. `shown`: special tokens to show in its text."""

    form: Format
    names: Collection[str]
    single: bool
    shown: Mapping[int, str]

    def parser(self, choice: str, delivered: Delivered) -> ToolCallParser:
        """Return a parser for one choice. `choice` names it everywhere: ids of calls are made of it."""

        def new_id(number: int) -> str:
            digest = blake2b(f"{choice} {number}".encode(), digest_size=16).hexdigest()
            return self.form.id_prefix + digest[: self.form.id_chars]

        return ToolCallParser(self.form, self.names, single=self.single, new_id=new_id, delivered=delivered)
