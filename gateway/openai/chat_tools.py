"""Reads `tools`, `tool_choice` and `parallel_tool_calls` of POST /v1/chat/completions."""

from __future__ import annotations

from typing import NamedTuple

from gateway.openai.custom_tools import read_custom, read_grammar_format
from gateway.openai.fields import UNSUPPORTED, Fields, echo
from gateway.openai.tools import (
    NO_TOOLS,
    ToolChoice,
    Tools,
    read_allowed,
    read_function,
    read_offered,
    read_plain_choice,
    read_tool_items,
    required_child,
)

TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})


class ChatTools(NamedTuple):
    """The tools of a chat. `custom` holds the names of the custom tools among them."""

    tools: Tools = NO_TOOLS
    custom: frozenset[str] = frozenset()


NO_CHAT_TOOLS = ChatTools()


def read_chat_tools(fields: Fields) -> ChatTools:
    if not fields.present(TOOL_FIELDS):
        return NO_CHAT_TOOLS
    if fields.raw("tools") == []:
        fields.refuse("tools", "must not be empty; leave it out instead")
    functions: list[dict[str, object]] = []
    custom: set[str] = set()
    for tool in read_tool_items(fields):
        kind = _kind(tool)
        inner = None if kind is None else required_child(tool, kind)
        if inner is None:
            continue
        functions.append(_read_custom(inner) if kind == "custom" else read_function(inner))
        if kind == "custom":
            custom.add(str(functions[-1]["name"]))
    return ChatTools(read_offered(fields, functions, _read_choice), frozenset(custom))


def _kind(tool: Fields) -> str | None:
    kind = tool.required("type")
    if kind in ("function", "custom"):
        return str(kind)
    if kind is not None:
        tool.refuse("type", f"can be 'function' or 'custom', got {echo(kind)}", UNSUPPORTED)
    return None


def _read_custom(tool: Fields) -> dict[str, object]:
    tool_format = read_grammar_format(tool)
    return read_custom(tool, None if tool_format is None else required_child(tool_format, "grammar"))


def _read_choice(fields: Fields, names: set[str]) -> ToolChoice:
    plain = read_plain_choice(fields, fields.raw("tools") is not None)
    choice = None if plain is not None else fields.child("tool_choice")
    if choice is None:
        return plain or ToolChoice("auto")
    if choice.raw("type") == "allowed_tools":
        allowed = required_child(choice, "allowed_tools")
        return (
            ToolChoice("auto") if allowed is None else read_allowed(allowed, lambda tool: _name(tool, names))
        )
    return ToolChoice("named", _name(choice, names))


def _name(choice: Fields, names: set[str]) -> str:
    """Read the name of a tool that is chosen or allowed."""
    kind = _kind(choice)
    tool = None if kind is None else required_child(choice, kind)
    name = "" if tool is None else tool.required_text("name")
    if tool is not None and name and name not in names:
        tool.refuse("name", f"is {echo(name)}, which is not among 'tools'")
    return name
