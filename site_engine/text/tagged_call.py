"""Tool call syntaxes that enclose raw values in tags, used by Qwen3-Coder and GLM.

Values are not quoted. Their types come from the function's schema. A value ends at its closing tag only if
another tag follows, because the text of an argument may contain such tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from site_engine.text.argument_types import STRING, argument_json, property_types
from site_engine.text.call_syntax import MAX_HEAD_CHARS, NAME, CallReader, Functions
from site_engine.text.detokenize import overlap
from site_engine.text.tagged_rules import tagged_rules


@dataclass(frozen=True, slots=True)
class TaggedSyntax:
    """A call is `start`, the function's name and `name_end`; for each argument `key`, its name, `key_end`,
    `value`, the value and `value_end`; then `call_end`. Without `name_end`, the name ends at the next tag.

    `lines`: a line break before and after a value is not part of the value. `after_call`: the mark after a
    call, which identifies `call_end` if the last `value_end` is missing.
    """

    start: str
    name_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    call_end: str
    after_call: str
    lines: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.key, self.key_end, self.value, self.value_end, self.call_end)))

    def reader(self, functions: Functions) -> CallReader:
        return TaggedCallReader(self, functions)

    def rules(self, rule: str, function: Mapping[str, Any], literal: Callable[[str], str]) -> str:
        return tagged_rules(self, rule, function, literal)


class _Patterns(NamedTuple):
    """`candidates`: possible ends of a value. `value_end`: an actual end. `last_end`: one in final text."""

    tags: re.Pattern[str]
    key_end: re.Pattern[str]
    candidates: re.Pattern[str]
    value_end: re.Pattern[str]
    last_end: re.Pattern[str]


@cache
def _patterns(syntax: TaggedSyntax) -> _Patterns:
    key, key_end, value, value_end, call_end, after_call = map(
        re.escape,
        (syntax.key, syntax.key_end, syntax.value, syntax.value_end, syntax.call_end, syntax.after_call),
    )
    line = "\n?" if syntax.lines else ""
    closed = rf"{line}{value_end}(?=\s*(?:{key}|{call_end}|{after_call}))"
    unclosed = rf"\n(?={key})|" if syntax.lines else ""
    ends = rf"{closed}|{unclosed}{line}(?={call_end}\s*(?:{after_call}"
    return _Patterns(
        re.compile(f"{key}|{call_end}|{after_call}"),
        re.compile(rf"{key_end}\s*{value}" if value else key_end),
        re.compile(r"\n?<|\n\Z" if syntax.lines else "<"),
        re.compile(ends + "))"),
        re.compile(ends + r"|\Z))"),
    )


class TaggedCallReader:
    """Parse the tags of a call. Strings are streamed, other values are returned once complete."""

    def __init__(self, syntax: TaggedSyntax, functions: Functions) -> None:
        self.name = ""
        self.done = False
        self.broken = False
        self._syntax = syntax
        self._patterns = _patterns(syntax)
        self._functions = functions
        self._read_step = self._read_name
        self._ready: list[str] = []
        self._separator = "{"
        self._types = STRING
        self._held: list[str] = []  # parts of a non-string value
        self._begins = False  # a line break before the value is still to be skipped

    def read(self, text: str, *, final: bool) -> int:
        at, unnamed, goes_on = 0, not self.name, True
        while goes_on and not self.done:
            step, before = self._read_step, at
            at = step(text, at, final)
            goes_on = (at > before or step != self._read_step) and not (self.name and unnamed)
        return at

    def take(self) -> str:
        taken, self._ready = "".join(self._ready), []
        return taken

    # Each step returns the position of the next step. A step that does not advance needs more text.

    def _read_name(self, text: str, at: int, final: bool) -> int:
        syntax = self._syntax
        end = text.find(syntax.name_end or "<", len(syntax.start), MAX_HEAD_CHARS)
        if end < 0:
            self.broken = final or len(text) >= MAX_HEAD_CHARS
            return at
        name = text[len(syntax.start) : end].strip()
        rest = text[end : end + max(len(syntax.key), len(syntax.call_end))]
        tags = (syntax.name_end,) if syntax.name_end else (syntax.key, syntax.call_end)
        if not re.fullmatch(NAME, name) or not rest.startswith(tags):
            self.broken = (
                final or not re.fullmatch(NAME, name) or not any(tag.startswith(rest) for tag in tags)
            )
            return at
        self.name, self._read_step = name, self._read_between
        return end + len(syntax.name_end)

    def _read_between(self, text: str, at: int, final: bool) -> int:
        syntax = self._syntax
        found = self._patterns.tags.search(text, at)
        if found is None:
            tags = (syntax.key, syntax.call_end, syntax.after_call)
            return len(text) - max(overlap(text[at:], tag) for tag in tags)
        if found[0] == syntax.key:
            self._read_step = self._read_key
            return found.end()
        self.done = True
        self._ready.append("{}" if self._separator == "{" else "}")
        return found.end() if found[0] == syntax.call_end else found.start()

    def _read_key(self, text: str, at: int, final: bool) -> int:
        found = self._patterns.key_end.search(text, at, at + MAX_HEAD_CHARS)
        if found is None:
            if len(text) >= at + MAX_HEAD_CHARS:
                self._read_step = self._read_between
            return at
        key = text[at : found.start()].strip()
        self._types = property_types(self._functions.get(self.name, {}), key)
        quote = '"' if self._types == STRING else ""
        self._ready.append(f"{self._separator}{json.dumps(key, ensure_ascii=False)}: {quote}")
        self._separator, self._begins, self._read_step = ", ", self._syntax.lines, self._read_value
        return found.end()

    def _read_value(self, text: str, at: int, final: bool) -> int:
        if self._begins and at < len(text):
            self._begins = False
            at += text[at] == "\n"
        patterns = self._patterns
        for candidate in patterns.candidates.finditer(text, at):
            start = candidate.start()
            end = (patterns.last_end if final else patterns.value_end).match(text, start)
            if end is not None:
                self._keep(text[at:start])
                self._ready.append(
                    '"' if self._types == STRING else argument_json("".join(self._held), self._types)
                )
                self._held, self._read_step = [], self._read_between
                return end.end()
            if not final and self._may_end(text, start):
                self._keep(text[at:start])
                return start
        self._keep(text[at:])
        return len(text)

    def _keep(self, part: str) -> None:
        if self._types == STRING:
            self._ready.append(json.dumps(part, ensure_ascii=False)[1:-1])
        else:
            self._held.append(part)

    def _may_end(self, text: str, start: int) -> bool:
        """Return whether more text could show that the value ends at `start`."""
        syntax = self._syntax
        tag_at = start + (text[start] == "\n")
        left = len(text) - tag_at
        if syntax.key.startswith(text[tag_at : tag_at + len(syntax.key)]) and tag_at > start:
            return True
        for tag, following in (
            (syntax.value_end, (syntax.key, syntax.call_end, syntax.after_call)),
            (syntax.call_end, (syntax.after_call,)),
        ):
            if tag.startswith(text[tag_at : tag_at + len(tag)]):
                rest = text[tag_at + len(tag) :].lstrip() if left > len(tag) else ""
                if any(each.startswith(rest) for each in following):
                    return True
        return False
