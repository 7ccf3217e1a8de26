"""An answer as one JSON body: its pieces joined choice by choice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec

from gateway.domain import Delta, Finish, Opening, Piece, TokenLogprob, ToolCall, Usage
from gateway.openai.events import stopped_short
from gateway.openai.shapes import Head, Shape, usage_fields


@dataclass(slots=True)
class Choice:
    """One choice as it grows."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.logprobs += delta.prompt_logprobs
        self.logprobs += delta.logprobs
        self.tool_calls += delta.tool_calls
        self.finish = delta.finish or self.finish

    def body(self, shape: Shape, index: int, with_logprobs: bool) -> dict[str, object]:
        logprobs = shape.logprobs(self.logprobs, 0) if with_logprobs else None
        return {
            "index": index,
            **shape.whole_text("".join(self.texts), self.tool_calls),
            "logprobs": logprobs,
            "finish_reason": self.finish,
        }


@dataclass(slots=True)
class Whole:
    opening: Opening
    choices: list[Choice]
    usage: Usage

    def body(self, shape: Shape, head: Head, with_logprobs: bool) -> bytes:
        choices = [choice.body(shape, index, with_logprobs) for index, choice in enumerate(self.choices)]
        return msgspec.json.encode(
            head.fields(shape.whole_object) | {"choices": choices, "usage": usage_fields(self.usage)}
        )


async def gather(pieces: AsyncIterator[Piece], choices: int) -> Whole:
    """Raises UpstreamLost if the answer stops short."""
    opening: Opening | None = None
    usage: Usage | None = None
    grown = [Choice() for _ in range(choices)]
    async for piece in pieces:
        if isinstance(piece, Delta):
            grown[piece.index].add(piece)
        elif isinstance(piece, Opening):
            opening = piece
        else:
            usage = piece
    if opening is None or usage is None or any(choice.finish is None for choice in grown):
        raise stopped_short()
    return Whole(opening, grown, usage)
