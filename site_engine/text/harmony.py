"""Parse the answers of gpt-oss models: messages in channels, in OpenAI's Harmony format.

A message is a header, <|message|> and its content. The channel determines the kind of content: `analysis` is
reasoning, `final` and `commentary` are text. With a recipient `functions.NAME` it is the arguments of a call.
The prompt ends with `<|start|>assistant`, so an answer starts within a header.

This module does not use the parser of the package openai-harmony, which requires token ids of a vocabulary
that it downloads from the internet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from site_engine.engine_client import ParsedText
from site_engine.text.call_syntax import MAX_HEAD_CHARS, Functions, ObjectEnd, as_object
from site_engine.text.detokenize import overlap
from site_engine.text.parsed_answer import ParsedAnswer

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_HEADER_BEGINS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN, "to=")
_HEADER_ENDS = re.compile("|".join(map(re.escape, (MESSAGE, END, CALL, RETURN))))
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CUT_HEADER = re.compile(r"(?:<[|\w]*+>?+|[\w\s.=:-])*+")
"""Possessive quantifiers avoid the exponential backtracking of ambiguous alternatives on other text."""


@dataclass(frozen=True, slots=True)
class Harmony:
    """The format of gpt-oss models. An answer has at most one call, because the model stops after it."""

    name: str = "harmony"
    bare: bool = False
    id_prefix: str = "call_"
    id_chars: int = 24
    marks: ClassVar[tuple[str, ...]] = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)


class _Content(Enum):
    """The kinds of message content, with the marks that end each kind. Other marks are part of the text."""

    TEXT = (START, END, CALL, RETURN)
    REASONING = (START, END, RETURN)
    ARGUMENTS = (START, END, RETURN, CALL)


class HarmonyParser:
    """Parse one answer. Calls of unknown functions and answers without a header are returned as text."""

    def __init__(self, functions: Functions, answer: ParsedAnswer) -> None:
        self._functions = functions
        self._answer = answer
        self._buffer = ""
        self._content: _Content | None = None  # None: within a header
        self._object = ObjectEnd()
        self._is_whole = False  # whether the arguments object is complete

    @property
    def calls(self) -> int:
        return self._answer.calls

    def feed(self, text: str) -> ParsedText:
        self._buffer += text
        self._advance()
        return self._answer.take()

    def end(self) -> ParsedText:
        """Return the rest at the end of the answer. A truncated header is dropped."""
        rest, self._buffer = self._buffer, ""
        if self._content is None and not _CUT_HEADER.fullmatch(rest):
            self._answer.add_text(_CHANNEL.sub("", rest).strip())
        elif self._content is _Content.ARGUMENTS and rest.strip() and not self._is_whole:
            self._answer.add_arguments(as_object(rest))
        elif self._content is not None:
            self._add(rest)
        return self._answer.take()

    def _advance(self) -> None:
        goes_on = True
        while self._buffer and goes_on:
            if self._content is None:
                goes_on = self._read_header()
            elif self._content is _Content.ARGUMENTS and not self._is_whole:
                goes_on = self._read_object()
            else:
                goes_on = self._read_content()

    # Each step consumes text of the buffer and returns False if it needs more text.

    def _read_header(self) -> bool:
        begin = self._buffer.lstrip()
        may_begin = any(begin.startswith(each) or each.startswith(begin) for each in _HEADER_BEGINS)
        found = _HEADER_ENDS.search(self._buffer, 0, MAX_HEAD_CHARS)
        if not may_begin or (found is None and len(self._buffer) >= MAX_HEAD_CHARS):
            if begin.startswith(START):  # otherwise it would end the text at once
                self._buffer = begin.removeprefix(START)
            self._content = _Content.TEXT
            return True
        if found is None:
            return False
        header, self._buffer = self._buffer[: found.start()], self._buffer[found.end() :]
        if found[0] == MESSAGE:
            self._begin_content(header)
        return True

    def _begin_content(self, header: str) -> None:
        """Begin the content of a message. The last channel and the last recipient in the header apply."""
        channel, recipient = ((pattern.findall(header) or [""])[-1] for pattern in (_CHANNEL, _RECIPIENT))
        name = recipient.removeprefix("functions.")
        if name in self._functions:
            self._content = _Content.ARGUMENTS
            self._object, self._is_whole = ObjectEnd(), False
            self._answer.begin_call(name)
        else:
            self._content = _Content.REASONING if channel == "analysis" else _Content.TEXT

    def _read_object(self) -> bool:
        """Parse arguments up to the end of the object, whose strings may contain marks."""
        if not self._object.begun:
            self._buffer = self._buffer.lstrip()
            if not self._buffer.startswith("{"):
                return self._read_no_object()
        end = self._object.find(self._buffer)
        self._is_whole = end > 0
        used = end or len(self._buffer)
        self._answer.add_arguments(self._buffer[:used])
        self._buffer = self._buffer[used:]
        return self._is_whole

    def _read_no_object(self) -> bool:
        """Parse arguments that are not an object. They are added once they are complete."""
        at, mark = self._find_mark()
        if mark:
            self._answer.add_arguments(as_object(self._buffer[:at].strip() or "null"))
            self._buffer, self._is_whole = self._buffer[at:], True
        return bool(mark)

    def _read_content(self) -> bool:
        at, mark = self._find_mark()
        self._add(self._buffer[:at])
        self._buffer = self._buffer[at:]
        if mark:
            self._content = None
        return bool(mark)

    def _find_mark(self) -> tuple[int, str]:
        """Return the end of the content and its mark. Without a mark, return how much of it is final."""
        assert self._content is not None, "a header has no content"
        marks = self._content.value
        places = [(at, mark) for mark in marks if (at := self._buffer.find(mark)) >= 0]
        if places:
            return min(places)
        return len(self._buffer) - max(overlap(self._buffer, mark) for mark in marks), ""

    def _add(self, content: str) -> None:
        if self._content is _Content.TEXT:
            self._answer.add_text(content)
        elif self._content is _Content.REASONING:
            self._answer.add_reasoning(content)
