"""Read the lines of a training file, and name what is wrong with each.

A gateway checks a file before it accepts a job; a site reads it before it trains. A line is a chat,
`{"messages": […], "tools": […]}`, of which assistant messages are learned unless their `weight` is 0, or a
pair of texts, `{"prompt": …, "completion": …}`, of which the completion is learned. Does not tokenize: what
only a model's tokenizer can tell is checked at the site.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple, NoReturn

from wire.json_structure import VALUES, exceeds

MAX_FAULTS = 50
"""Faults of a file that are named; reading ends with the last of them."""
MAX_LINE_BYTES = 4 << 20
MAX_MESSAGES = 4096
MAX_VALUES = 2**17
"""Objects, lists, fields and items of lists in a line: decoding holds the process for milliseconds."""
ROLES = ("system", "developer", "user", "assistant", "tool")
_CHAT_FIELDS = frozenset(("messages", "tools", "parallel_tool_calls"))
_PAIR_FIELDS = frozenset(("prompt", "completion"))
_MESSAGE_FIELDS = frozenset(("role", "content", "name", "weight", "tool_calls", "tool_call_id"))


class BadRow(ValueError):
    """Raised for a line that can't be trained on; says where in the line, and why."""


class Row(NamedTuple):
    """One example: a chat, of which the messages at `learned` are learned, or else a prompt and completion.

    `messages` and `tools` are as a chat template takes them: contents are text, arguments are objects.
    """

    messages: tuple[dict[str, Any], ...] = ()
    learned: tuple[int, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    prompt: str = ""
    completion: str = ""


class Fault(NamedTuple):
    """A bad line of a file, counted from 1, and the reason; line 0 is the file as a whole."""

    line: int
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.message}" if self.line else self.message


def read_row(line: bytes) -> Row:
    """Read one line, with or without its end. Raises BadRow with the first fault."""
    row = _parse(line)
    if not isinstance(row, dict):
        raise BadRow(f"is {_kind(row)}, not an object")
    chat, pair = _CHAT_FIELDS & row.keys(), _PAIR_FIELDS & row.keys()
    if chat and pair:
        raise BadRow(f"has {min(chat)!r} of a chat and {min(pair)!r} of a pair: a line is one or the other")
    if not chat and not pair:
        raise BadRow("has neither 'messages' nor 'prompt' and 'completion'")
    row = _without_nulls(row)
    _refuse_unknown("", row, _CHAT_FIELDS if chat else _PAIR_FIELDS)
    return _read_chat(row) if chat else _read_pair(row)


def _parse(line: bytes) -> object:
    if len(line) > MAX_LINE_BYTES:
        raise BadRow(f"has {len(line):,} bytes; a line has at most {MAX_LINE_BYTES:,}")
    if line.startswith(b"\xef\xbb\xbf"):
        raise BadRow("begins with a byte order mark: save the file as UTF-8 without one")
    try:
        text = line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise BadRow(f"is not UTF-8 from byte {error.start + 1} on") from error
    if not text:
        raise BadRow("is empty")
    return _load("", text)


def _load(at: str, text: str) -> object:
    """Parse JSON that can be written again as UTF-8, unless it has more values than a line may have."""
    if len(text) > MAX_VALUES and exceeds(text.encode("utf-8"), MAX_VALUES, signs=VALUES):
        raise BadRow(f"{at}has more than {MAX_VALUES:,} objects, lists, fields and items")
    try:
        parsed: object = json.loads(
            text, parse_float=_number, parse_constant=_refuse_constant, object_pairs_hook=_object
        )
        if "\\u" in text:
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise BadRow(f"{at}is not JSON at character {error.colno}: {error.msg}") from error
    except UnicodeEncodeError as error:
        raise BadRow(f"{at}has an escape of half a character (a lone surrogate)") from error
    except RecursionError as error:
        raise BadRow(f"{at}is nested too deeply") from error
    except BadRow:
        raise
    except ValueError as error:
        raise BadRow(f"{at}has a number of too many digits") from error
    return parsed


