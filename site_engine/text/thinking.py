"""Separate the reasoning of a streamed answer from its text.

Reasoning comes first, between two marks that the chat template contains. With some models, a tool call also
ends it. The result depends only on the text, not on how the text is split into parts. White space next to the
marks is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from site_engine.core.request import Thinking
from site_engine.text.detokenize import Decoder, overlap

_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_GAP = "GAP: /[ \\t\\r\\n]{0,4}/\n"


def marks_of(template: str) -> tuple[str, str] | None:
    """Return the reasoning marks that a chat template contains, or None for a model without reasoning."""
    return next((marks for marks in _MARKS if marks[1] in template), None)


def thinking_after(prompt: str, marks: tuple[str, str]) -> Thinking:
    """Return the reasoning format of an answer to a rendered prompt, which may end with one of the marks."""
    begin, end = marks
    prompt = prompt.rstrip()
    return Thinking(begin, end, opened=prompt.endswith(begin), closed=prompt.endswith(end))


def after_thought(source: str, thinking: Thinking, literal: Callable[[str], str]) -> str:
    """Return the grammar `source` with reasoning before the answer. `literal` quotes text."""
    if thinking.closed or not source:
        return source
    begin, end = literal(thinking.begin), literal(thinking.end)
    if end.startswith("<["):  # a special token, which cannot occur in text
        thought = f"thought: THOUGHT {end}\nTHOUGHT: /(.|\\n)*/\n"
    else:
        thought = f"thought[lazy]: /(.|\\n)*/ {end}\n"
    first = "thought GAP" if thinking.opened else f"({begin} thought GAP)?"
    return f"start: {first} answer_itself\n{thought}{_GAP}{source.replace('start:', 'answer_itself:', 1)}"


class _State(Enum):
    BEFORE = "before"  # the begin mark may still follow
    INSIDE = "inside"
    BEHIND = "behind"  # in the white space after the reasoning
    TEXT = "text"


class ThinkingDecoder:
    """Decode an answer's text and collect the preceding reasoning separately.

    The first `skip_chars` characters of the reasoning were delivered before.
    """

    def __init__(self, decoder: Decoder, thinking: Thinking, skip_chars: int = 0) -> None:
        self._tokens = 0
        self._decode = decoder.push
        self._thinking = thinking
        self._skip = skip_chars
        self._state = _State.BEFORE
        self._buffer = ""
        self._space = ""  # pending white space, dropped if a mark follows
        self._thought = ""
        self._has_thought = False

    @property
    def tokens(self) -> int:
        """The number of reasoning tokens, including the marks. Zero until it is certain that the answer has
        reasoning, because a reported count must not decrease.
        """
        undecided = self._state is _State.BEFORE and not self._thinking.opened
        return 0 if undecided else self._tokens

    def push(self, token_id: int) -> str:
        fresh = self._decode(token_id)
        if self._state is _State.TEXT:
            return fresh
        if self._state is not _State.BEHIND:
            self._tokens += 1
        return self._read(fresh)

    def take(self) -> str:
        """Return the reasoning collected since the last call."""
        taken, self._thought = self._thought, ""
        return taken

    def end(self) -> str:
        """Return the buffered text at the end of the answer. Buffered reasoning goes to `take`."""
        buffer, self._buffer = self._buffer, ""
        if self._state is _State.BEFORE and not self._thinking.opened:
            self._tokens = 0
            return self._take_space() + buffer
        if self._state is not _State.BEHIND:
            self._think(buffer)
        return ""

    def _read(self, fresh: str) -> str:
        self._buffer += fresh
        if self._state is _State.BEFORE:
            self._read_beginning()
        if self._state is _State.INSIDE:
            self._read_thought()
        if self._state is _State.BEHIND:
            self._buffer = self._buffer.lstrip()
            if self._buffer:
                self._state = _State.TEXT
        if self._state is not _State.TEXT:
            return ""
        text, self._buffer = self._buffer, ""
        return text

    def _read_beginning(self) -> None:
        thinking, found = self._thinking, self._buffer.lstrip()
        self._space += self._buffer[: len(self._buffer) - len(found)]
        self._buffer = found
        if found.startswith(thinking.begin):
            self._state, self._buffer = _State.INSIDE, found[len(thinking.begin) :]
        elif thinking.begin.startswith(found):
            return
        elif thinking.opened:
            self._state = _State.INSIDE
        else:
            self._state, self._tokens = _State.TEXT, 0
            self._buffer = self._take_space() + found

    def _read_thought(self) -> None:
        end, call = self._thinking.end, self._thinking.call
        thought, mark, rest = self._buffer.partition(end)
        if call and call in thought:
            thought = thought[: thought.index(call)]
            self._state, self._buffer = _State.BEHIND, self._buffer[len(thought) :]
            self._tokens -= 1  # the call mark is usually one token
        elif mark:
            self._state, self._buffer = _State.BEHIND, rest
        else:
            held = max(overlap(thought, end), overlap(thought, call) if call else 0)
            thought, self._buffer = thought[: len(thought) - held], thought[len(thought) - held :]
        self._think(thought)

    def _think(self, part: str) -> None:
        """Add a part of the reasoning. White space at the start and end of the whole is dropped."""
        certain = part.rstrip()
        if certain:
            space = self._take_space()
            said = space + certain if self._has_thought else certain.lstrip()
            self._has_thought = True
            skipped = min(self._skip, len(said))
            self._skip -= skipped
            self._thought += said[skipped:]
        self._space += part[len(certain) :]

    def _take_space(self) -> str:
        space, self._space = self._space, ""
        return space
