"""OpenAI's requests as this gateway takes them, and the fields and kinds that it refuses by name.

The SDK's types know shapes and enums; OpenAI's reference has bounds beside them. What is refused by design is
cut out of the requests, and asked for alone.
"""

from __future__ import annotations

from typing import Any

from tests.support.cut_schema import Cut, Schema, with_nulls
from tests.support.good_bodies import IMAGE

REFUSED: dict[str, frozenset[str]] = {
    "ChatAsked": frozenset(
        ("audio", "function_call", "functions", "moderation", "prediction", "verbosity", "web_search_options")
    ),
    "TextAsked": frozenset(("suffix",)),
    "ResponseAsked": frozenset(
        (
            *("background", "context_management", "conversation", "moderation", "previous_response_id"),
            *("prompt", "store"),
        )
    ),
    "EmbeddingAsked": frozenset(),
}
"""Of each request the fields of OpenAI's that are refused by name, whatever the gateway's own lists say."""
UNUSED_TOOLS = {f"web_search{end}" for end in ("", "_2025_08_26", "_preview", "_preview_2025_03_11")}
"""Tools of a response that are taken and never used."""
UNREAD = {
    *("ChatCompletionFunctionMessageParam", "ChatCompletionContentPartInputAudioParam", "File"),
    *("ResponseInputFileParam", "ResponseInputFileContentParam", "ItemReference"),
    *("ToolChoiceTypesParam", "ToolChoiceMcpParam", "ToolChoiceSpecificProgrammaticToolCallingParam"),
    *("ToolChoiceApplyPatchParam", "ToolChoiceShellParam"),
}
"""Members of unions that are refused, beside the kinds of a response's items and tools."""
READ = {
    *("EasyInputMessageParam", "Message", "ResponseOutputMessageParam", "ResponseReasoningItemParam"),
    *("ResponseFunctionToolCallParam", "FunctionCallOutput", "ResponseCustomToolCallParam"),
    *("ResponseCustomToolCallOutputParam", "FunctionToolParam", "CustomToolParam", "NamespaceToolParam"),
}
"""Kinds of a response's items and tools that are read."""
REASONING = "openai__types__shared_params__reasoning__Reasoning"
WITHOUT_EFFECT = {
    *("prompt_cache_options", "prompt_cache_key", "prompt_cache_breakpoint", "access_programs", "image"),
    *("background_options", "caller", "allowed_callers", "defer_loading", "async", "output_schema", "phase"),
    *("annotations", "encrypted_content", "status", "prompt_cache_retention", "generate_summary"),
    *(f"{REASONING}.mode", f"{REASONING}.context", "ResponseOutputTextParam.logprobs"),
    *(f"{item}.id" for item in ("ResponseOutputMessageParam", "ResponseReasoningItemParam")),
    *(f"ResponseCustomToolCall{end}Param.id" for end in ("", "Output")),
    *("ResponseFunctionToolCallParam.id", "FunctionCallOutput.id", "FunctionCallOutput.name"),
    *("FunctionCallOutput.namespace", "ResponseAsked.stream_options"),
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
}
"""Fields that are taken whatever they hold."""
TEXT = {"type": "string", "minLength": 1}
NAME = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
ID = {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}
TOKENS = {"type": ["integer", "null"], "minimum": 1, "maximum": 8192}
NO = {"type": "null"}