def _number(text: str) -> float:
    """Return a number that JSON can say again: what is too large is infinite."""
    value = float(text)
    if not isfinite(value):
        raise BadRow("has a number that is too large")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise BadRow(f"has {name}, which JSON does not know")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen = set[str]()
        for name, _ in pairs:
            if name in seen:
                raise BadRow(f"has {_shown(name)} twice in one object")
            seen.add(name)
    return made


def _read_pair(row: dict[str, Any]) -> Row:
    prompt, completion = (_text(name, row.get(name)) for name in ("prompt", "completion"))
    if not completion:
        raise BadRow("completion is empty: there is nothing to learn")
    return Row(prompt=prompt, completion=completion)


def _read_chat(row: dict[str, Any]) -> Row:
    listed = _array("messages", row.get("messages"))
    if not listed:
        raise BadRow("messages is empty")
    if len(listed) > MAX_MESSAGES:
        raise BadRow(f"messages has {len(listed):,} messages, of {MAX_MESSAGES:,} at most")
    if not isinstance(row.get("parallel_tool_calls", False), bool):
        raise BadRow(f"parallel_tool_calls is {_kind(row['parallel_tool_calls'])}, not true or false")
    tools = _read_tools(row["tools"]) if "tools" in row else ()
    functions = {tool["function"]["name"] for tool in tools}
    messages: list[dict[str, Any]] = []
    learned: list[int] = []
    calls = dict[str, bool]()  # by id, true once answered
    for number, item in enumerate(listed):
        at = f"messages[{number}]"
        message = _read_message(at, item, functions)
        _match_calls(at, message, calls)
        if message.pop("weight"):
            learned.append(number)
        messages.append(message)
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow("messages has no message of the assistant: there is nothing to learn")
    if not learned:
        raise BadRow("every message of the assistant has weight 0: there is nothing to learn")
    if messages[-1]["role"] != "assistant":
        raise BadRow(f"the last message is of {messages[-1]['role']!r}, not of 'assistant'")
    return Row(tuple(messages), tuple(learned), tools)


def _read_message(at: str, item: object, functions: set[str]) -> dict[str, Any]:
    """Return a message as templates take it, with its `weight`: whether it is learned."""
    if not isinstance(item, dict):
        raise BadRow(f"{at} is {_kind(item)}, not an object")
    item = _without_nulls(item)
    role = _text(f"{at}.role", item.get("role"))
    if role not in ROLES:
        raise BadRow(f"{at}.role is {_shown(role)}; it is one of {', '.join(ROLES)}")
    if "function_call" in item:
        raise BadRow(f"{at}.function_call is not read: use tool_calls")
    _refuse_unknown(f"{at}.", item, _MESSAGE_FIELDS)
    message: dict[str, Any] = {"role": role}
    calls, content = item.get("tool_calls"), item.get("content")
    if calls is not None:
        if role != "assistant":
            raise BadRow(f"{at} of {role!r} has tool_calls: only the assistant calls")
        message["tool_calls"] = _read_calls(f"{at}.tool_calls", calls, functions)
        content = content or ""
    message["content"] = _read_content(f"{at}.content", content)
    if role == "assistant" and calls is None and not message["content"]:
        raise BadRow(f"{at} of the assistant is empty: there is nothing to learn")
    if "name" in item:
        message["name"] = _text(f"{at}.name", item["name"])
    if role == "tool":
        message["tool_call_id"] = _text(f"{at}.tool_call_id", item.get("tool_call_id"))
    elif "tool_call_id" in item:
        raise BadRow(f"{at} of {role!r} has a tool_call_id: only 'tool' answers a call")
    return message | {"weight": _read_weight(at, role, item)}


def _read_weight(at: str, role: str, item: dict[str, Any]) -> bool:
    if "weight" not in item:
        return role == "assistant"
    if role != "assistant":
        raise BadRow(f"{at} of {role!r} has a weight: only the assistant is learned")
    weight = item["weight"]
    if isinstance(weight, bool) or not isinstance(weight, int | float) or weight not in {0, 1}:
        raise BadRow(f"{at}.weight is {_shown(weight)}, not 0 or 1")
    return bool(weight)


def _read_content(at: str, content: object) -> str:
    if isinstance(content, list):
        if not content:
            raise BadRow(f"{at} is an empty array")
        return "".join(_read_part(f"{at}[{number}]", part) for number, part in enumerate(content))
    return _text(at, content)


