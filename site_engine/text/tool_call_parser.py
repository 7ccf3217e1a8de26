"""Calls of functions, told apart from text while an answer grows: text in, text and news of calls out.

What comes out depends on the text alone, not on how it was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from enum import Enum
from hashlib import blake2b
from typing import NamedTuple

from site_engine.core.request import ToolCall
from site_engine.text.call_object import CallObject
from site_engine.text.tool_format import Format, Tools

_SPACE = " \t\r\n"


class Heard(NamedTuple):
    text: str
    calls: tuple[ToolCall, ...]


class Delivered(NamedTuple):
    """What the client has of a resumed answer; `argument_chars` are those of the last call begun."""

    chars: int = 0
    calls: int = 0
    argument_chars: int = 0


NOTHING = Delivered()


class _At(Enum):
    TEXT = "text"
    BETWEEN = "between"  # after a mark that begins calls, outside any of them
    CALL = "call"


class CallReader:
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
        self._object = CallObject(form.arguments)
        self._is_named = False
        self._text: list[str] = []
        self._news: list[ToolCall] = []

    def feed(self, text: str) -> Heard:
        self._held += text
        while self._held and self._go_on():
            pass
        return self._heard()

    def end(self) -> Heard:
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
            self._object, self._is_named, self._at = CallObject(form.arguments), False, _At.CALL
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

    def _heard(self) -> Heard:
        heard = Heard("".join(self._text), melted(self._news))
        self._text, self._news = [], []
        return heard


class Calling(NamedTuple):
    """How one attempt's model calls functions. `shown`: special tokens that its text has to show."""

    form: Format
    tools: Tools
    shown: Mapping[int, str]

    def reader(self, choice: str, delivered: Delivered) -> CallReader:
        """`choice` names the choice everywhere: ids of calls are made of it."""

        def new_id(number: int) -> str:
            digest = blake2b(f"{choice} {number}".encode(), digest_size=16).hexdigest()
            return self.form.id_prefix + digest[: self.form.id_chars]

        names, single = self.tools.names, self.tools.single
        return CallReader(self.form, names, single=single, new_id=new_id, delivered=delivered)


def melted(news: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    """The same news in as few pieces as can be: what follows on the same call is added to it."""
    found: list[ToolCall] = []
    for each in news:
        if found and found[-1].index == each.index and not each.id:
            found[-1] = replace(found[-1], arguments=found[-1].arguments + each.arguments)
        else:
            found.append(each)
    return tuple(found)


def _may_begin(text: str, mark: str) -> int:
    """The length of the longest end of `text` that may turn out to be white space and the mark."""
    cut = next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
    return len(text) - len(text[: len(text) - cut].rstrip(_SPACE)) if mark else 0
