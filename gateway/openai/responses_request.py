"""Reads the body of POST /v1/responses as a chat. Stateless: the whole conversation is in `input`.

Responses are not stored, so `store`, `previous_response_id` and `conversation` are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from gateway.openai.answer_schema import ANY_OBJECT, read_schema
from gateway.openai.content_parts import RESPONSE_IMAGE, Content, read_content
from gateway.openai.custom_tools import custom_arguments
from gateway.openai.fields import MISSING, UNSUPPORTED, WRONG_TYPE, Fields, echo
from gateway.openai.reasoning import read_effort, read_template_kwargs
from gateway.openai.request import GenerationRequest, StreamOptions
from gateway.openai.responses_tools import encode_once, qualified_name, read_response_tools
from gateway.openai.sampling import (
    MAX_COUNT,
    UNSUPPORTED_FIELDS,
    read_conversation,
    read_priority,
    read_sampling,
    refuse_unsupported,
)
from gateway.openai.text_parts import read_text
from gateway.prompt import Chat, Message

MAX_ITEMS = 4096
MAX_TOP_LOGPROBS = 20
MAX_METADATA = 16
FIELD_NAMES = {"messages": "input", "response_format": "text.format", "logprobs": "top_logprobs"}
"""This endpoint's names for the fields of a chat that sites name in their refusals."""
LOGPROBS = "message.output_text.logprobs"
SUMMARIES = ("auto", "concise", "detailed")
_ROLES = ("system", "developer", "user", "assistant")
_PART_KINDS = {"assistant": ("output_text", "refusal", "input_text")}
STATEFUL_FIELDS = {
    "store": "can only be false: responses are not stored here",
    "previous_response_id": "is not supported: nothing is stored; send the whole conversation as 'input'",
    "conversation": "is not supported: nothing is stored; send the whole conversation as 'input'",
    "background": "is not supported: nothing is stored here that could be fetched later",
    "prompt": "is not supported: nothing is stored; send the text as 'instructions' and 'input'",
}
REFUSED_FIELDS = UNSUPPORTED_FIELDS | {"context_management"}
RESPONSE_IGNORED_FIELDS = frozenset({"user", "stream_options", "client_metadata", "prompt_cache_retention"})


def read_response(fields: Fields) -> GenerationRequest:
    model = fields.required_text("model")
    _refuse_unsupported(fields)
    messages = _messages(fields, instructions := fields.text("instructions"))
    tools, shown_tools, shown_choice = read_response_tools(fields)
    text_format, guided_json = _text_format(fields)
    max_tokens = fields.integer("max_output_tokens", 1, MAX_COUNT, None)
    top_logprobs = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS, None)
    include = fields.items("include")
    logprobs = (top_logprobs or 0) if top_logprobs is not None or LOGPROBS in include else None
    sampling = read_sampling(fields, max_tokens=max_tokens, logprobs=logprobs, guided_json=guided_json)
    if sampling.n != 1:
        fields.refuse("n", "can only be 1: a response is one answer", UNSUPPORTED)
    reasoning = _reasoning(fields)
    repeated = {
        "instructions": instructions or None,
        "max_output_tokens": max_tokens,
        "max_tool_calls": fields.integer("max_tool_calls", 1, MAX_COUNT, None),
        "metadata": _metadata(fields),
        "parallel_tool_calls": fields.raw("parallel_tool_calls") is None
        or fields.flag("parallel_tool_calls"),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "top_logprobs": top_logprobs or 0,
        "tools": shown_tools,
        "tool_choice": shown_choice,
        "text": text_format,
        "reasoning": reasoning,
        "safety_identifier": fields.text("safety_identifier") or None,
        "prompt_cache_key": fields.text("prompt_cache_key") or None,
    }
    return GenerationRequest(
        model=model,
        prompts=(Chat(messages, *tools, read_template_kwargs(fields), reasoning["effort"] or ""),),
        sampling=sampling,
        limit_field="max_output_tokens",
        stream_options=StreamOptions(fields.flag("stream")),
        priority=read_priority(fields),
        conversation=read_conversation(fields),
        repeated=repeated,
        prompt_field="input",
        field_names=FIELD_NAMES if top_logprobs is not None else FIELD_NAMES | {"logprobs": "include"},
    )


def _refuse_unsupported(fields: Fields) -> None:
    for name, reason in STATEFUL_FIELDS.items():
        if fields.raw(name):
            fields.refuse(name, reason, UNSUPPORTED)
    if fields.raw("truncation") not in (None, "disabled"):
        fields.refuse("truncation", "can only be 'disabled': a prompt is never cut here", UNSUPPORTED)
    refuse_unsupported(fields, REFUSED_FIELDS)
    fields.present(RESPONSE_IGNORED_FIELDS)


# ---- input


@dataclass(slots=True)
class _Conversation:
    """Messages so far. Consecutive reasoning, text and calls of the assistant become one message."""

    messages: list[Message] = field(default_factory=list)
    calls: list[dict[str, object]] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)  # of the assistant's next message

    def add(self, message: Message) -> None:
        self.end_calls()
        if message.role == "assistant":
            message, self.reasoning = replace(message, reasoning="".join(self.reasoning)), []
        self.messages.append(message)

    def add_reasoning(self, text: str) -> None:
        self.end_calls()
        self.reasoning.append(text)

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        function = {"name": name, "arguments": arguments}
        self.calls.append({"id": call_id, "type": "function", "function": function})

    def end_calls(self) -> None:
        if not self.calls:
            return
        calls_json = msgspec.json.encode(self.calls).decode()
        said = Message("assistant", "")
        if self.messages and self.messages[-1].role == "assistant" and not self.messages[-1].tool_calls_json:
            said = self.messages.pop()
        reasoning = "".join([said.reasoning, *self.reasoning])
        self.messages.append(replace(said, tool_calls_json=calls_json, reasoning=reasoning))
        self.calls, self.reasoning = [], []