def _read_part(at: str, part: object) -> str:
    if not isinstance(part, dict):
        raise BadRow(f"{at} is {_kind(part)}, not an object")
    if part.get("type") != "text":
        raise BadRow(f"{at}.type is {_shown(part.get('type'))}: training reads 'text' alone")
    return _text(f"{at}.text", part.get("text"))


def _read_calls(at: str, calls: object, functions: set[str]) -> list[dict[str, Any]]:
    listed = _array(at, calls)
    if not listed:
        raise BadRow(f"{at} is empty: leave it out")
    return [_read_call(f"{at}[{number}]", call, functions) for number, call in enumerate(listed)]


def _read_call(at: str, call: object, functions: set[str]) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise BadRow(f"{at} is {_kind(call)}, not an object")
    if call.get("type", "function") != "function":
        raise BadRow(f"{at}.type is {_shown(call['type'])}, not 'function'")
    call_id, function = _text(f"{at}.id", call.get("id")), call.get("function")
    if not isinstance(function, dict):
        raise BadRow(f"{at}.function is {_kind(function)}, not an object")
    name = _text(f"{at}.function.name", function.get("name"))
    if name not in functions:
        raise BadRow(f"{at}.function.name is {_shown(name)}, which is none of the line's tools")
    at_arguments = f"{at}.function.arguments"
    arguments = _load(f"{at_arguments} ", _text(at_arguments, function.get("arguments")))
    if not isinstance(arguments, dict):
        raise BadRow(f"{at_arguments} is JSON of {_kind(arguments)}, not of an object")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _match_calls(at: str, message: dict[str, Any], calls: dict[str, bool]) -> None:
    """Refuse calls of one id, and answers to no call or to one that has its answer."""
    for call in message.get("tool_calls", ()):
        if call["id"] in calls:
            raise BadRow(f"{at}.tool_calls has the id {_shown(call['id'])} of an earlier call")
        calls[call["id"]] = False
    if message["role"] == "tool":
        answered = message["tool_call_id"]
        if calls.get(answered, True):
            which = "has its answer already" if answered in calls else "no earlier message makes"
            raise BadRow(f"{at} answers the call {_shown(answered)}, which {which}")
        calls[answered] = True


def _read_tools(tools: object) -> tuple[dict[str, Any], ...]:
    names: set[str] = set()
    read = _array("tools", tools)
    for number, tool in enumerate(read):
        at = f"tools[{number}]"
        if not isinstance(tool, dict):
            raise BadRow(f"{at} is {_kind(tool)}, not an object")
        if tool.get("type") != "function":
            raise BadRow(f"{at}.type is {_shown(tool.get('type'))}, not 'function'")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise BadRow(f"{at}.function is {_kind(function)}, not an object")
        name = _text(f"{at}.function.name", function.get("name"))
        if not name or name in names:
            raise BadRow(f"{at}.function.name is {_shown(name)}: names are unlike and not empty")
        if not isinstance(function.get("parameters", {}), dict):
            raise BadRow(f"{at}.function.parameters is {_kind(function['parameters'])}, not an object")
        names.add(name)
    return tuple(read)


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value: SDKs write those that have none as null."""
    return {name: each for name, each in value.items() if each is not None}


def _array(at: str, value: object) -> Sequence[Any]:
    if not isinstance(value, list):
        raise BadRow(f"{at} is {_kind(value)}, not an array")
    return value


def _text(at: str, value: object) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{at} is {_kind(value)}, not text")
    return value


def _refuse_unknown(at: str, value: dict[str, Any], known: frozenset[str]) -> None:
    unknown = sorted(value.keys() - known)
    if unknown:
        raise BadRow(f"{at}{unknown[0]} is not a known field; there are {', '.join(sorted(known))}")


def _kind(value: object) -> str:
    """Name a value by its type, not its content: a message may reach logs, the data may not."""
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "an array"}
    return "missing or null" if value is None else kinds.get(type(value), "an object")


def _shown(value: object) -> str:
    """Show a short name of the format; anything long is data, and is named by its type."""
    shown = repr(value)
    return shown if isinstance(value, str | int | float) and len(shown) <= 40 else _kind(value)
