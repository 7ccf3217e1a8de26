"""Separate tool calls from the text of a streamed answer.

The result depends only on the text, not on how the text is split into parts.
"""

from __future__ import annotations

from enum import Enum
from hashlib import blake2b
from typing import NamedTuple

from site_engine.engine_client import Delivered, ParsedText, ToolParser
from site_engine.text.call_syntax import SPACE, Functions
from site_engine.text.detokenize import overlap
from site_engine.text.harmony import HarmonyParser
from site_engine.text.parsed_answer import ParsedAnswer
from site_engine.text.tool_format import AnswerFormat, Format


class _State(Enum):
    TEXT = "text"
    BETWEEN = "between"  # after a begin mark, outside a call
    CALL = "call"


class ToolCallParser:
    """Parse one answer. Malformed calls and calls of unknown functions are returned as text."""

    def __init__(self, form: Format, functions: Functions, answer: ParsedAnswer) -> None:
        self._form = form
        self._functions = functions
        self._answer = answer
        self._state = _State.BETWEEN if form.bare else _State.TEXT
        self._buffer = ""
        self._undecided = ""  # consumed text that may still turn out to be plain text
        self._call = form.syntax.reader(functions)
        self._is_named = False

    @property
    def calls(self) -> int:
        return self._answer.calls

    def feed(self, text: str) -> ParsedText:
        """Parse more text and return the text and the call deltas that are final."""
        self._buffer += text
        self._advance(final=False)
        return self._answer.take()

    def end(self) -> ParsedText:
        """Return the rest at the end of the answer. A begin mark without anything after it is dropped."""
        self._advance(final=True)
        rest = self._undecided + self._buffer
        if self._state is _State.CALL:
            self._answer.add_text("" if self._is_named else rest)
        elif self._state is _State.TEXT and self.calls:
            self._answer.add_text(rest.rstrip(SPACE))
        elif not self.calls and rest.strip(SPACE) not in self._form.begins:
            self._answer.add_text(rest)
        self._buffer = self._undecided = ""
        return self._answer.take()

    def _advance(self, *, final: bool) -> None:
        goes_on = True
        while self._buffer and goes_on:
            if self._state is _State.TEXT:
                goes_on = self._parse_text()
            elif self._state is _State.BETWEEN:
                goes_on = self._parse_between()
            else:
                goes_on = self._parse_call(final)

    # Each step consumes text of the buffer and returns False if it needs more text.

    def _parse_text(self) -> bool:
        """Parse text up to a mark. White space before a mark is undecided, since it may belong to a call."""
        buffer, begins = self._buffer, self._form.begins
        places = [(at, mark) for mark in begins if (at := buffer.find(mark)) >= 0]
        if places:
            at, mark = min(places)
            self._add_text(buffer[:at])
            end = at if mark == self._form.syntax.start else at + len(mark)
            self._undecided += buffer[at:end]
            self._buffer, self._state = buffer[end:], _State.BETWEEN
            return True
        kept = max(overlap(buffer, mark) for mark in begins)  # it may be the start of a mark
        self._add_text(buffer[: len(buffer) - kept])
        self._buffer = buffer[len(buffer) - kept :]
        return False

    def _add_text(self, part: str) -> None:
        """Add a part of the text. White space at its end stays undecided."""
        certain = part.rstrip(SPACE)
        if certain:
            self._answer.add_text(self._undecided + certain)
            self._undecided = ""
        self._undecided += part[len(certain) :]

    def _parse_between(self) -> bool:
        form = self._form
        rest = self._buffer.lstrip(SPACE + form.opening + form.between)
        self._undecided += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        if not rest:
            return False
        start = form.syntax.start
        if rest.startswith(start):
            self._call, self._is_named = form.syntax.reader(self._functions), False
            self._state = _State.CALL
        elif form.end and rest.startswith(form.end):
            self._buffer, self._undecided, self._state = rest[len(form.end) :], "", _State.TEXT
        elif form.end.startswith(rest) or start.startswith(rest):
            return False
        else:
            self._return_to_text()
        return True

    def _parse_call(self, final: bool) -> bool:
        """Parse the call up to its name, its end or the end of the available text."""
        call, form = self._call, self._form
        used = call.read(self._buffer, final=final)
        if call.broken:
            used = len(form.syntax.start)  # otherwise the same call would start again
        self._undecided += self._buffer[:used]
        self._buffer = self._buffer[used:]
        if not self._is_named and (call.broken or call.done or call.name):
            if call.name not in self._functions:
                self._return_to_text()
                return True
            self._is_named = True
            self._answer.begin_call(call.name)
        if self._is_named:
            self._undecided = ""
            self._answer.add_arguments(call.take())
        if call.done:
            self._state = _State.BETWEEN if form.end or form.bare else _State.TEXT
        return used > 0 or call.done

    def _return_to_text(self) -> None:
        self._answer.add_text(self._undecided)
        self._undecided, self._state = "", _State.TEXT


def answer_parser(form: AnswerFormat, functions: Functions, answer: ParsedAnswer) -> ToolParser:
    if isinstance(form, Format):
        return ToolCallParser(form, functions, answer)
    return HarmonyParser(functions, answer)


class ToolCallStyle(NamedTuple):
    """The tool call format and the functions of one attempt. `single`: only the first call is returned."""

    form: AnswerFormat
    functions: Functions
    single: bool

    def parser(self, choice: str, delivered: Delivered) -> ToolParser:
        """Return a parser for one choice. Call ids are hashes of `choice`, its globally unique name."""

        def new_id(number: int) -> str:
            digest = blake2b(f"{choice} {number}".encode(), digest_size=16).hexdigest()
            return self.form.id_prefix + digest[: self.form.id_chars]

        answer = ParsedAnswer(single=self.single, new_id=new_id, delivered=delivered)
        return answer_parser(self.form, self.functions, answer)
