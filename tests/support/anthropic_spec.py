"""Anthropic's specification of messages and their batches, as far as this gateway serves it, made from the
types of Anthropic's SDK, with POST /v1/rerank beside it, which no SDK of ours has types for.
"""

from __future__ import annotations

from typing import Any

from anthropic.types import Message, MessageTokensCount
from anthropic.types import message_count_tokens_params as count_params
from anthropic.types import message_create_params as message_params
from anthropic.types.messages import DeletedMessageBatch, MessageBatch, batch_create_params
from pydantic import TypeAdapter

from tests.support.cut_schema import Cut, with_nulls
from tests.support.good_bodies import IMAGE

BATCHES = "/v1/messages/batches"
ANSWERS = {
    ("/v1/messages", "post"): ("Message", "MessageAsked"),
    ("/v1/messages/count_tokens", "post"): ("Count", "CountAsked"),
    (BATCHES, "post"): ("Batch", "BatchAsked"),
    (BATCHES, "get"): ("BatchList", ""),
    (f"{BATCHES}/{{id}}", "get"): ("Batch", ""),
    (f"{BATCHES}/{{id}}", "delete"): ("BatchDeleted", ""),
    (f"{BATCHES}/{{id}}/cancel", "post"): ("Batch", ""),
    ("/v1/rerank", "post"): ("Ranks", "RerankAsked"),
}
TYPES: dict[str, Any] = {
    "MessageAsked": message_params.MessageCreateParamsNonStreaming,
    "CountAsked": count_params.MessageCountTokensParams,
    "BatchAsked": batch_create_params.BatchCreateParams,
    "Message": Message,
    "Count": MessageTokensCount,
    "Batch": MessageBatch,
    "BatchDeleted": DeletedMessageBatch,
}
SERVED = {
    *("UserMessageParam", "AssistantMessageParam", "SystemMessageParam", "MessageCreateParamsNonStreaming"),
    *("TextBlockParam", "ImageBlockParam", "Base64ImageSourceParam", "ToolUseBlockParam"),
    *(
        "ToolResultBlockParam",
        "ThinkingBlockParam",
        "ToolParam",
        "JSONOutputFormatParam",
        "OutputConfigParam",
    ),
    *("ThinkingConfigEnabledParam", "ThinkingConfigDisabledParam", "ThinkingConfigAdaptiveParam", "Request"),
    *("ToolChoiceAutoParam", "ToolChoiceAnyParam", "ToolChoiceToolParam", "ToolChoiceNoneParam"),
}
"""Members of unions that are read; what else there is, is refused, and makes the report no better."""
WITHOUT_EFFECT = {
    *("cache_control", "citations", "metadata", "service_tier", "inference_geo", "speed", "diagnostics"),
    *(
        "user_profile_id",
        "workspace_id",
        "signature",
        "caller",
        "toolset_name",
        "is_error",
        "transformations",
    ),
    *("container", "allowed_callers", "defer_loading", "eager_input_streaming", "input_examples", "display"),
}
"""Fields that are taken whatever they hold; of a container only that there is none."""
OPTIONAL = {"budget_tokens", "input"}
BLOCKS = {
    "UserMessageParam": {"TextBlockParam", "ImageBlockParam", "ToolResultBlockParam"},
    "AssistantMessageParam": {"TextBlockParam", "ThinkingBlockParam", "ToolUseBlockParam"},
}
TEXT = {"type": "string"}
NAME = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,128}$"}
COUNT = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
FIELDS: dict[str, Any] = {
    "model": {"enum": ["m"]},
    "max_tokens": COUNT,
    "budget_tokens": COUNT,
    "custom_id": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
    "params": {"type": "object"},  # read when the request runs, as at Anthropic
    "ToolParam.name": NAME,
    "ToolChoiceToolParam.name": NAME,
    "tool_use_id": TEXT | {"minLength": 1},
    "id": TEXT | {"minLength": 1},
    "ToolUseBlockParam.name": TEXT | {"minLength": 1},
    "media_type": {"enum": ["image/png"]},
    "data": {"enum": [IMAGE.rpartition(",")[2]]},
    "stop_sequences": {"type": "array", "items": TEXT | {"minLength": 1}, "maxItems": 16},
}
NARROWED = {
    "BatchAsked.requests": {"minItems": 1},
    "MessageAsked.messages": {"minItems": 1},
    "CountAsked.messages": {"minItems": 1},
}
"""Bounds of fields: in place of what a type says, and beside it."""
DOCUMENT = {"anyOf": [TEXT | {"minLength": 1}, {"type": "object", "required": ["text"]}]}
RERANK: dict[str, Any] = {
    "RerankAsked": {
        "type": "object",
        "properties": {
            "model": {"enum": ["m"]},
            "query": TEXT | {"minLength": 1},
            "documents": {"type": "array", "minItems": 1, "items": DOCUMENT},
            "top_n": {"type": ["integer", "null"], "minimum": 1},
            "return_documents": {"type": ["boolean", "null"]},
        },
        "required": ["model", "query", "documents"],
    },
    "Ranks": {
        "type": "object",
        "properties": {
            "id": TEXT,
            "results": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"index": {"type": "integer"}, "relevance_score": {"type": "number"}},
                    "required": ["index", "relevance_score"],
                },
            },
        },
        "required": ["results"],
    },
    "BatchList": {
        "type": "object",
        "properties": {
            "data": {"type": "array", "items": {"$ref": "#/components/schemas/Batch"}},
            "has_more": {"type": "boolean"},
            "first_id": {"type": ["string", "null"]},
            "last_id": {"type": ["string", "null"]},
        },
        "required": ["data", "has_more", "first_id", "last_id"],
    },
}
ERROR = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": TEXT, "message": TEXT},
            "required": ["type", "message"],
        },
        "request_id": TEXT,
    },
    "required": ["type", "error", "request_id"],
}


