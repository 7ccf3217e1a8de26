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

from tests.support.cut_schema import Cut

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
    *("allowed_callers", "defer_loading", "eager_input_streaming", "input_examples", "display"),
}
"""Fields that are taken whatever they hold."""
AT_LEAST_ONE = ("max_tokens", "budget_tokens")
TEXT = {"type": "string"}
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
        schemas |= served(both, name) if name.endswith("Asked") else both
    paths: dict[str, Any] = {}
    for (place, method), (answered, asked) in ANSWERS.items():
        paths.setdefault(place, {})[method] = _operation(place, answered, asked)
    info = {"title": "from the types of Anthropic's SDK", "version": "1"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _bounded(_owner: str, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    if name == "model":
        return {"enum": ["m"]}
    if name == "custom_id":
        return {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
    if name == "params":
        return {"type": "object"}  # read when the request runs, as at Anthropic
    if name == "requests":
        return schema | {"minItems": 1}
    return schema | {"minimum": 1} if name in AT_LEAST_ONE else schema


served = Cut(SERVED.__contains__, WITHOUT_EFFECT, _bounded)


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
