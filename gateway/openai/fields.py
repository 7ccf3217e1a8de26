"""Reads JSON objects strictly and collects every problem, with its dotted path.

`null` means omitted, `1.0` is an integer, and neither a bool nor a string passes for a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from gateway.errors import BadRequest

MAX_PROBLEMS = 10
MAX_OBJECTS = 16_384
"""Maximum nested objects of a request (messages, parts, calls, ...): each takes microseconds to read."""
MAX_IMAGES = 100
MAX_ECHO_CHARS = 200

D = TypeVar("D")

MISSING = "missing_required_parameter"
WRONG_TYPE = "invalid_type"
WRONG_VALUE = "invalid_value"
UNSUPPORTED = "unsupported_parameter"


class FieldProblem(NamedTuple):
    """A problem with one field; `param` is the dotted path of the field."""

    param: str
    message: str
    code: str


class Problems:
    """Collects the problems of one request. The first one gives the error its `param` and `code`."""

    def __init__(self) -> None:
        self._problems: list[FieldProblem] = []
        self._objects = 0
        self._images = 0

    def add(self, param: str, message: str, code: str = WRONG_VALUE) -> None:
        """Add a problem. Raises BadRequest above MAX_PROBLEMS, so that a body of a million wrong items is not
        read to its end.
        """
        if len(self._problems) == MAX_PROBLEMS:
            self.raise_any("There are more problems.")
        self._problems.append(FieldProblem(param, message, code))

    def count_object(self, param: str) -> None:
        """Count an object inside the request. Raises BadRequest above MAX_OBJECTS: the rest is not read."""
        self._objects += 1
        if self._objects > MAX_OBJECTS:
            self.add(param, f"is one more than the {MAX_OBJECTS} objects that a request may hold")
            self.raise_any()

    def count_image(self, param: str) -> None:
        """Count an image inside the request. Raises BadRequest above MAX_IMAGES: the rest is not read."""
        self._images += 1
        if self._images > MAX_IMAGES:
            self.add(param, f"is one more than the {MAX_IMAGES} images that a request may hold")
            self.raise_any()

    def raise_any(self, *more: str) -> None:
        """Raise BadRequest if there is any problem."""
        if not self._problems:
            return
        sentences = [f"'{problem.param}' {problem.message}." for problem in self._problems]
        raise BadRequest(
            " ".join([*sentences, *more]), param=self._problems[0].param, code=self._problems[0].code
        )


def echo(value: object) -> str:
    """Return `value` as text for an error message, at most MAX_ECHO_CHARS long."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    try:
        text = repr(value[:MAX_ECHO_CHARS] if isinstance(value, str) else value)
    except ValueError:  # an integer too long for Python to write
        return "an enormous number"
    return text if len(text) <= MAX_ECHO_CHARS else text[: MAX_ECHO_CHARS - 1] + "…"


def whole_number(value: object) -> int | None:
    """Return the integer that a JSON number stands for, None if `value` is not one."""
    if type(value) is int:
        return value
    if type(value) is float and value.is_integer():
        return int(value)
    return None


class Fields:
    """One JSON object. A field with a problem reads as its default, so that the other fields are checked."""

    def __init__(self, data: Mapping[str, object], problems: Problems, path: str = "") -> None:
        self._data = data
        self._path = path
        self._read: set[str] = set()
        self.problems = problems

    def param(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def raw(self, name: str) -> object | None:
        if name not in self._data:  # most requests have few of the known fields
            return None
        self._read.add(name)
        return self._data[name]

    def present(self, names: frozenset[str]) -> list[str]:
        """Return those of `names` that were sent, sorted. Most requests send few fields."""
        found = self._data.keys() & names
        self._read |= found
        return sorted(found)

    def unread(self) -> list[str]:
        """Return the names of the fields that no reader has read, that is, the unknown ones."""
        return [name for name in self._data if name not in self._read]

    def refuse(self, name: str, message: str, code: str = WRONG_VALUE) -> None:
        self.problems.add(self.param(name), message, code)

    def required(self, name: str) -> object | None:
        value = self.raw(name)
        if value is None:
            self.refuse(name, "is required", MISSING)
        return value

    def integer(self, name: str, low: int, high: int, default: D) -> int | D:
        if name not in self._data or (value := self.raw(name)) is None:
            return default
        number = whole_number(value)
        if number is None:
            return self._wrong_type(name, "an integer", value, default)
        return number if low <= number <= high else self._out_of_range(name, low, high, value, default)

    def number(self, name: str, low: float, high: float, default: D) -> float | D:
        value = self.raw(name)
        if value is None:
            return default
        if type(value) is not int and type(value) is not float:
            return self._wrong_type(name, "a number", value, default)
        return float(value) if low <= value <= high else self._out_of_range(name, low, high, value, default)

    def flag(self, name: str) -> bool:
        value = self.raw(name) if name in self._data else None
        if value is None or isinstance(value, bool):
            return bool(value)
        return self._wrong_type(name, "true or false", value, False)

    def text(self, name: str) -> str:
        """Return the string, empty when omitted."""
        value = self.raw(name)
        if value is None or isinstance(value, str):
            return value or ""
        return self._wrong_type(name, "a string", value, "")

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
        return self._wrong_type(name, "a list", value, [])

    def child(self, name: str) -> Fields | None:
        """Return the object inside this one, None when omitted or mistyped."""
        if name not in self._data or (value := self.raw(name)) is None:
            return None
        return self.nested(name, value)

    def nested(self, name: str, value: object) -> Fields | None:
        if isinstance(value, dict):
            path = self.param(name)
            self.problems.count_object(path)
            return Fields(value, self.problems, path)
        return self._wrong_type(name, "an object", value, None)

    def objects(self, name: str, items: Iterable[object]) -> Iterator[Fields]:
        """Yield the objects among the items of the list `name`; any other item is a problem."""
        for number, item in enumerate(items):
            if (found := self.nested(f"{name}.{number}", item)) is not None:
                yield found

    def bounded_objects(self, name: str, most: int, noun: str) -> Iterator[Fields]:
        """Yield the objects of a list that must hold one to `most` items, or none if it holds more."""
        items = self.items(name)
        if self.raw(name) == []:
            self.refuse(name, f"must hold at least one {noun}")
        if len(items) > most:
            self.refuse(name, f"holds at most {most} {noun}s, got {len(items)}")
            return
        yield from self.objects(name, items)

    def _wrong_type(self, name: str, expected: str, value: object, default: D) -> D:
        self.refuse(name, f"must be {expected}, got {echo(value)}", WRONG_TYPE)
        return default

    def _out_of_range(self, name: str, low: float, high: float, value: object, default: D) -> D:
        self.refuse(name, f"must be between {low} and {high}, got {echo(value)}")
        return default