def from_types() -> dict[str, Any]:
    schemas = dict(RERANK)
    for name, kind in TYPES.items():
        schema = TypeAdapter(kind).json_schema(ref_template=f"#/components/schemas/{name}.{{model}}")
        defined = schema.pop("$defs", {})
        both = {name: schema} | {f"{name}.{inner}": each for inner, each in defined.items()}
        schemas |= _accepted(both, name) if name.endswith("Asked") else both
    paths: dict[str, Any] = {}
    for (place, method), (answered, asked) in ANSWERS.items():
        paths.setdefault(place, {})[method] = _operation(place, answered, asked)
    info = {"title": "from the types of Anthropic's SDK", "version": "1"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _bounded(owner: str, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return FIELDS.get(f"{owner}.{name}") or FIELDS.get(name) or schema | NARROWED.get(f"{owner}.{name}", {})


def _accepted(schemas: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the schema of a request without what is refused, and those that it needs.

    What the assistant began is counted, not continued.
    """
    served = SERVED - {"AssistantMessageParam"} if name == "MessageAsked" else SERVED
    kept = Cut(served.__contains__, WITHOUT_EFFECT, _bounded)(schemas, name)
    for owner, read in BLOCKS.items():
        if (message := kept.get(f"{name}.{owner}")) is not None:
            blocks = message["properties"]["content"]["anyOf"][1]["items"]
            blocks["anyOf"] = [each for each in blocks["anyOf"] if each["$ref"].rpartition(".")[2] in read]
    return {
        each: with_nulls(schema, {*schema.get("required", ())} - OPTIONAL) for each, schema in kept.items()
    }


def _operation(place: str, answered: str, asked: str) -> dict[str, Any]:
    def content(name: str) -> dict[str, Any]:
        return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}

    refused = {"description": "refused"}
    if place != "/v1/rerank":
        refused["content"] = {"application/json": {"schema": ERROR}}  # type: ignore[assignment]
    operation: dict[str, Any] = {
        "responses": {
            "200": {"description": "answered", "content": content(answered)},
            **dict.fromkeys(("4XX", "529"), refused),
        },
        "parameters": [{"name": "id", "in": "path", "required": True, "schema": TEXT | {"minLength": 1}}]
        if "{id}" in place
        else [],
    }
    if asked:
        operation["requestBody"] = {"required": True, "content": content(asked)}
    if answered == "BatchList":
        limit = {"type": "integer", "minimum": 1, "maximum": 1000}
        operation["parameters"].append({"name": "limit", "in": "query", "schema": limit})
    return operation
