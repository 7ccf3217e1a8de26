"""Describes the JSON of responses: where chat and text completions differ, what all chunks have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from gateway.domain import TokenLogprob, ToolCall, Usage
from gateway.openai.logprobs import chat_logprobs, text_logprobs
from gateway.openai.tool_calls import merge_tool_calls


class ChoiceParts(NamedTuple):
    """All output of one choice, with its deltas joined."""

    text: str
    tool_calls: Sequence[ToolCall]
    reasoning: str
    refusal: str
    custom_tools: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class ResponseSchema:
    """JSON of one endpoint's responses.

    `first`, `text_prefix` + text + `text_suffix`, and `last` are the JSON members of a choice in a chunk.
    """

    id_prefix: str
    object_type: str
    chunk_object_type: str
    first: bytes
    text_prefix: bytes
    text_suffix: bytes
    last: bytes
    render: Callable[[ChoiceParts], dict[str, object]]
    logprobs: Callable[[Sequence[TokenLogprob], int], dict[str, object]]


class ResponseHead(msgspec.Struct, frozen=True):
    """Fields that every chunk of one response repeats. `unix_time` is the clock that dates its end."""

    id: str
    created_s: int
    model: str
    fingerprint: str
    unix_time: Callable[[], float] = time.time

    def fields(self, object_type: str) -> dict[str, object]:
        """Return the JSON fields. The fingerprint is left out when the site has none."""
        fields = {"id": self.id, "object": object_type, "created": self.created_s, "model": self.model}
        return fields | {"system_fingerprint": self.fingerprint} if self.fingerprint else fields


def usage_fields(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def reasoning_fields(reasoning: str) -> dict[str, str]:
    """Return reasoning under both names that clients know."""
    return {"reasoning_content": reasoning, "reasoning": reasoning}


def _render_message(parts: ChoiceParts) -> dict[str, object]:
    message: dict[str, object] = {
        "role": "assistant",
        "content": parts.text,
        "refusal": parts.refusal or None,
    }
    if parts.tool_calls or parts.refusal:
        message["content"] = parts.text or None
    if parts.tool_calls:
        message["tool_calls"] = merge_tool_calls(parts.tool_calls, parts.custom_tools)
    if parts.reasoning:
        message |= reasoning_fields(parts.reasoning)
    return {"message": message}


def _render_text(parts: ChoiceParts) -> dict[str, object]:
    """Render a choice of a text completion, whose format has the text only."""
    return {"text": parts.text}


CHAT = ResponseSchema(
    id_prefix="chatcmpl-",
    object_type="chat.completion",
    chunk_object_type="chat.completion.chunk",
    first=b'"delta":{"role":"assistant","content":""}',
    text_prefix=b'"delta":{"content":',
    text_suffix=b"}",
    last=b'"delta":{}',
    render=_render_message,
    logprobs=chat_logprobs,
)
TEXT = ResponseSchema(
    id_prefix="cmpl-",
    object_type="text_completion",
    chunk_object_type="text_completion",
    first=b"",
    text_prefix=b'"text":',
    text_suffix=b"",
    last=b'"text":""',
    render=_render_text,
    logprobs=text_logprobs,
)
