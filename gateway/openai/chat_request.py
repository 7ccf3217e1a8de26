"""Reads the body of POST /v1/chat/completions. Does not render the chat: the templates are at the sites."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from gateway.openai.answer_schema import read_format
from gateway.openai.chat_tools import read_chat_tools
from gateway.openai.content_parts import CHAT_IMAGE, Content, read_content
from gateway.openai.custom_tools import custom_arguments
from gateway.openai.fields import MISSING, UNSUPPORTED, Fields, echo
from gateway.openai.reasoning import (
    read_earlier_reasoning,
    read_effort,
    read_template_kwargs,
    refuse_hidden_reasoning,
)
from gateway.openai.request import GenerationRequest, read_stream_options
from gateway.openai.sampling import (
    MAX_COUNT,
    UNSUPPORTED_FIELDS,
    read_conversation,
    read_priority,
    read_sampling,
    refuse_unsupported,
)
from gateway.openai.text_parts import read_text
from gateway.openai.tools import required_child
from gateway.prompt import Chat, Message

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 4096
REFUSED_FIELDS = UNSUPPORTED_FIELDS | {
    "functions",
    "audio",
    "prediction",
    "verbosity",
}
_UNREAD_PARTS = {"audio": "leave it out", "function_call": "send the call as 'tool_calls'"}
"""Fields with a part of an assistant's output that can't be passed to models, and the advice for each."""


def read_chat(fields: Fields) -> GenerationRequest:
    model = fields.required_text("model")
    messages = tuple(map(_message, read_messages(fields)))
    limit_field, max_tokens = _max_tokens(fields)
    _refuse_unsupported_by_chat(fields)
    tools, custom_tools = read_chat_tools(fields)
    sampling = read_sampling(
        fields, max_tokens=max_tokens, logprobs=_logprobs(fields), guided_json=read_format(fields)
    )
    refuse_hidden_reasoning(fields)
    prompt = Chat(messages, *tools, read_template_kwargs(fields), read_effort(fields, "reasoning_effort"))
    return GenerationRequest(
        model,
        (prompt,),
        sampling,
        limit_field,
        read_stream_options(fields),
        read_priority(fields),
        conversation=read_conversation(fields),
        custom_tools=custom_tools,
    )


def _max_tokens(fields: Fields) -> tuple[str, int | None]:
    """Return the name of the field that applies and its value. Both are checked; the newer one wins."""
    old = fields.integer("max_tokens", 1, MAX_COUNT, None)
    new = fields.integer("max_completion_tokens", 1, MAX_COUNT, None)
    return ("max_tokens", old) if new is None else ("max_completion_tokens", new)


def _logprobs(fields: Fields) -> int | None:
    enabled = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS, None)
    if top is not None and not enabled:
        fields.refuse("top_logprobs", "is only allowed with 'logprobs': true")
    return (top or 0) if enabled else None


def _refuse_unsupported_by_chat(fields: Fields) -> None:
    refuse_unsupported(fields, REFUSED_FIELDS)
    if fields.raw("web_search_options") is not None:  # also {}, which asks for a search
        fields.refuse("web_search_options", "is not supported: nothing is searched here", UNSUPPORTED)
    if fields.raw("function_call") not in (None, "none"):
        fields.refuse("function_call", "is only allowed with 'functions'")
    if any(modality != "text" for modality in fields.items("modalities")):
        fields.refuse("modalities", "can only be ['text']", UNSUPPORTED)


def read_messages(fields: Fields) -> Iterator[Fields]:
    """Yield the messages, or none if there are more than MAX_MESSAGES."""
    if fields.required("messages") is not None:
        yield from fields.bounded_objects("messages", MAX_MESSAGES, "message")


def _message(message: Fields) -> Message:
    role = _role(message)
    calls = _tool_calls(message) if role == "assistant" else ""
    reasoning = read_earlier_reasoning(message) if role == "assistant" else ""
    refusal = message.text("refusal") if role == "assistant" else ""
    content = message.raw("content")
    if content is None and not (calls or reasoning or refusal):
        message.refuse(
            "content",
            "is required" + (" unless there are tool_calls" if role == "assistant" else ""),
            MISSING,
        )
    call_id = message.required_text("tool_call_id") if role == "tool" else ""
    for name, instead in _UNREAD_PARTS.items() if role == "assistant" else ():
        if message.raw(name) is not None:
            message.refuse(name, f"is not supported; {instead}", UNSUPPORTED)
    read = _content(message, role, content)
    text = read.text + refusal
    return Message(role, text, message.text("name"), calls, call_id, reasoning=reasoning, images=read.images)


def _content(message: Fields, role: str, content: object) -> Content:
    """Read the text, and for users and tools also the images."""
    if content is None:
        return Content()
    if role in ("user", "tool"):
        return read_content(message, "content", content, ("text",), CHAT_IMAGE)
    kinds = ("text", "refusal") if role == "assistant" else ("text",)
    return Content(read_text(message, "content", content, kinds))


def _role(message: Fields) -> str:
    role = message.required("role")
    if isinstance(role, str) and role in ROLES:
        return role
    if role is not None:
        message.refuse("role", f"must be one of {', '.join(ROLES)}, got {echo(role)}")
    return ""


def _tool_calls(message: Fields) -> str:
    """Return OpenAI's array as JSON, with only the fields that a template reads."""
    read = [_tool_call(call) for call in message.objects("tool_calls", message.items("tool_calls"))]
    return msgspec.json.encode(read).decode() if read else ""


def _tool_call(call: Fields) -> dict[str, object]:
    """Read one call. A call of a custom tool becomes a call of the function that stands for the tool."""
    call_id, kind = call.required_text("id"), call.required("type")
    if kind not in (None, "function", "custom"):
        call.refuse("type", "can be 'function' or 'custom'")
    tool = required_child(call, "custom" if kind == "custom" else "function")
    if tool is None:
        return {}
    name = tool.required_text("name")
    arguments = custom_arguments(tool.text("input")) if kind == "custom" else tool.text("arguments")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
