"""How chat and text completions differ on the wire, and what all chunks of one response share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.domain import TokenLogprob, ToolCall, Usage
from gateway.openai.logprobs import chat_logprobs, text_logprobs
from gateway.openai.tool_calls import whole_calls


@dataclass(frozen=True, slots=True)
class Shape:
    """`first`, `text_open` + text + `text_close`, and `last` are the JSON members of a choice in a chunk."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    first: bytes
    text_open: bytes
    text_close: bytes
    last: bytes
    whole_text: Callable[[str, Sequence[ToolCall]], dict[str, object]]
    logprobs: Callable[[Sequence[TokenLogprob], int], dict[str, object]]


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of one response repeats."""

    id: str
    created_s: int
    model: str
    fingerprint: str

    def fields(self, kind: str) -> dict[str, object]:
        """The fingerprint is left out when the site has none."""
        fields = {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}
        return fields | {"system_fingerprint": self.fingerprint} if self.fingerprint else fields


def usage_fields(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }


def _message(text: str, calls: Sequence[ToolCall]) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
    if calls:
        message |= {"content": text or None, "tool_calls": whole_calls(calls)}
    return {"message": message}


def _text(text: str, _calls: Sequence[ToolCall]) -> dict[str, object]:
    return {"text": text}


CHAT = Shape(
    id_prefix="chatcmpl-",
    whole_object="chat.completion",
    chunk_object="chat.completion.chunk",
    first=b'"delta":{"role":"assistant","content":""}',
    text_open=b'"delta":{"content":',
    text_close=b"}",
    last=b'"delta":{}',
    whole_text=_message,
    logprobs=chat_logprobs,
)
TEXT = Shape(
    id_prefix="cmpl-",
    whole_object="text_completion",
    chunk_object="text_completion",
    first=b"",
    text_open=b'"text":',
    text_close=b"",
    last=b'"text":""',
    whole_text=_text,
    logprobs=text_logprobs,
)
