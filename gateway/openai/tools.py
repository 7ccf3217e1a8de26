"""Reads the functions that a model may or must call; shared by the request formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from gateway.openai.fields import MISSING, WRONG_TYPE, Fields, echo

MAX_TOOLS = 1024
"""More than OpenAI's limit of 128: an agent with several tool servers has hundreds of tools."""
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NAME_RULE = "has 1 to 64 letters, digits, underscores and dashes"


class Tools(NamedTuple):
    """The tool fields of `Chat`, in its order. All are empty if no function may be called."""

    json: str = ""
    choice: str = ""
    name: str = ""
    single: bool = False


NO_TOOLS = Tools()


class ToolChoice(NamedTuple):
    """`name` is the function to call if `choice` is 'named'. `allowed` is None if any may be called."""

    choice: str
    name: str = ""
    allowed: frozenset[str] | None = None


def read_tool_items(fields: Fields) -> list[Fields]:
    items = fields.items("tools")
    if len(items) > MAX_TOOLS:
        fields.refuse("tools", f"holds at most {MAX_TOOLS} tools, got {len(items)}")
        return []
    return list(fields.objects("tools", items))


def distinct_names(fields: Fields, functions: Sequence[dict[str, object]]) -> set[str]:
    """Return the names of the functions. Two functions with one name are a problem."""
    named = [str(function["name"]) for function in functions if function["name"]]
    names = set(named)
    if len(names) < len(named):
        fields.refuse("tools", "holds two tools of one name")
    return names


def read_plain_choice(fields: Fields, has_tools: bool) -> ToolChoice | None:
    """Read `tool_choice` if it is a word, and refuse wrong values. Return None for an object."""
    value = fields.raw("tool_choice")
    if value in (None, "auto", "none") and (has_tools or value != "auto"):
        return ToolChoice(str(value or "auto"))
    if not has_tools:
        fields.refuse("tool_choice", "is only allowed with 'tools'")
    elif value == "required":
        return ToolChoice("required")
    elif isinstance(value, dict):
        return None
    else:
        message = f"can be 'none', 'auto', 'required', a tool or 'allowed_tools', got {echo(value)}"
        fields.refuse("tool_choice", message)
    return ToolChoice("auto")


def read_allowed(allowed: Fields, name_of: Callable[[Fields], str]) -> ToolChoice:
    """Read the mode and the tools of `allowed_tools`. `name_of` reads the name of one of them."""
    mode = "auto" if allowed.raw("mode") is None else allowed.raw("mode")
    if mode not in ("auto", "required"):
        allowed.refuse("mode", f"can be 'auto' or 'required', got {echo(mode)}")
    names = frozenset(map(name_of, list(allowed.objects("tools", allowed.items("tools")))))
    if not names:
        allowed.refuse("tools", "must name at least one tool")
    return ToolChoice(str(mode), allowed=names)


def _read_single(fields: Fields) -> bool:
    return fields.raw("parallel_tool_calls") is not None and not fields.flag("parallel_tool_calls")


def offered_tools(functions: Sequence[dict[str, object]], choice: ToolChoice, *, single: bool) -> Tools:
    """Return the tools that a model is offered: the allowed ones, or none if it may not call any."""
    if choice.allowed is not None:
        functions = [function for function in functions if function["name"] in choice.allowed]
    if not functions or choice.choice == "none":
        return NO_TOOLS
    tools = [{"type": "function", "function": function} for function in functions]
    return Tools(msgspec.json.encode(tools).decode(), choice.choice, choice.name, single)


def read_offered(
    fields: Fields,
    functions: Sequence[dict[str, object]],
    read_choice: Callable[[Fields, set[str]], ToolChoice],
) -> Tools:
    """Read `tool_choice` and `parallel_tool_calls`, and return the tools that a model is offered."""
    choice = read_choice(fields, distinct_names(fields, functions))
    return offered_tools(functions, choice, single=_read_single(fields))


def read_function(function: Fields) -> dict[str, object]:
    """Read a function's name, description, parameters and `strict`: all that templates and grammars need."""
    name = function.required_text("name")
    if name and not NAME.fullmatch(name):
        function.refuse("name", NAME_RULE)
    read: dict[str, object] = {"name": name}
    if description := function.text("description"):
        read["description"] = description
    parameters = function.raw("parameters")
    if isinstance(parameters, dict):
        read["parameters"] = parameters
    elif parameters is not None:
        function.refuse("parameters", f"must be a JSON schema, got {echo(parameters)}", WRONG_TYPE)
    if function.flag("strict"):
        read["strict"] = True
    return read


def required_child(fields: Fields, name: str) -> Fields | None:
    if fields.raw(name) is None:
        fields.refuse(name, "is required", MISSING)
        return None
    return fields.child(name)
