"""Reads the tools of POST /v1/responses: functions, and custom tools as functions of one string."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from gateway.openai.fields import UNSUPPORTED, Fields, echo
from gateway.openai.tools import MAX_TOOLS, NO_TOOLS, Tools, read_function

CUSTOM_INPUT = "input"
"""The one argument of the function that stands for a custom tool."""


class ResponseTools(NamedTuple):
    """`shown` and `shown_choice` are `tools` and `tool_choice` as the response repeats them."""

    tools: Tools
    shown: list[dict[str, object]]
    shown_choice: object


class _ToolChoice(NamedTuple):
    """`allowed` None: every function may be called."""

    choice: str
    name: str = ""
    allowed: frozenset[str] | None = None


def read_response_tools(fields: Fields) -> ResponseTools:
    items = fields.items("tools")
    if len(items) > MAX_TOOLS:
        fields.refuse("tools", f"holds at most {MAX_TOOLS} tools, got {len(items)}")
        items = []
    shown, functions = [], []
    for number, value in enumerate(items):
        item = fields.nested(f"tools.{number}", value)
        if item is not None and (read := _read_tool(item)) is not None:
            shown.append(read[0])
            functions.append(read[1])
    names = {str(function["name"]) for function in functions}
    if len(names) < len(functions):
        fields.refuse("tools", "holds two tools of one name")
    choice = _read_choice(fields, names)
    shown_choice = fields.raw("tool_choice") or "auto"
    if choice.allowed is not None:
        functions = [function for function in functions if function["name"] in choice.allowed]
    if not functions or choice.choice == "none":
        return ResponseTools(NO_TOOLS, shown, shown_choice)
    single = fields.raw("parallel_tool_calls") is not None and not fields.flag("parallel_tool_calls")
    chat_tools = [{"type": "function", "function": function} for function in functions]
    tools = Tools(msgspec.json.encode(chat_tools).decode(), choice.choice, choice.name, single)
    return ResponseTools(tools, shown, shown_choice)


def _read_tool(item: Fields) -> tuple[dict[str, object], dict[str, object]] | None:
    """Return a tool as the response repeats it, and as the function that a template reads."""
    kind = item.required("type")
    if kind not in ("function", "custom"):
        if kind is not None:
            item.refuse("type", f"can be 'function' or 'custom', got {echo(kind)}", UNSUPPORTED)
        return None
    function = read_function(item)
    description = function.get("description")
    if kind == "function":
        shown = {
            "type": "function",
            "name": function["name"],
            "description": description,
            "parameters": function.get("parameters"),
            "strict": bool(function.get("strict")),
        }
        return shown, function
    shown = {"type": "custom", "name": function["name"], "description": description}
    tool_format = item.child("format")
    if tool_format is not None and tool_format.raw("type") == "grammar":
        shown["format"] = item.raw("format")
        definition = tool_format.text("definition")
        description = f"{description or ''}\nThe input follows this grammar:\n{definition}".strip()
    custom: dict[str, object] = {
        "name": function["name"],
        "parameters": {
            "type": "object",
            "properties": {CUSTOM_INPUT: {"type": "string"}},
            "required": [CUSTOM_INPUT],
        },
    }
    return shown, custom | ({"description": description} if description else {})


def _read_choice(fields: Fields, names: set[str]) -> _ToolChoice:
    value = fields.raw("tool_choice")
    if value is None or value == "auto":
        return _ToolChoice("auto")
    if value == "none":
        return _ToolChoice("none")
    if not names:
        fields.refuse("tool_choice", "is only allowed with 'tools'")
        return _ToolChoice("auto")
    if value == "required":
        return _ToolChoice("required")
    choice = fields.child("tool_choice") if isinstance(value, dict) else None
    if choice is None:
        fields.refuse(
            "tool_choice", f"can be 'none', 'auto', 'required', a tool or 'allowed_tools', got {echo(value)}"
        )
        return _ToolChoice("auto")
    kind = choice.required("type")
    if kind in ("function", "custom"):
        return _ToolChoice("named", _known_name(choice, names))
    if kind == "allowed_tools":
        return _read_allowed(choice, names)
    if kind is not None:
        message = f"can be 'function', 'custom' or 'allowed_tools', got {echo(kind)}"
        choice.refuse("type", message, UNSUPPORTED)
    return _ToolChoice("auto")


def _read_allowed(choice: Fields, names: set[str]) -> _ToolChoice:
    mode = choice.raw("mode") or "auto"
    if mode not in ("auto", "required"):
        choice.refuse("mode", f"can be 'auto' or 'required', got {echo(mode)}")
    tools = [choice.nested(f"tools.{number}", tool) for number, tool in enumerate(choice.items("tools"))]
    allowed = frozenset(_known_name(tool, names) for tool in tools if tool is not None)
    if not allowed:
        choice.refuse("tools", "must name at least one tool")
    return _ToolChoice(str(mode), allowed=allowed)


def _known_name(choice: Fields, names: set[str]) -> str:
    name = choice.required_text("name")
    if name and name not in names:
        choice.refuse("name", f"is {echo(name)}, which is not among 'tools'")
    return name
