"""One call of a function as a model writes it, a JSON object, read character by character."""

from __future__ import annotations

import json

_OPEN, _CLOSE, _SPACE = "{[", "}]", " \t\r\n"


class CallObject:
    """`name` once it is known; `take` gives what came of the arguments since, as the model wrote them.

    Lenient: what is wrong in it is wrong in what it gives, and an object that is none has no name.
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
            self._inside_string(char)
        elif char == '"':
            self._in_string = True
            self._keep(char)
        else:
            self._outside_string(char)

    def take(self) -> str:
        taken, self._arguments = "".join(self._arguments), []
        return taken

    def _inside_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False

    def _outside_string(self, char: str) -> None:
        if self._depth == 1 and (char in ",}" or char in _SPACE or (char == ":" and not self._in_value)):
            self._between(char)
        else:
            self._keep(char)
        if char in _OPEN:
            self._depth += 1
        elif char in _CLOSE:
            self._depth -= 1
            self.done = self._depth <= 0

    def _between(self, char: str) -> None:
        """What separates the object's own keys and values."""
        if char == ":":
            self._key, self._part, self._in_value = _text("".join(self._part)), [], True
        elif char in ",}":
            if self._in_value and self._key == "name":
                self.name = _text("".join(self._part))
            self._key, self._part, self._in_value = "", [], False

    def _keep(self, char: str) -> None:
        if self._in_value and self._key == self._arguments_key:
            self._arguments.append(char)
        elif self._depth:
            self._part.append(char)


def _text(written: str) -> str:
    """The string that is written there; empty for anything else."""
    try:
        value = json.loads(written)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
