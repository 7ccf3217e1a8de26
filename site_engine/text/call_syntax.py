"""JSON syntaxes of a tool call: an object with the name and arguments, or a name followed by an object.

A reader parses a call incrementally. Its result does not depend on how the text is split into parts.
Readers are lenient: malformed arguments are returned as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

Schema: TypeAlias = Mapping[str, Any]
Functions: TypeAlias = Mapping[str, Schema]
"""The parameter schemas of the available functions, by function name."""

SPACE = " \t\r\n"
NO_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
NAME = r"[\w.-]+"
ARGUMENTS_KEYS = ("arguments", "parameters")
MAX_HEAD_CHARS = 256
"""The maximum length of the text before a call's arguments. Text that exceeds it is not a call."""
_OPEN, _CLOSE = "{[", "}]"
_IN_STRING, _OUTSIDE = re.compile(r'["\\]'), re.compile(r'["{}\[\]]')
_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Options of llguidance that prevent endless white space, which small models tend to generate."""


class CallReader(Protocol):
    """Parse one call. `name` is set once it is known, `broken` once the text can't be a call."""

    name: str
    done: bool
    broken: bool

    def read(self, text: str, *, final: bool) -> int:
        """Parse `text` and return the number of characters consumed. Stops after the name and after the call.

        The caller passes the remaining text again, followed by new text. `final`: no more text follows.
        """
        ...

    def take(self) -> str:
        """Return the part of the arguments, as JSON text, parsed since the last `take`."""
        ...


