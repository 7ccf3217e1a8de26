"""Formats in which models write calls of functions: found by the chat template; as a grammar; as tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from site_engine.messages import Tools

_ANYTHING = "/(.|\\n)*/"
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Leaves no room for endless white space, which small models fall into."""


@dataclass(frozen=True, slots=True)
class Format:
    """Calls are objects of a name and arguments: each between `begin` and `end`, or all of them in one list.

    Without `begin` an answer that opens with a brace is a call. `id_chars`: length of the ids.
    """

    name: str
    begin: str
    end: str
    arguments: str  # the key they stand under
    between: str
    opening: str = ""  # after `begin`
    closing: str = ""  # before `end`
    is_list: bool = False
    id_prefix: str = "call_"
    id_chars: int = 24


HERMES = Format("hermes", "<tool_call>", "</tool_call>", "arguments", "\n", "\n", "\n")
MISTRAL = Format(
    "mistral", "[TOOL_CALLS]", "]", "arguments", ", ", "[", is_list=True, id_prefix="", id_chars=9
)
LLAMA = Format("llama", "", "", "parameters", "; ")

_KNOWN: tuple[tuple[Format, str, tuple[str, ...]], ...] = (
    (MISTRAL, "[TOOL_CALLS]", ("[ARGS]",)),
    (HERMES, "<tool_call>", ("<function=", "<arg_key>")),
    (LLAMA, '"parameters": dictionary of argument name', ()),
)
"""A format, a sign of templates that teach it, and signs of unknown relatives that share the first."""


def chat_template(tokenizer: Any) -> str:
    """Return the chat template, empty if there is none; of several, the one for tools."""
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, dict):
        found = found.get("tool_use") or found.get("default")
    return found or ""


def format_of(template: str) -> Format | None:
    """Return the format that a chat template teaches; None if it takes no tools or teaches an unknown one."""
    if "tools" not in template:
        return None
    known = (
        each
        for each, sign, others in _KNOWN
        if sign in template and not any(other in template for other in others)
    )
    return next(known, None)


def guided_source(
    schema: Mapping[str, Any] | None,
    tools: Tools | None,
    form: Format | None,
    literal: Callable[[str], str],
) -> str:
    """Return the Lark source of an answer's grammar, empty where anything goes. `literal` quotes text."""
    if tools is None or form is None:
        return "" if schema is None else f"start: answer\nanswer: {_json(schema)}\n"
    if not tools.forced and schema is None and not tools.strict:
        return ""
    begin, end = (literal(mark) if mark else "" for mark in (form.begin, form.end))
    rules = call_rules(tools, form, begin, end)
    if tools.forced:
        return f"start: calls\n{rules}"
    if schema is not None:
        return f"start: calls | answer\nanswer: {_json(schema)}\n{rules}"
    return free_text_rules(tools, form, begin) + rules


def free_text_rules(tools: Tools, form: Format, begin: str) -> str:
    """Return the rules of free text in which anything that begins like a call must be one."""
    if not begin:
        return f"start: calls | TEXT\nTEXT: /([^{{ \\t\\n]{_ANYTHING[1:-1]})?/\n"
    if begin.startswith("<["):  # a token that text does not have
        return f"start: TEXT calls?\nTEXT: {_ANYTHING}\n"
    times = "?" if tools.single else "*"
    return f"start: (lead rest){times} TEXT\nlead[lazy]: {_ANYTHING} {begin}\nTEXT: {_ANYTHING}\n"


def call_rules(tools: Tools, form: Format, begin: str, end: str) -> str:
    """Return the rules `calls`, which begin with `begin`, and `rest`, which follows `begin`."""
    between, opening, closing = (_literal(each) for each in (form.between, form.opening, form.closing))
    if form.is_list:
        call, again = "object", f"{between}object"
        rest = f'" "? {opening}{call}{{}} {closing}{end}'
    else:
        call = f"{opening}object {closing}{end}"
        again, rest = f"{between}{begin} {call}", f"{call}{{}}"
    functions = tools.callable
    rules = [
        f"calls: {begin} rest",
        "rest: " + rest.format("" if tools.single else f" ({again})*"),
        "object: " + " | ".join(f"object_{number}" for number in range(len(functions))),
    ]
    for number, function in enumerate(functions):
        head = _literal(f'{{"name": "{function["name"]}", "{form.arguments}": ')
        schema = function.get("parameters") or _NO_PARAMETERS
        rules.append(f'object_{number}: {head}arguments_{number} "}}"')
        rules.append(f"arguments_{number}: {_json(schema)}")
    return "\n".join(rules) + "\n"


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _STYLE})


def _literal(text: str) -> str:
    return f"{json.dumps(text)} " if text else ""


def hidden_marks(form: Format, tokenizer: Any) -> dict[int, str]:
    """Return the marks of a format that are special tokens, which text leaves out, by token id."""
    known = tokenizer.get_vocab()
    marks = {known[mark]: mark for mark in (form.begin, form.end) if mark in known}
    return {at: mark for at, mark in marks.items() if not tokenizer.decode([at], skip_special_tokens=True)}
