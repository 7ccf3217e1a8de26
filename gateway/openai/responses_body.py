"""Encodes an answer as one response object of POST /v1/responses, and the items of its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.domain import Finish, ToolCall, Usage
from gateway.openai.custom_tools import custom_input
from gateway.openai.error_body import ErrorResponse
from gateway.openai.request import GenerationRequest
from gateway.openai.response_schema import ResponseHead
from gateway.openai.responses_tools import CalledTool, called_tools
from gateway.openai.tool_calls import merge_calls
from gateway.openai.unary_response import UnaryResponse

COMPLETED: Final = "completed"
INCOMPLETE: Final = "incomplete"
IN_PROGRESS: Final = "in_progress"
INCOMPLETE_REASONS: Final = {Finish.LENGTH: "max_output_tokens", Finish.CONTENT_FILTER: "content_filter"}

Item = dict[str, object]
_ID_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


def response_fields(
    request: GenerationRequest,
    head: ResponseHead,
    status: str,
    output: Sequence[Item],
    *,
    usage: Usage | None = None,
    finish: Finish | None = None,
    error: ErrorResponse | None = None,
) -> dict[str, object]:
    """Return the fields of a response object. `usage` is None if the answer has not ended or has failed."""
    reason = INCOMPLETE_REASONS.get(finish) if finish else None
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created_s,
        "completed_at": int(head.unix_time()) if status == COMPLETED else None,
        "status": status,
        "error": None if error is None else {"code": _error_code(error), "message": error.message},
        "incomplete_details": {"reason": reason} if reason else None,
        "model": head.model,
        "output": output,
        "usage": None if usage is None else usage_fields(usage),
        "previous_response_id": None,
        "truncation": "disabled",
        "store": False,
        "background": False,
        "service_tier": "default",
        **request.repeated,
    }


def _error_code(error: ErrorResponse) -> str:
    """Return the code of a failed response: one of the few that the format defines."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.status < 500 else "server_error"


def usage_fields(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def item_id(kind: str, head: ResponseHead, output_index: int) -> str:
    """Return the id of an item: unique among the items of all responses."""
    prefix = _ID_PREFIXES[kind]
    return f"{prefix}_{head.id.removeprefix('resp_')}_{output_index}"


def output_text(text: str, logprobs: object = ()) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def refusal_part(text: str) -> Item:
    return {"type": "refusal", "refusal": text}


def reasoning_text(text: str) -> Item:
    return {"type": "reasoning_text", "text": text}


def part_item(identity: str, status: str, content: Sequence[Item], *, reasoning: bool = False) -> Item:
    """Return a message item, or a reasoning item if `reasoning` is True."""
    if reasoning:
        return {"type": "reasoning", "id": identity, "status": status, "summary": [], "content": content}
    return {"type": "message", "id": identity, "status": status, "role": "assistant", "content": content}


def call_item(identity: str, status: str, call: ToolCall, tool: CalledTool) -> Item:
    """Return the item of a call. A call of a custom tool has `input` in place of `arguments`."""
    fields: Item = {"id": identity, "status": status, "call_id": call.id, "name": tool.name}
    if tool.namespace:
        fields["namespace"] = tool.namespace
    if tool.custom:
        return {"type": "custom_tool_call", **fields, "input": custom_input(call.arguments)}
    return {"type": "function_call", **fields, "arguments": call.arguments}


def call_kind(tool: CalledTool) -> str:
    return "custom_tool_call" if tool.custom else "function_call"


def response_body(request: GenerationRequest, head: ResponseHead, answer: UnaryResponse) -> bytes:
    (choice,) = answer.choices
    text, reasoning, refusal = map("".join, (choice.texts, choice.reasoning, choice.refusals))
    calls, tools = merge_calls(choice.tool_calls), called_tools(request.repeated["tools"])
    output: list[Item] = []
    if reasoning:
        part = reasoning_text(reasoning)
        output.append(part_item(item_id("reasoning", head, 0), COMPLETED, [part], reasoning=True))
    if text or not (calls or refusal or reasoning):
        part = output_text(text, choice.logprobs.fields()["content"] if text else ())
        output.append(part_item(item_id("message", head, len(output)), COMPLETED, [part]))
    if refusal:
        output.append(part_item(item_id("message", head, len(output)), COMPLETED, [refusal_part(refusal)]))
    for call in calls:
        tool = tools.get(call.name, CalledTool(call.name))
        output.append(call_item(item_id(call_kind(tool), head, len(output)), COMPLETED, call, tool))
    status = INCOMPLETE if choice.finish in INCOMPLETE_REASONS else COMPLETED
    output[-1]["status"] = status  # the items before the last one are complete
    fields = response_fields(request, head, status, output, usage=answer.usage, finish=choice.finish)
    return msgspec.json.encode(fields)
