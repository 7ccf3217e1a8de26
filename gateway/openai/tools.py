"""Reads `tools`, `tool_choice` and `parallel_tool_calls`: the functions that a model may or must call."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from gateway.openai.fields import MISSING, UNSUPPORTED, WRONG_TYPE, Fields, echo

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NAME_RULE = "has 1 to 64 letters, digits, underscores and dashes"


class Tools(NamedTuple):
    """The fields of `Chat` with these names. All empty if no function may be called."""

    json: str = ""
    choice: str = ""
    name: str = ""
    single: bool = False


NO_TOOLS = Tools()
TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})


def read_tools(fields: Fields) -> Tools:
    if not fields.present(TOOL_FIELDS):
        return NO_TOOLS
    items = fields.items("tools")
    if fields.raw("tools") == []:
        fields.refuse("tools", "must not be empty; leave it out instead")
    if len(items) > MAX_TOOLS:
        fields.refuse("tools", f"holds at most {MAX_TOOLS} functions, got {len(items)}")
        items = []
    read = [_tool(fields.nested(f"tools.{number}", item)) for number, item in enumerate(items)]
    names = [str(function["name"]) for function in read if function["name"]]
    if len(set(names)) < len(names):
        fields.refuse("tools", "holds two functions of one name")
    single = fields.raw("parallel_tool_calls") is not None and not fields.flag("parallel_tool_calls")
    choice, name = _choice(fields, names)
    if not read or choice == "none":
        return NO_TOOLS
    tools = [{"type": "function", "function": function} for function in read]
    return Tools(msgspec.json.encode(tools).decode(), choice, name, single)


def _choice(fields: Fields, names: list[str]) -> tuple[str, str]:
    """Return the tool choice, and the name of the function that must be called if it is 'named'."""
    tool_choice = fields.raw("tool_choice")
    if tool_choice in (None, "none"):
        return ("auto" if tool_choice is None else "none"), ""
    if fields.raw("tools") is None:
        fields.refuse("tool_choice", "is only allowed with 'tools'")
    elif tool_choice in ("auto", "required"):
        return str(tool_choice), ""
    elif isinstance(tool_choice, dict):
        return "named", _named_function(fields, names)
    else:
        message = f"can be 'none', 'auto', 'required' or a function, got {echo(tool_choice)}"
        fields.refuse("tool_choice", message)
    return "auto", ""


def _named_function(fields: Fields, names: list[str]) -> str:
    tool_choice = fields.child("tool_choice")
    if tool_choice is None:
        return ""
    if tool_choice.required("type") not in (None, "function"):
        message = f"can only be 'function', got {echo(tool_choice.raw('type'))}"
        tool_choice.refuse("type", message, UNSUPPORTED)
        return ""
    function = _required_child(tool_choice, "function")
    name = "" if function is None else function.required_text("name")
    if function is not None and name and name not in names:
        function.refuse("name", f"is {echo(name)}, which is not among 'tools'")
    return name


def _tool(tool: Fields | None) -> dict[str, object]:
    """Return what templates and grammars need of a function; its name is empty if there is a problem."""
    invalid: dict[str, object] = {"name": ""}
    if tool is None:
        return invalid
    kind = tool.required("type")
    if kind not in (None, "function"):
        tool.refuse("type", f"can only be 'function', got {echo(kind)}", UNSUPPORTED)
        return invalid
    function = _required_child(tool, "function")
    return invalid if function is None else read_function(function)


def read_function(function: Fields) -> dict[str, object]:
    """Read name, description, parameters and `strict` of a function; templates and grammars need no more."""
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


def _required_child(fields: Fields, name: str) -> Fields | None:
    if fields.raw(name) is None:
        fields.refuse(name, "is required", MISSING)
        return None
    return fields.child(name)
