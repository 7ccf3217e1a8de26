"""Mutation tests of modules: one argument is spoilt, and the checks should notice.

Every argument of every resource and module block is dropped, misspelt and given a value of a wrong type; a
literal is also given another value. Left out: depends_on and lifecycle, whose effect is an order in time.
"""

import re
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from infra.terraform.tests.workspace import Workspace

ARGUMENT = re.compile(r"^(\s+)(\w+)(\s*= )(.*)$")
BLOCK = re.compile(r'^\s*(?:[\w-]+)(?: "[\w-]+")* \{(?P<rest>.*)$')
ONE_LINE = re.compile(r"^(\s*[\w-]+(?: \"[\w-]+\")* \{ )(\w+)(\s*= )(.*?)( \}\s*(?:#.*)?)$")
COMMENT = re.compile(r"\s+#[^\"]*$")
ORDER_ONLY = {"depends_on"}
WRONG_TYPE = "{ wrong = [[]] }"


class Spoilt(Enum):
    """The way in which an argument is spoilt."""

    DROPPED = "dropped"
    MISSPELT = "misspelt"
    MISTYPED = "of a wrong type"
    CHANGED = "with another value"


class Verdict(Enum):
    """The check that noticed first."""

    VALIDATE = "validate"
    TEST = "test"
    NONE = "none"


class Argument(NamedTuple):
    """A place in a file: lines first to last, what stands around the argument, its name and its value."""

    first: int
    last: int
    before: str
    name: str
    equals: str
    value: str
    after: str


class Mutant(NamedTuple):
    """A file's text with one argument spoilt."""

    label: str
    text: str


def arguments(text: str) -> Iterator[Argument]:
    """Yield every argument of the resource and module blocks of a formatted file."""
    lines = text.splitlines()
    stack: list[str] = []
    number = 0
    while number < len(lines):
        line = lines[number]
        inside = stack[:1] in (["resource"], ["module"]) and "lifecycle" not in stack
        if found := ONE_LINE.match(line):
            word = line.split()[0]
            if (inside or word in ("resource", "module")) and word != "lifecycle":
                yield Argument(number, number, *found.groups())
        elif BLOCK.match(line):
            stack.append(line.split()[0])
        elif line.strip().startswith("}") and stack:
            stack.pop()
        elif found := ARGUMENT.match(line):
            last = end_of_value(lines, number)
            value = "\n".join([found[4], *lines[number + 1 : last + 1]])
            if inside and found[2] not in ORDER_ONLY:
                yield Argument(number, last, found[1], found[2], found[3], COMMENT.sub("", value), "")
            number = last
        number += 1


def end_of_value(lines: list[str], first: int) -> int:
    """Return the line on which the brackets that a value opens are closed."""
    depth = 0
    for number in range(first, len(lines)):
        plain = re.sub(r'"(?:[^"\\]|\\.)*"', '""', COMMENT.sub("", lines[number]))
        depth += sum(plain.count(sign) for sign in "([{") - sum(plain.count(sign) for sign in ")]}")
        if depth <= 0:
            return number
    return first


def another(value: str) -> str | None:
    """Another value of the same type for a literal; nothing for an expression."""
    if value in ("true", "false"):
        return "false" if value == "true" else "true"
    if re.fullmatch(r"-?\d+", value):
        return str(int(value) + 1)
    if re.fullmatch(r'"[^"$]+"', value):
        return value[:-1] + 'x"'
    return None


def spoil(argument: Argument) -> Iterator[tuple[Spoilt, str]]:
    """Yield each way to spoil an argument, with the text that stands in its place."""
    before, name, equals, value, after = argument[2:]
    yield Spoilt.DROPPED, f"{before}{after}" if after else ""
    yield Spoilt.MISSPELT, f"{before}{name}x{equals}{value}{after}"
    yield Spoilt.MISTYPED, f"{before}{name}{equals}{WRONG_TYPE}{after}"
    if (changed := another(value)) is not None:
        yield Spoilt.CHANGED, f"{before}{name}{equals}{changed}{after}"


def mutants(file: str, text: str) -> Iterator[Mutant]:
    """Yield all mutants of one file."""
    lines = text.splitlines()
    for argument in arguments(text):
        for kind, replacement in spoil(argument):
            changed = [*lines[: argument.first], replacement, *lines[argument.last + 1 :]]
            label = f"{file}:{argument.first + 1} {argument.name} {kind.value}"
            yield Mutant(label, "\n".join(changed) + "\n")


def judge(workspace: Workspace, folder: str, file: str, mutant: Mutant) -> Verdict:
    """Return which of `terraform validate` and `terraform test` notices a mutant of a folder's file."""
    with workspace.changed(f"{folder}/{file}", mutant.text):
        if workspace.terraform(folder, "validate").returncode:
            return Verdict.VALIDATE
        if workspace.terraform(folder, "test").returncode:
            return Verdict.TEST
    return Verdict.NONE
