"""Encodes an answer as one message of POST /v1/messages, and its errors."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gateway.bounded_json import DECODE_ERRORS
from gateway.domain import Finish, Usage
from gateway.openai.error_body import ErrorResponse
from gateway.openai.response_schema import ResponseHead
from gateway.openai.tool_calls import merge_calls
from gateway.openai.unary_response import UnaryResponse

OVERLOADED_STATUS: Final = 529
MAX_DEPTH: Final = 500
"""Maximum nesting of objects and lists in a call's arguments; decoders accept about 990 levels in all."""
STOP_REASONS: Final = {
    Finish.STOP: "end_turn",
    Finish.LENGTH: "max_tokens",
    Finish.TOOL_CALLS: "tool_use",
    Finish.CONTENT_FILTER: "refusal",
}
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED_STATUS: "overloaded_error",
}


def message_fields(head: ResponseHead) -> dict[str, object]:
    """Return the fields of a message that has no content yet."""
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
    }


def usage_fields(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation": None,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "inference_geo": None,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "server_tool_use": None,
        "service_tier": "standard",
    }


def text_block(text: str) -> dict[str, object]:
    return {"type": "text", "text": text, "citations": None}


def thinking_block(text: str) -> dict[str, object]:
    """Return a block of reasoning. It is unsigned: reasoning sent back in later turns is not verified."""
    return {"type": "thinking", "thinking": text, "signature": ""}


def tool_block(call_id: str, name: str, arguments: object) -> dict[str, object]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments, "caller": {"type": "direct"}}


def message_body(head: ResponseHead, answer: UnaryResponse) -> bytes:
    (choice,) = answer.choices
    assert choice.finish is not None, "an answer is complete"
    text, reasoning, refusal = map("".join, (choice.texts, choice.reasoning, choice.refusals))
    calls = merge_calls(choice.tool_calls)
    content = [thinking_block(reasoning)] if reasoning else []
    if text or refusal or not (calls or reasoning):
        content.append(text_block(text + refusal))
    content += [tool_block(call.id, call.name, _input(call.arguments)) for call in calls]
    return msgspec.json.encode(
        message_fields(head)
        | {
            "content": content,
            **stop_fields(choice.finish, choice.stop_sequence),
            "usage": usage_fields(answer.usage),
        }
    )


def stop_fields(finish: Finish, stop_sequence: str) -> dict[str, object]:
    """Return why a message ended; `stop_sequence` is empty unless one of the client's strings ended it."""
    if finish is Finish.STOP and stop_sequence:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_sequence}
    return {"stop_reason": STOP_REASONS[finish], "stop_sequence": None}


def _input(arguments: str) -> dict[str, object]:
    """Return the arguments as an object. Arguments that are no JSON object, such as those cut off at the
    token limit, and those that nest too deeply for clients to decode stay a text, under `arguments`.
    """
    try:
        read = msgspec.json.decode(arguments or "{}")
    except DECODE_ERRORS:
        read = None
    return read if isinstance(read, dict) and not _is_deeper(read, MAX_DEPTH) else {"arguments": arguments}


def _is_deeper(value: object, most: int) -> bool:
    """Return whether a JSON value nests more than `most` objects and lists."""
    level: list[Any] = [value]
    for _ in range(most + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return False
        level = [child for each in level for child in (each.values() if isinstance(each, dict) else each)]
    return True


def error_fields(error: ErrorResponse, request_id: str) -> dict[str, object]:
    kind = _ERROR_TYPES.get(error_status(error), "api_error")
    details = {"type": kind, "message": error.message}
    return {"type": "error", "error": details, "request_id": request_id}


def error_status(error: ErrorResponse) -> int:
    """Return the HTTP status: 529 in place of 503, which Anthropic's clients know as overload."""
    return OVERLOADED_STATUS if error.status == 503 else error.status