class CallSyntax(Protocol):
    """The syntax of one call between the marks of a format. Provides a reader and a grammar."""

    @property
    def start(self) -> str:
        """The prefix of every call. May be empty."""
        ...

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks inside a call that may be special tokens."""
        ...

    def reader(self, functions: Functions) -> CallReader: ...

    def rules(self, rule: str, function: Mapping[str, Any], literal: Callable[[str], str]) -> str:
        """Return the Lark rules of a call of this function, the first named `rule`. `literal` quotes text.

        Raises NotServed if the function's parameters can't be enforced in this syntax.
        """
        ...


@dataclass(frozen=True, slots=True)
class JsonSyntax:
    """A call is an object with the keys `name` and `arguments_key`. The reader accepts all ARGUMENTS_KEYS."""

    arguments_key: str = "arguments"
    start: str = "{"
    marks: tuple[str, ...] = ()

    def reader(self, functions: Functions) -> CallReader:
        return JsonCallReader()

    def rules(self, rule: str, function: Mapping[str, Any], literal: Callable[[str], str]) -> str:
        head = quoted(f'{{"name": "{function["name"]}", "{self.arguments_key}": ')
        return f'{rule}: {head} {rule}_arguments "}}"\n{rule}_arguments: {parameters_rule(function)}\n'


class JsonCallReader:
    """Parse an object with a name and arguments, by character. For any other text, the name stays empty."""

    def __init__(self) -> None:
        self.name = ""
        self.done = False
        self.broken = False
        self._ready: list[str] = []  # of the arguments
        self._arguments_key = ""  # the first of ARGUMENTS_KEYS found
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key = ""
        self._in_value = False  # within a value of the outer object
        self._part: list[str] = []  # of a key, or of a value other than an arguments object

    def read(self, text: str, *, final: bool) -> int:
        unnamed = not self.name
        for at, char in enumerate(text, start=1):
            self._push(char)
            if self.done or (self.name and unnamed):
                return at
        return len(text)

    def take(self) -> str:
        taken, self._ready = "".join(self._ready), []
        return taken

    def _push(self, char: str) -> None:
        if self._in_string:
            self._keep(char)
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
            return
        separates = char in ",}" or char in SPACE or (char == ":" and not self._in_value)
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
            if self.done and not self._arguments_key:
                self._ready.append("{}")

    def _separate(self, char: str) -> None:
        """End a key or a value of the outer object. White space is skipped."""
        if char in SPACE:
            return
        part = "".join(self._part)
        if char == ":":
            self._key, self._part, self._in_value = string_value(part), [], True
            if self._key in ARGUMENTS_KEYS and not self._arguments_key:
                self._arguments_key = self._key
        else:
            if self._in_value and self._key == "name":
                self.name = string_value(part)
            elif self._in_value and self._key == self._arguments_key and part:
                self._ready.append(as_object(part))
            self._key, self._part, self._in_value = "", [], False

    def _keep(self, char: str) -> None:
        is_arguments = self._in_value and self._key == self._arguments_key
        if is_arguments and not self._part and (self._depth > 1 or char == "{"):
            self._ready.append(char)
        elif self._depth:
            self._part.append(char)


@dataclass(frozen=True, slots=True)
class NamedSyntax:
    """A call is a name, `mark` and an arguments object. `id_mark` and an id may precede `mark`."""

    mark: str
    id_mark: str
    start: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return self.mark, self.id_mark

    def reader(self, functions: Functions) -> CallReader:
        return NamedCallReader(self)

    def rules(self, rule: str, function: Mapping[str, Any], literal: Callable[[str], str]) -> str:
        head = f"{quoted(function['name'])} {literal(self.mark)}"
        return f"{rule}: {head} {rule}_arguments\n{rule}_arguments: {parameters_rule(function)}\n"


class NamedCallReader:
    """Parse a name and an object, which ends at its last brace."""

    def __init__(self, syntax: NamedSyntax) -> None:
        self.name = ""
        self.done = False
        self.broken = False
        call_id = rf"(?:\s*{re.escape(syntax.id_mark)}\s*\w*)?"
        self._head = re.compile(rf"\s*({NAME})\s*?{call_id}\s*(?:{re.escape(syntax.mark)})?\s*")
        self._object = ObjectEnd()
        self._ready: list[str] = []

    def read(self, text: str, *, final: bool) -> int:
        if self.name:
            end = self._object.find(text)
            self.done = end > 0
            self._ready.append(text[:end] if self.done else text)
            return end or len(text)
        brace = text.find("{", 0, MAX_HEAD_CHARS)
        head = None if brace < 0 else self._head.fullmatch(text, 0, brace)
        if head is None:
            self.broken = final or brace >= 0 or len(text) >= MAX_HEAD_CHARS
            return 0
        self.name = head[1]
        return brace

    def take(self) -> str:
        taken, self._ready = "".join(self._ready), []
        return taken


class ObjectEnd:
    """Find the end of a JSON object that is passed in parts."""

    def __init__(self) -> None:
        self.begun = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, part: str) -> int:
        """Return the position after the object's last brace in this part, or 0 if the object goes on."""
        self.begun, at = True, 0
        while at < len(part):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(part, at)
            if found is None:
                break
            at, char = found.end(), found[0]
            if char == '"':
                self._in_string = not self._in_string
            elif char == "\\":
                self._escaped = True
            else:
                self._depth += 1 if char in _OPEN else -1
                if self._depth <= 0:
                    return at
        return 0


def string_value(text: str) -> str:
    """Decode a JSON string. Return an empty string for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""


def as_object(arguments: str) -> str:
    """Convert null, an empty string or an object encoded as a string to an object. Return others as is."""
    try:
        value = json.loads(arguments)
        if value is None or value == "":
            return "{}"
        if not (isinstance(value, str) and isinstance(json.loads(value), dict)):
            return arguments
        value.encode()  # fails for a lone surrogate, which can't be sent
        return value
    except (ValueError, RecursionError):
        return arguments


def parameters_rule(function: Mapping[str, Any]) -> str:
    return json_rule(function.get("parameters") or NO_PARAMETERS)


def json_rule(schema: Schema) -> str:
    """Return the Lark expression for JSON that matches a schema."""
    return "%json " + json.dumps({**schema, "x-guidance": _STYLE})


def quoted(text: str) -> str:
    """Return text as a Lark string literal. Return an empty string for empty text."""
    return json.dumps(text, ensure_ascii=False) if text else ""
