"""A strict reader of JSON objects: it collects problems with their dotted paths, not only the first.

`null` means omitted, `1.0` is an integer, and neither a bool nor a string ever passes for a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from gateway.errors import BadRequest
from gateway.wording import several

PROBLEMS_LIMIT = 10
ECHO_LIMIT_CHARS = 200

D = TypeVar("D")

MISSING = "missing_required_parameter"
WRONG_TYPE = "invalid_type"
WRONG_VALUE = "invalid_value"
UNSUPPORTED = "unsupported_parameter"


class Found(NamedTuple):
    param: str
    message: str
    code: str


class Problems:
    """What is wrong with a request. The first problem gives the error's `param` and `code`."""

    def __init__(self) -> None:
        self._found: list[Found] = []
        self._more = 0

    def add(self, param: str, message: str, code: str = WRONG_VALUE) -> None:
        if len(self._found) < PROBLEMS_LIMIT:
            self._found.append(Found(param, message, code))
        else:
            self._more += 1

    def raise_any(self) -> None:
        if not self._found:
            return
        sentences = [f"'{found.param}' {found.message}." for found in self._found]
        if self._more:
            sentences.append(f"{several(self._more, 'more problem is', 'more problems are')} not shown.")
        raise BadRequest(" ".join(sentences), param=self._found[0].param, code=self._found[0].code)


def echo(value: object) -> str:
    """A value as the client may see it again: short, whatever was sent."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    try:
        text = repr(value[:ECHO_LIMIT_CHARS] if isinstance(value, str) else value)
    except ValueError:  # an integer too long for Python to write
        return "an enormous number"
    return text if len(text) <= ECHO_LIMIT_CHARS else text[: ECHO_LIMIT_CHARS - 1] + "…"


def whole_number(value: object) -> int | None:
    """The integer a JSON number stands for, None if it is not one."""
    if type(value) is int:
        return value
    if type(value) is float and value.is_integer():
        return int(value)
    return None


class Fields:
    """One JSON object. A field with a problem reads as its default, so that reading goes on."""

    def __init__(self, data: Mapping[str, object], problems: Problems, path: str = "") -> None:
        self._data = data
        self._path = path
        self._read: set[str] = set()
        self.problems = problems

    def param(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def raw(self, name: str) -> object | None:
        self._read.add(name)
        return self._data.get(name)

    def among(self, names: frozenset[str]) -> list[str]:
        """Those of the names that were sent, in order of the alphabet. Most requests send few fields."""
        self._read |= names
        return sorted(names & self._data.keys())

    def unread(self) -> list[str]:
        """Names that nobody asked for: fields we do not know."""
        return [name for name in self._data if name not in self._read]

    def refuse(self, name: str, message: str, code: str = WRONG_VALUE) -> None:
        self.problems.add(self.param(name), message, code)

    def required(self, name: str) -> object | None:
        value = self.raw(name)
        if value is None:
            self.refuse(name, "is required", MISSING)
        return value

    def integer(self, name: str, low: int, high: int, default: D) -> int | D:
        value = self.raw(name)
        if value is None:
            return default
        number = whole_number(value)
        if number is None:
            return self._mistyped(name, "an integer", value, default)
        return number if low <= number <= high else self._outside(name, low, high, value, default)

    def number(self, name: str, low: float, high: float, default: D) -> float | D:
        value = self.raw(name)
        if value is None:
            return default
        if type(value) is not int and type(value) is not float:
            return self._mistyped(name, "a number", value, default)
        return float(value) if low <= value <= high else self._outside(name, low, high, value, default)

    def flag(self, name: str) -> bool:
        value = self.raw(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        return self._mistyped(name, "true or false", value, False)

    def text(self, name: str) -> str:
        """Empty when omitted."""
        value = self.raw(name)
        if value is None or isinstance(value, str):
            return value or ""
        return self._mistyped(name, "a string", value, "")

    def required_text(self, name: str) -> str:
        if self.required(name) is None:
            return ""
        value = self.text(name)
        if self._data[name] == "":
            self.refuse(name, "must not be empty")
        return value

    def items(self, name: str) -> list[object]:
        value = self.raw(name)
        if value is None or isinstance(value, list):
            return value or []
        return self._mistyped(name, "a list", value, [])

    def child(self, name: str) -> Fields | None:
        """An object inside this one, None when omitted or mistyped."""
        value = self.raw(name)
        return None if value is None else self.nested(name, value)

    def nested(self, name: str, value: object) -> Fields | None:
        if isinstance(value, dict):
            return Fields(value, self.problems, self.param(name))
        return self._mistyped(name, "an object", value, None)

    def _mistyped(self, name: str, wanted: str, value: object, default: D) -> D:
        self.refuse(name, f"must be {wanted}, got {echo(value)}", WRONG_TYPE)
        return default

    def _outside(self, name: str, low: float, high: float, value: object, default: D) -> D:
        self.refuse(name, f"must be between {low} and {high}, got {echo(value)}")
        return default
