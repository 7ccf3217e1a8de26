"""Reads the tools of POST /v1/responses.

Chat templates know only functions, so the name of a namespace becomes a prefix of its functions' names.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from gateway.openai.custom_tools import read_custom, read_grammar_format
from gateway.openai.fields import UNSUPPORTED, Fields, echo
from gateway.openai.tools import (
    ToolChoice,
    Tools,
    read_allowed,
    read_function,
    read_offered,
    read_plain_choice,
    read_tool_items,
)

NAMESPACE_SEPARATOR = "__"
UNUSED_TOOLS = (
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
)
"""Tools that clients offer with every request and that do not run here: they are not offered to models."""


class CalledTool(NamedTuple):
    """A tool as its client knows it."""

    name: str
    namespace: str = ""
    custom: bool = False


class ResponseTools(NamedTuple):
    """`shown` and `shown_choice` are `tools` and `tool_choice` as the response repeats them."""

    tools: Tools
    shown: list[dict[str, object]]
    shown_choice: object


def read_response_tools(fields: Fields) -> ResponseTools:
    shown: list[dict[str, object]] = []
    functions: list[dict[str, object]] = []
    for item in read_tool_items(fields):
        if item.raw("type") not in UNUSED_TOOLS:
            _read_tool(item, shown, functions)
    tools = read_offered(fields, functions, _read_choice)
    return ResponseTools(tools, shown, encode_once(fields.raw("tool_choice") or "auto"))


def encode_once(value: object) -> msgspec.Raw:
    """Encode a value that the response repeats unchanged. It is encoded now because it may nest too deeply to
    be encoded deeper in the call stack, with the response, and because streams repeat it in several events.
    """
    return msgspec.Raw(msgspec.json.encode(value))


def qualified_name(namespace: str, name: str) -> str:
    """Return the name under which a model knows a function."""
    return f"{namespace}{NAMESPACE_SEPARATOR}{name}" if namespace else name


def called_tools(shown: object) -> dict[str, CalledTool]:
    """Return the tools of `ResponseTools.shown` by the names under which a model calls them."""
    assert isinstance(shown, list), "a response repeats its tools"
    called = {}
    for tool in shown:
        namespace = tool["name"] if tool["type"] == "namespace" else ""
        for each in tool["tools"] if namespace else [tool]:
            known = CalledTool(each["name"], namespace, each["type"] == "custom")
            called[qualified_name(namespace, known.name)] = known
    return called


def _read_tool(item: Fields, shown: list[dict[str, object]], functions: list[dict[str, object]]) -> None:
    """Read one tool: append the response's form of it to `shown`, and the templates' form to `functions`."""
    kind = item.required("type")
    if kind == "function":
        function = read_function(item)
        shown.append(_shown_function(function))
        functions.append(function)
    elif kind == "custom":
        description, function = _read_custom(item)
        shown.append(description)
        functions.append(function)
    elif kind == "namespace":
        _read_namespace(item, shown, functions)
    elif kind is not None:
        item.refuse("type", f"can be 'function', 'custom' or 'namespace', got {echo(kind)}", UNSUPPORTED)


def _shown_function(function: dict[str, object]) -> dict[str, object]:
    return {
        "type": "function",
        "name": function["name"],
        "description": function.get("description"),
        "parameters": encode_once(function.get("parameters")),
        "strict": bool(function.get("strict")),
    }


def _read_custom(item: Fields) -> tuple[dict[str, object], dict[str, object]]:
    grammar = read_grammar_format(item)
    shown: dict[str, object] = {
        "type": "custom",
        "name": item.text("name"),
        "description": item.text("description") or None,
    }
    if grammar is not None:
        shown["format"] = encode_once(item.raw("format"))
    return shown, read_custom(item, grammar)


def _read_namespace(item: Fields, shown: list[dict[str, object]], functions: list[dict[str, object]]) -> None:
    namespace, description = item.required_text("name"), item.text("description")
    shown_inside: list[dict[str, object]] = []
    inside: list[dict[str, object]] = []
    item.required("tools")
    for tool in item.objects("tools", item.items("tools")):
        if tool.raw("type") == "namespace":
            tool.refuse("type", "can't be 'namespace' inside a namespace", UNSUPPORTED)
        else:
            _read_tool(tool, shown_inside, inside)
    shown.append({"type": "namespace", "name": namespace, "description": description, "tools": shown_inside})
    functions += [
        function | {"name": qualified_name(namespace, str(function["name"]))} for function in inside
    ]


def _read_choice(fields: Fields, names: set[str]) -> ToolChoice:
    choice = fields.raw("tool_choice")
    if choice == "auto":
        return ToolChoice("auto")
    if isinstance(choice, dict):
        return _read_chosen(fields.nested("tool_choice", choice), names)
    if choice == "required" and fields.raw("tools") and not names:
        fields.refuse("tool_choice", "can't be 'required': none of 'tools' can be called here")
        return ToolChoice("auto")
    return read_plain_choice(fields, bool(names)) or ToolChoice("auto")


def _read_chosen(choice: Fields | None, names: set[str]) -> ToolChoice:
    kind = None if choice is None else choice.required("type")
    if choice is None or kind is None:
        return ToolChoice("auto")
    if kind not in ("function", "custom", "allowed_tools"):
        message = f"can be 'function', 'custom' or 'allowed_tools', got {echo(kind)}: no tool runs here"
        choice.refuse("type", message, UNSUPPORTED)
    elif kind == "allowed_tools":
        return read_allowed(choice, lambda tool: _known_name(tool, names))
    else:
        return ToolChoice("named", _known_name(choice, names))
    return ToolChoice("auto")


def _known_name(choice: Fields, names: set[str]) -> str:
    name = qualified_name(choice.text("namespace"), choice.required_text("name"))
    if name and name not in names:
        choice.refuse("name", f"is {echo(name)}, which is not among 'tools'")
    return name
