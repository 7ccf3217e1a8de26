"""Calls of functions, told apart from text while an answer grows: text in, text and news of calls out.

What comes out depends on the text alone, not on how it was cut into pieces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from hashlib import blake2b
from typing import NamedTuple

from site_engine.core.request import ToolCall
from site_engine.core.tools import Delivered, ParsedText, Tools, merge_tool_calls
from site_engine.text.tool_format import Format

_OPEN, _CLOSE, _SPACE = "{[", "}]", " \t\r\n"


NOTHING = Delivered()


class _At(Enum):
    TEXT = "text"
    BETWEEN = "between"  # after a mark that begins calls, outside any of them
    CALL = "call"


class CallObjectParser:
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


class ToolCallParser:
    """Of one answer. What only looks like a call, or calls nothing that was offered, stays text."""

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
        self._at = _At.TEXT if form.begin else _At.BETWEEN
        self._held = ""
        self._claimed = ""  # may turn out to be text
        self._object = CallObjectParser(form.arguments)
        self._is_named = False
        self._text: list[str] = []
        self._news: list[ToolCall] = []

    def feed(self, text: str) -> ParsedText:
        self._held += text
        while self._held and self._go_on():
            pass
        return self._heard()

    def end(self) -> ParsedText:
        """What was held back, once nothing can follow."""
        if self._at is _At.CALL and not self._is_named:
            self._say(self._claimed)
        elif self._at is not _At.CALL and not self.calls:
            self._say(self._claimed + self._held)
        elif self._at is _At.TEXT:
            self._say(self._held.rstrip(_SPACE))
        self._held = self._claimed = ""
        return self._heard()

    def _go_on(self) -> bool:
        """Read on from what is held; False if more has to come first."""
        if self._at is _At.TEXT:
            return self._in_text()
        if self._at is _At.BETWEEN:
            return self._between_calls()
        return self._in_call()

    def _in_text(self) -> bool:
        begin = self._form.begin
        found = self._held.find(begin) if begin else -1
        if found >= 0:
            before = self._held[:found].rstrip(_SPACE)
            self._say(before)
            self._claimed = self._held[len(before) : found + len(begin)]
            self._held, self._at = self._held[found + len(begin) :], _At.BETWEEN
            return True
        keep = _may_begin(self._held, begin)
        self._say(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return False

    def _between_calls(self) -> bool:
        form = self._form
        rest = self._held.lstrip(_SPACE + form.opening + form.between)
        self._claimed += self._held[: len(self._held) - len(rest)]
        self._held = rest
        if not rest:
            return False
        if rest.startswith("{"):
            self._object, self._is_named, self._at = CallObjectParser(form.arguments), False, _At.CALL
        elif form.end and rest.startswith(form.end):
            self._held, self._claimed, self._at = rest[len(form.end) :], "", _At.TEXT
        elif form.end.startswith(rest):
            return False
        else:
            self._unclaim()
        return True

    def _in_call(self) -> bool:
        one, held = self._object, self._held
        for at, char in enumerate(held, start=1):
            one.push(char)
            if one.done or (one.name and not self._is_named):
                self._held = held[at:]
                self._claimed += held[:at]
                return self._look()
        self._claimed += held
        self._held = ""
        self._tell_arguments()
        return False

    def _look(self) -> bool:
        """The call's name has come, or its end."""
        one = self._object
        if not self._is_named:
            if one.name not in self._names:
                self._unclaim()
                return True
            self._is_named, self._claimed = True, ""
            self.calls += 1
            self._tell(ToolCall(self.calls - 1, self._new_id(self.calls - 1), one.name))
        self._tell_arguments()
        if one.done:
            self._claimed, self._at = "", _At.BETWEEN
        return True

    def _unclaim(self) -> None:
        self._say(self._claimed)
        self._claimed, self._at = "", _At.TEXT

    def _tell_arguments(self) -> None:
        if self._is_named and (arguments := self._object.take()):
            self._tell(ToolCall(self.calls - 1, arguments=arguments))

    # ---- less what the client has

    def _say(self, text: str) -> None:
        skipped = min(self._delivered.chars, len(text))
        self._delivered = self._delivered._replace(chars=self._delivered.chars - skipped)
        self._text.append(text[skipped:])

    def _tell(self, news: ToolCall) -> None:
        last = self._delivered.calls - 1
        if (self._single and news.index) or news.index < last:
            return
        if news.index == last:
            skipped = min(self._delivered.argument_chars, len(news.arguments))
            self._delivered = self._delivered._replace(
                argument_chars=self._delivered.argument_chars - skipped
            )
            news = ToolCall(news.index, arguments=news.arguments[skipped:])
            if not news.arguments:
                return
        self._news.append(news)

    def _heard(self) -> ParsedText:
        heard = ParsedText("".join(self._text), merge_tool_calls(self._news))
        self._text, self._news = [], []
        return heard


class ToolCallStyle(NamedTuple):
    """How one attempt's model calls functions. `shown`: special tokens that its text has to show."""

    form: Format
    tools: Tools
    shown: Mapping[int, str]

    def parser(self, choice: str, delivered: Delivered) -> ToolCallParser:
        """`choice` names the choice everywhere: ids of calls are made of it."""

        def new_id(number: int) -> str:
            digest = blake2b(f"{choice} {number}".encode(), digest_size=16).hexdigest()
            return self.form.id_prefix + digest[: self.form.id_chars]

        names, single = self.tools.names, self.tools.single
        return ToolCallParser(self.form, names, single=single, new_id=new_id, delivered=delivered)


def _may_begin(text: str, mark: str) -> int:
    """The length of the longest end of `text` that may turn out to be white space and the mark."""
    cut = next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
    return len(text) - len(text[: len(text) - cut].rstrip(_SPACE)) if mark else 0


def _text(written: str) -> str:
    """The string that is written there; empty for anything else."""
    try:
        value = json.loads(written)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
