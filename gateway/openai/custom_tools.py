"""Translates custom tools, which take one text, to functions of one string: templates know only functions."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gateway.bounded_json import DECODE_ERRORS
from gateway.openai.fields import UNSUPPORTED, Fields, echo
from gateway.openai.tools import read_function

CUSTOM_INPUT = "input"
"""The one argument of the function that stands for a custom tool."""
SYNTAXES = ("lark", "regex")


def read_grammar_format(tool: Fields) -> Fields | None:
    """Return the field `format` if it is a grammar, None if the input may be any text."""
    tool_format = tool.child("format")
    kind = None if tool_format is None else tool_format.required("type")
    if tool_format is None or kind in (None, "text"):
        return None
    if kind != "grammar":
        tool_format.refuse("type", f"can be 'text' or 'grammar', got {echo(kind)}", UNSUPPORTED)
    return tool_format if kind == "grammar" else None


def read_custom(tool: Fields, grammar: Fields | None) -> dict[str, object]:
    """Return the function that stands for a custom tool. `grammar` is the grammar of its input, if any.

    The grammar is added to the function's description; it is not enforced.
    """
    function = read_function(tool)
    description = function.get("description")
    if grammar is not None:
        told = f"The input follows this grammar:\n{_definition(grammar)}"
        description = f"{description or ''}\n{told}".strip()
    custom: dict[str, object] = {
        "name": function["name"],
        "parameters": {
            "type": "object",
            "properties": {CUSTOM_INPUT: {"type": "string"}},
            "required": [CUSTOM_INPUT],
        },
    }
    return custom | ({"description": description} if description else {})


def _definition(grammar: Fields) -> str:
    syntax = grammar.required("syntax")
    if syntax not in (None, *SYNTAXES):
        grammar.refuse("syntax", f"can be 'lark' or 'regex', got {echo(syntax)}")
    return grammar.required_text("definition")


def custom_arguments(text: str) -> str:
    """Return the arguments of the function call that stands for a custom tool's call with input `text`."""
    return msgspec.json.encode({CUSTOM_INPUT: text}).decode()


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool's call, or `arguments` unchanged if they do not have one."""
    try:
        read = msgspec.json.decode(arguments)
    except DECODE_ERRORS:
        return arguments
    value = read.get(CUSTOM_INPUT) if isinstance(read, Mapping) else None
    return value if isinstance(value, str) else arguments