def _messages(fields: Fields, instructions: str) -> tuple[Message, ...]:
    conversation = _Conversation()
    if instructions:
        conversation.add(Message("system", instructions))
    value = fields.required("input")
    if isinstance(value, str):
        if not value:
            fields.refuse("input", "must not be empty")
        conversation.add(Message("user", value))
    elif value is not None:
        for item in fields.bounded_objects("input", MAX_ITEMS, "item"):
            _read_item(item, conversation)
    conversation.end_calls()
    return tuple(conversation.messages)


def _read_item(item: Fields, conversation: _Conversation) -> None:
    kind = item.raw("type")
    if kind is None and item.raw("role") is not None:
        kind = "message"
    if kind == "message":
        conversation.add(_message(item))
    elif kind == "function_call":
        name = qualified_name(item.text("namespace"), item.required_text("name"))
        conversation.add_call(item.required_text("call_id"), name, item.text("arguments"))
    elif kind == "custom_tool_call":
        name = qualified_name(item.text("namespace"), item.required_text("name"))
        conversation.add_call(item.required_text("call_id"), name, custom_arguments(item.text("input")))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = item.required("output")
        kinds = ("input_text", "output_text")
        read = Content() if output is None else read_content(item, "output", output, kinds, RESPONSE_IMAGE)
        call_id = item.required_text("call_id")
        conversation.add(Message("tool", read.text, tool_call_id=call_id, images=read.images))
    elif kind is None:
        item.refuse("type", "is required", MISSING)
    elif kind == "reasoning":
        conversation.add_reasoning(_earlier_reasoning(item))
    else:
        item.refuse("type", f"can't be {echo(kind)}: this endpoint reads messages and calls", UNSUPPORTED)


def _earlier_reasoning(item: Fields) -> str:
    """Return the text of a reasoning item, or its summary if it has no text. Content that another provider
    encrypted is ignored.
    """
    for name, kinds in (("content", ("reasoning_text", "text")), ("summary", ("summary_text",))):
        if item.raw(name) not in (None, "", []):
            return read_text(item, name, item.raw(name), kinds)
    return ""


def _message(item: Fields) -> Message:
    role = item.required("role")
    if role not in _ROLES:
        if role is not None:
            item.refuse("role", f"must be one of {', '.join(_ROLES)}, got {echo(role)}")
        return Message("user", "")
    kinds = _PART_KINDS.get(str(role), ("input_text",))
    content = item.required("content")
    if content is None:
        return Message(str(role), "")
    if role == "user":
        read = read_content(item, "content", content, kinds, RESPONSE_IMAGE)
        return Message("user", read.text, images=read.images)
    return Message(str(role), read_text(item, "content", content, kinds))


# ---- other fields


def _text_format(fields: Fields) -> tuple[dict[str, object], str]:
    """Return the field `text` as the response repeats it, and the schema to enforce, empty if none."""
    plain: dict[str, object] = {"format": {"type": "text"}}
    text = fields.child("text")
    if text is None:
        return plain, ""
    verbosity = text.raw("verbosity")
    if verbosity not in (None, "low", "medium", "high"):
        text.refuse("verbosity", f"can be 'low', 'medium' or 'high', got {echo(verbosity)}")
    shown: dict[str, object] = {"verbosity": verbosity} if verbosity is not None else {}
    text_format = text.child("format")
    if text_format is None:
        return plain | shown, ""
    kind = text_format.required("type")
    if kind == "json_object":
        return {"format": {"type": "json_object"}, **shown}, ANY_OBJECT
    if kind == "json_schema":
        text_format.required("schema")
        schema = read_schema(text_format)
        described = {
            "type": "json_schema",
            "name": text_format.text("name"),
            "description": text_format.text("description") or None,
            "schema": encode_once(text_format.raw("schema")),
            "strict": text_format.flag("strict"),
        }
        return {"format": described, **shown}, schema
    if kind not in (None, "text"):
        message = f"can be 'text', 'json_object' or 'json_schema', got {echo(kind)}: no other can be enforced"
        text_format.refuse("type", message, UNSUPPORTED)
    return plain | shown, ""


def _reasoning(fields: Fields) -> dict[str, str | None]:
    reasoning = fields.child("reasoning")
    if reasoning is None:
        return {"effort": None, "summary": None}
    summary = reasoning.text("summary") or None
    if summary not in (None, *SUMMARIES):
        reasoning.refuse("summary", f"must be one of {', '.join(SUMMARIES)}, got {echo(summary)}")
    return {"effort": read_effort(reasoning, "effort") or None, "summary": summary}


def _metadata(fields: Fields) -> dict[str, object]:
    metadata = fields.child("metadata")
    if metadata is None:
        return {}
    names = metadata.unread()
    if len(names) > MAX_METADATA:
        fields.refuse("metadata", f"holds at most {MAX_METADATA} pairs, got {len(names)}")
        return {}
    for name in names:
        value = metadata.raw(name)
        if not isinstance(value, str) or len(name) > 64 or len(value) > 512:
            metadata.refuse(
                name[:64], "must be a text of at most 512 characters under a name of at most 64", WRONG_TYPE
            )
    return {name: metadata.raw(name) for name in names}