def _several(item: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": item}


def _object(**properties: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


ROLES = ("Developer", "System", "User", "Assistant", "Tool")
REQUIRED = {
    "ResponseAsked": ["model", "input"],
    "FunctionCallOutput": ["call_id"],
    "ResponseInputImageParam": ["image_url"],
    "ResponseInputImageContentParam": ["image_url"],
    "ChatCompletionAssistantMessageParam": ["content"],
}
"""Fields that the types leave out where there is another, such as a file instead of an image's address."""
EARLIER_FUNCTION = "openai__types__chat__chat_completion_message_function_tool_call_param__Function"
EARLIER_CUSTOM = "openai__types__chat__chat_completion_message_custom_tool_call_param__Custom"
OPTIONAL = {
    EARLIER_FUNCTION: {"arguments"},
    EARLIER_CUSTOM: {"input"},
    "ResponseFunctionToolCallParam": {"arguments"},
    "ResponseCustomToolCallParam": {"input"},
    "ResponseReasoningItemParam": {"summary"},
    "ResponseInputImageParam": {"detail"},
    "FunctionToolParam": {"parameters", "strict"},
    "NamespaceToolParam": {"description"},
    "ChatCompletionAllowedToolsParam": {"mode"},
    "ToolChoiceAllowedParam": {"mode"},
}
"""Fields that may be left out here."""
EARLIER_CALLS = (
    f"{EARLIER_FUNCTION}.name",
    f"{EARLIER_CUSTOM}.name",
    "ChatCompletionMessageFunctionToolCallParam.id",
    "ChatCompletionMessageCustomToolCallParam.id",
    "ResponseFunctionToolCallParam.name",
    "ResponseCustomToolCallParam.name",
)
INPUTS: Schema = {"anyOf": [TEXT, *map(_several, (TEXT, ID, _several(ID)))]}
FIELDS: Schema = {
    "model": {"enum": ["m"]},  # which is served
    "name": NAME,
    "prompt": INPUTS,
    "call_id": TEXT,
    "tool_call_id": TEXT,
    "url": {"enum": [IMAGE]},
    "file_id": NO,
    "stream_options": NO,  # what is asked for is no stream
    **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), TOKENS),
    **dict.fromkeys(("max_tokens", "max_tool_calls"), TOKENS | {"maximum": 2**31 - 1}),
    "include": {"type": ["array", "null"]},
    "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 128},
    "best_of": NO,
    "dimensions": {"type": "integer", "minimum": 1, "maximum": 8192},
    "seed": {"type": ["integer", "null"], "minimum": -(2**63), "maximum": 2**64 - 1},
    "stop": {"anyOf": [TEXT, {"type": "array", "maxItems": 4, "items": TEXT}, NO]},
    "logit_bias": {
        "type": ["object", "null"],
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "modalities": {"type": ["array", "null"], "items": {"enum": ["text"]}},
    "truncation": {"enum": ["disabled", None]},
    "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": 2},
    "top_p": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
    "frequency_penalty": {"type": ["number", "null"], "minimum": -2, "maximum": 2},
    "presence_penalty": {"type": ["number", "null"], "minimum": -2, "maximum": 2},
    "parameters": {"type": ["object", "null"]},
    "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
    "TextAsked.max_tokens": TOKENS | {"minimum": 0},
    "TextAsked.logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 5},
    "ChatAsked.logprobs": {"enum": [True, False, None]},  # true first: 'top_logprobs' needs it
    "ChatAsked.messages": {"minItems": 1},
    "ChatAsked.tools": {"minItems": 1},
    "EmbeddingAsked.input": INPUTS,
    "ResponseInputImageParam.image_url": {"enum": [IMAGE]},
    "ResponseInputImageContentParam.image_url": {"enum": [IMAGE]},
    "ChatCompletionAllowedToolsParam.tools": _several(
        _object(type={"const": "function"}, function=_object(name=NAME))
    ),
    "ToolChoiceAllowedParam.tools": _several(_object(type={"const": "function"}, name=NAME)),
    **{f"ChatCompletion{role}MessageParam.name": {"type": "string"} for role in ROLES},
    **dict.fromkeys(EARLIER_CALLS, TEXT),
    "ChatCompletionAssistantMessageParam.content": {"type": "string"},
}
"""Bounds of fields, of those of one type where it is named. They replace what a type says of the field or,
without a type of their own, narrow it.
"""


