"""Encodes an answer as one JSON body: collects its pieces choice by choice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field

import msgspec

from gateway.domain import AnswerEvent, Delta, Finish, Opening, ToolCall, Usage
from gateway.openai.error_body import incomplete_answer
from gateway.openai.logprobs import LogprobLists
from gateway.openai.response_schema import ChoiceParts, ResponseHead, ResponseSchema, usage_fields
from gateway.prompt import Pooled


@dataclass(slots=True)
class Choice:
    """The parts of one choice so far."""

    texts: list[str] = field(default_factory=list)
    logprobs: LogprobLists = field(default_factory=LogprobLists)
    tool_calls: list[ToolCall] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    pooled: dict[int, Pooled] = field(default_factory=dict)  # by input; a later attempt replaces results
    finish: Finish | None = None
    stop_sequence: str = ""

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.reasoning.append(delta.reasoning)
        self.refusals.append(delta.refusal)
        self.logprobs.add(delta)
        self.tool_calls += delta.tool_calls
        self.pooled.update((each.index, each) for each in delta.pooled)
        self.finish = delta.finish or self.finish
        self.stop_sequence = delta.stop_sequence or self.stop_sequence

    def body(
        self, schema: ResponseSchema, index: int, with_logprobs: bool, custom_tools: Collection[str]
    ) -> dict[str, object]:
        logprobs = self.logprobs.fields() if with_logprobs else None
        text, reasoning, refusal = map("".join, (self.texts, self.reasoning, self.refusals))
        return {
            "index": index,
            **schema.render(ChoiceParts(text, self.tool_calls, reasoning, refusal, custom_tools)),
            "logprobs": logprobs,
            "finish_reason": self.finish,
        }


@dataclass(slots=True)
class UnaryResponse:
    """A complete answer."""

    opening: Opening
    choices: list[Choice]
    usage: Usage

    def body(
        self,
        schema: ResponseSchema,
        head: ResponseHead,
        with_logprobs: bool,
        custom_tools: Collection[str] = (),
    ) -> bytes:
        choices = [
            choice.body(schema, index, with_logprobs, custom_tools)
            for index, choice in enumerate(self.choices)
        ]
        return msgspec.json.encode(
            head.fields(schema.object_type) | {"choices": choices, "usage": usage_fields(self.usage)}
        )


async def collect(
    pieces: AsyncIterator[AnswerEvent], choices: int, logprobs: Callable[[], LogprobLists]
) -> UnaryResponse:
    """Collect an answer. `logprobs` creates the collector of a choice's log probabilities. Raises
    UpstreamLost if the answer is incomplete.
    """
    opening: Opening | None = None
    usage: Usage | None = None
    collected = [Choice(logprobs=logprobs()) for _ in range(choices)]
    async for piece in pieces:
        if isinstance(piece, Delta):
            collected[piece.index].add(piece)
        elif isinstance(piece, Opening):
            opening = piece
        else:
            usage = piece
    if opening is None or usage is None or any(choice.finish is None for choice in collected):
        raise incomplete_answer()
    return UnaryResponse(opening, collected, usage)
