"""Reads the body of POST /v1/messages as a chat.

`cache_control` has no effect: sites cache the prefixes of prompts automatically.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from gateway.anthropic.image_block import BLOCK_IMAGE
from gateway.domain import Sampling
from gateway.openai.chat_request import read_messages
from gateway.openai.content_parts import Content, content_of, read_content
from gateway.openai.fields import MISSING, UNSUPPORTED, WRONG_TYPE, Fields, echo
from gateway.openai.image_data import Image
from gateway.openai.request import GenerationRequest, StreamOptions
from gateway.openai.sampling import MAX_COUNT, left_out, stop_strings
from gateway.openai.text_parts import read_text
from gateway.openai.tools import ToolChoice, Tools, distinct_names, offered_tools, read_tool_items
from gateway.prompt import Chat, Message

MAX_STOPS = 16
BETWEEN_BLOCKS = "\n"
"""Separates text blocks, which are separate texts, such as a reminder and a question. Blocks of an assistant
are pieces of one text and are joined without it.
"""
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_ROLES = ("user", "assistant", "system")
_THINKING = {"enabled": "medium", "disabled": "none", "adaptive": ""}
"""The reasoning effort for each type of `thinking`."""
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
_UNSUPPORTED_FIELDS = ("container", "mcp_servers", "previous_message_id")
_IGNORED_FIELDS = frozenset(
    {"metadata", "service_tier", "cache_control", "inference_geo", "context_management"}
)


def read_message_request(fields: Fields, *, counted: bool = False) -> GenerationRequest:
    """Read a request. A `max_tokens` above the model's context means as many tokens as fit, since clients
    send one number to all models. It may be omitted if the prompt is only `counted`.
    """
    model = fields.required_text("model")
    max_tokens = fields.integer("max_tokens", 1, MAX_COUNT, None)
    if max_tokens is None and not counted:
        fields.required("max_tokens")
    fields.present(_IGNORED_FIELDS)
    for name in _UNSUPPORTED_FIELDS:
        if fields.raw(name):
            fields.refuse(name, "is not supported; leave it out", UNSUPPORTED)
    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 0, 2, 1.0),
        top_p=fields.number("top_p", 0, 1, 1.0),
        top_k=fields.integer("top_k", 0, MAX_COUNT, 0),
        stop=stop_strings(fields, "stop_sequences", fields.items("stop_sequences"), MAX_STOPS),
        guided_json=_output_schema(fields),
        left_out=left_out(fields),
    )
    tools = _tools(fields)
    messages = _messages(fields)
    if not counted and _ends_with_the_assistant(fields.raw("messages")):
        fields.refuse(
            "messages", "must not end with the assistant: the conversation must end with a user message"
        )
    prompt = Chat(messages, *tools, reasoning_effort=_effort(fields))
    return GenerationRequest(
        model=model,
        prompts=(prompt,),
        sampling=sampling,
        limit_field="",
        stream_options=StreamOptions(fields.flag("stream")),
        priority=0,
        field_names={
            "response_format": "output_format" if fields.raw("output_format") else "output_config.format"
        },
    )


def _ends_with_the_assistant(messages: object) -> bool:
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


# ---- messages


def _messages(fields: Fields) -> tuple[Message, ...]:
    messages: list[Message] = []
    system = fields.raw("system")
    if system is not None and (text := read_text(fields, "system", system, between=BETWEEN_BLOCKS)):
        messages.append(Message("system", text))
    for message in read_messages(fields):
        messages += _turn(message)
    return tuple(messages)


def _turn(message: Fields) -> list[Message]:
    """Return the messages of one turn. Results of calls become separate messages before the text."""
    role = message.required("role")
    if role not in _ROLES:
        if role is not None:
            message.refuse("role", f"must be one of {', '.join(_ROLES)}, got {echo(role)}")
        return []
    content = message.required("content")
    if content is None or isinstance(content, str):
        return [Message(str(role), content or "")]
    if not isinstance(content, list):
        message.refuse("content", f"must be a string or a list of blocks, got {echo(content)}", WRONG_TYPE)
        return []
    read = [_block(block, str(role)) for block in list(message.objects("content", content))]
    between = "" if role == "assistant" else BETWEEN_BLOCKS
    shown = content_of([part for part in read if isinstance(part, str | Image)], between)
    calls = [part for part in read if isinstance(part, dict)]
    reasoning = "".join(part.text for part in read if isinstance(part, _Thought))
    results = [part for part in read if isinstance(part, Message)]
    if results and not (shown.text or shown.images or calls or reasoning):
        return results
    calls_json = msgspec.json.encode(calls).decode() if calls else ""
    return [
        *results,
        Message(str(role), shown.text, tool_calls_json=calls_json, reasoning=reasoning, images=shown.images),
    ]


class _Thought(NamedTuple):
    text: str


def _block(block: Fields, role: str) -> str | Image | _Thought | dict[str, object] | Message:
    """Return a text, an image, a thought, a call as templates read it, or the result of a call."""
    kind = block.required("type")
    if kind == "text":
        return "" if block.required("text") is None else block.text("text")
    if kind == "tool_use" and role == "assistant":
        sent = block.raw("input")
        if sent not in (None, "") and not isinstance(sent, dict):
            block.nested("input", sent)  # records the problem
        arguments = msgspec.json.encode(sent or {}).decode()
        function = {"name": block.required_text("name"), "arguments": arguments}
        return {"id": block.required_text("id"), "type": "function", "function": function}
    if kind == "tool_result" and role == "user":
        content = block.raw("content")
        read = Content()
        if content is not None:
            read = read_content(block, "content", content, ("text",), BLOCK_IMAGE, between=BETWEEN_BLOCKS)
        call_id = block.required_text("tool_use_id")
        return Message("tool", read.text, tool_call_id=call_id, images=read.images)
    if kind == BLOCK_IMAGE.type and role == "user":
        return BLOCK_IMAGE.read(block) or ""
    if kind == "thinking" and role == "assistant":
        return _Thought("" if block.required("thinking") is None else block.text("thinking"))
    if kind == "redacted_thinking" and role == "assistant":
        return ""  # encrypted by another provider
    if kind is not None:
        block.refuse("type", f"can't be {echo(kind)} in a message of the {role}", UNSUPPORTED)
    return ""


# ---- tools


_CHOICES = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


def _tools(fields: Fields) -> Tools:
    functions = [_tool(item) for item in read_tool_items(fields)]
    choice, single = _read_choice(fields, distinct_names(fields, functions))
    return offered_tools(functions, choice, single=single)


def _tool(item: Fields) -> dict[str, object]:
    kind = item.raw("type")
    if kind not in (None, "custom"):
        item.refuse("type", f"can only be 'custom', got {echo(kind)}: no tool runs here", UNSUPPORTED)
    name = item.required_text("name")
    if name and not TOOL_NAME.fullmatch(name):
        item.refuse("name", "has 1 to 128 letters, digits, underscores and dashes")
    read: dict[str, object] = {"name": name}
    if description := item.text("description"):
        read["description"] = description
    schema = item.raw("input_schema")
    if isinstance(schema, dict):
        read["parameters"] = schema
    elif schema is not None:
        item.refuse("input_schema", f"must be a JSON schema, got {echo(schema)}", WRONG_TYPE)
    elif kind in (None, "custom"):
        item.refuse("input_schema", "is required", MISSING)
    if item.flag("strict"):
        read["strict"] = True
    return read


def _read_choice(fields: Fields, names: set[str]) -> tuple[ToolChoice, bool]:
    """Return the choice, and whether at most one call is allowed."""
    choice = fields.child("tool_choice")
    if choice is None:
        return ToolChoice("auto"), False
    kind = choice.required("type")
    single = choice.flag("disable_parallel_tool_use")
    if not isinstance(kind, str) or kind not in _CHOICES:
        if kind is not None:
            choice.refuse("type", f"must be one of {', '.join(_CHOICES)}, got {echo(kind)}")
        return ToolChoice("auto"), False
    if kind in ("any", "tool") and not names:
        fields.refuse("tool_choice", "is only allowed with 'tools'")
        return ToolChoice("auto"), False
    name = choice.required_text("name") if kind == "tool" else ""
    if name and name not in names:
        choice.refuse("name", f"is {echo(name)}, which is not among 'tools'")
    return ToolChoice(_CHOICES[str(kind)], name), single


# ---- other fields


def _effort(fields: Fields) -> str:
    """Return the reasoning effort from `thinking` and `output_config.effort`, empty if neither sets one.

    `budget_tokens` is validated but has no effect: the model decides when to stop reasoning.
    """
    thinking, config = fields.child("thinking"), fields.child("output_config")
    effort = None if config is None else config.raw("effort")
    if config is not None and effort is not None and (not isinstance(effort, str) or effort not in _EFFORTS):
        config.refuse("effort", f"must be one of {', '.join(_EFFORTS)}, got {echo(effort)}")
        effort = None
    wanted = _EFFORTS[str(effort)] if effort is not None else ""
    if thinking is None:
        return wanted
    kind = thinking.required("type")
    thinking.integer("budget_tokens", 1, MAX_COUNT, None)
    if not isinstance(kind, str) or kind not in _THINKING:
        if kind is not None:
            thinking.refuse("type", f"must be one of {', '.join(_THINKING)}, got {echo(kind)}")
        return wanted
    return "none" if kind == "disabled" else wanted or _THINKING[kind]


def _output_schema(fields: Fields) -> str:
    """Return the JSON schema of `output_config.format`, or of `output_format`, its name while it was a beta;
    empty if there is none.
    """
    config = fields.child("output_config")
    output_format = fields.child("output_format")
    if config is not None and config.raw("format") is not None:
        output_format = config.child("format")
    if output_format is None:
        return ""
    kind = output_format.required("type")
    if kind not in (None, "json_schema"):
        output_format.refuse("type", f"can only be 'json_schema', got {echo(kind)}", UNSUPPORTED)
    schema = output_format.required("schema")
    if schema is None or output_format.child("schema") is None:
        return ""
    return msgspec.json.encode(schema).decode()
