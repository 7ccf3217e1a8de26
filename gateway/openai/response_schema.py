"""Describes the JSON of responses: where chat and text completions differ, what all chunks have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.domain import TokenLogprob, ToolCall, Usage
from gateway.openai.logprobs import chat_logprobs, text_logprobs
from gateway.openai.tool_calls import merge_tool_calls


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
    render_text: Callable[[str, Sequence[ToolCall]], dict[str, object]]
    logprobs: Callable[[Sequence[TokenLogprob], int], dict[str, object]]


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Fields that every chunk of one response repeats."""

    id: str
    created_s: int
    model: str
    fingerprint: str

    def fields(self, object_type: str) -> dict[str, object]:
        """Return the JSON fields. The fingerprint is left out when the site has none."""
        fields = {"id": self.id, "object": object_type, "created": self.created_s, "model": self.model}
        return fields | {"system_fingerprint": self.fingerprint} if self.fingerprint else fields


def usage_fields(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }


def _render_message(text: str, calls: Sequence[ToolCall]) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
    if calls:
        message |= {"content": text or None, "tool_calls": merge_tool_calls(calls)}
    return {"message": message}


def _render_text(text: str, _calls: Sequence[ToolCall]) -> dict[str, object]:
    return {"text": text}


CHAT = ResponseSchema(
    id_prefix="chatcmpl-",
    object_type="chat.completion",
    chunk_object_type="chat.completion.chunk",
    first=b'"delta":{"role":"assistant","content":""}',
    text_prefix=b'"delta":{"content":',
    text_suffix=b"}",
    last=b'"delta":{}',
    render_text=_render_message,
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
    render_text=_render_text,
    logprobs=text_logprobs,
)