def _bounded(owner: str, name: str, schema: Schema) -> Schema:
    bounds = FIELDS.get(f"{owner}.{name}", FIELDS.get(name, {}))
    if owner == "ResponseAsked" and name == "input":
        text, items = schema["anyOf"]
        return {"anyOf": [text | TEXT, items | {"minItems": 1}]}
    if owner == "ResponseReasoningItemParam" and name != "type":  # its texts may be one text, too
        return {"anyOf": [schema, {"type": "string"}]}
    return bounds if bounds.keys() & {"type", "enum", "anyOf"} else schema | bounds


def accepted(schemas: Schema, name: str) -> Schema:
    """Return the schema of this request without what is refused or has no effect, and those that it needs."""
    unread = UNREAD | (_unread(schemas) if name == "ResponseAsked" else set())
    kept = Cut(lambda kind: kind not in unread, WITHOUT_EFFECT | REFUSED[name], _bounded)(schemas, name)
    return {each: with_nulls(schema, _required(each, schema)) for each, schema in kept.items()}


def _required(name: str, schema: Schema) -> set[str]:
    owner = name.rpartition(".")[2]
    return {*schema.get("required", ()), *REQUIRED.get(owner, ())} - OPTIONAL.get(owner, set())


def _unions(schemas: Schema) -> tuple[list[Schema], list[Schema]]:
    """Return the kinds of a response's items and of its tools."""
    asked = schemas["ResponseAsked"]["properties"]
    return asked["input"]["anyOf"][1]["items"]["anyOf"], asked["tools"]["items"]["anyOf"]


def _unread(schemas: Schema) -> set[str]:
    return {kind for union in _unions(schemas) for each in union if (kind := type_of(each)) not in READ}


def type_of(member: Schema) -> str:
    return member["$ref"].rpartition(".")[2]


# ---- what is refused by name

LEAST: Schema = {
    "ChatAsked": {"messages": {"const": [{"role": "user", "content": "a"}]}},
    "TextAsked": {"prompt": {"const": "a"}},
    "ResponseAsked": {"input": {"const": "a"}},
}
"""Fields that each request needs."""
ELSEWHERE = {"function_call"}
"""Fields that are refused as others of another value are, not as unsupported."""


def refused(schemas: Schema, name: str) -> dict[str, Schema]:
    """Return the schemas of requests that are refused, by the field that is not supported."""
    known = schemas[name]["properties"]
    found = {field: {field: _sent(known[field])} for field in (REFUSED[name] & known.keys()) - ELSEWHERE}
    if name == "ChatAsked":
        part = {"type": {"enum": ["input_audio", "file"]}}
        message = _object(role={"const": "user"}, content=_one(_object(**part)))
        found["messages.0.content.0.type"] = {"messages": _one(message)}
    if name == "ResponseAsked":
        items, tools = (_kinds(schemas, kinds) for kinds in _unions(schemas))
        found |= {"truncation": {"truncation": {"const": "auto"}}, "input.0.type": {"input": _one(items)}}
        found["tools.0.type"] = {"tools": _one(tools)}
    model = {"model": FIELDS["model"]}
    return {field: _object(**(LEAST[name] | model | sent)) for field, sent in sorted(found.items())}


def _one(item: Schema) -> Schema:
    return _several(item) | {"maxItems": 1}


def _sent(schema: Schema) -> Schema:
    """Return the schema of a field without null and what else means that the field was left out."""
    if "anyOf" in schema:
        return {"anyOf": [_sent(each) for each in schema["anyOf"] if each != NO]}
    empty = {"boolean": {"const": True}, "array": {"minItems": 1}, "string": {"minLength": 1}}
    return schema | empty.get(schema.get("type", ""), {})


def _kinds(schemas: Schema, union: list[Schema]) -> Schema:
    """Return an object that has the type of an item or tool that is not read, and no more."""
    unread = [member["$ref"].rpartition("/")[2] for member in union if type_of(member) not in READ]
    types = [_sent(schemas[kind]["properties"]["type"]) for kind in unread]
    names = {name for each in types for one in each.get("anyOf", [each]) for name in _names(one)}
    return _object(type={"enum": sorted(names - UNUSED_TOOLS)})


def _names(kind: Schema) -> list[str]:
    return kind.get("enum") or [kind["const"]]
