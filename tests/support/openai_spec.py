"""OpenAI's specification as far as this gateway serves it: cut from a file, or made from the SDK's own types.

The SDK's types are generated from the specification. They know shapes and enums; OpenAI's reference has the
bounds of numbers beside them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from openai.types import Batch, Completion, CreateEmbeddingResponse, FileDeleted, FileObject, Model
from openai.types import batch_create_params as batch_params
from openai.types import completion_create_params as text_params
from openai.types import embedding_create_params as embedding_params
from openai.types.chat import ChatCompletion
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import Response
from openai.types.responses import response_create_params as response_params
from pydantic import TypeAdapter

SERVED = {
    "/chat/completions": ("post",),
    "/completions": ("post",),
    "/responses": ("post",),
    "/embeddings": ("post",),
    "/models": ("get",),
    "/models/{model}": ("get",),
    "/files": ("get", "post"),
    "/files/{file_id}": ("get", "delete"),
    "/files/{file_id}/content": ("get",),
    "/batches": ("get", "post"),
    "/batches/{batch_id}": ("get",),
    "/batches/{batch_id}/cancel": ("post",),
}
TYPES: dict[str, Any] = {
    "ChatAsked": chat_params.CompletionCreateParamsNonStreaming,
    "TextAsked": text_params.CompletionCreateParamsNonStreaming,
    "ResponseAsked": response_params.ResponseCreateParamsNonStreaming,
    "EmbeddingAsked": embedding_params.EmbeddingCreateParams,
    "BatchAsked": batch_params.BatchCreateParams,
    "Chat": ChatCompletion,
    "Text": Completion,
    "Response": Response,
    "Embeddings": CreateEmbeddingResponse,
    "Model": Model,
    "File": FileObject,
    "FileDeleted": FileDeleted,
    "Batch": Batch,
}
ANSWERS = {
    ("/chat/completions", "post"): ("Chat", "ChatAsked"),
    ("/completions", "post"): ("Text", "TextAsked"),
    ("/responses", "post"): ("Response", "ResponseAsked"),
    ("/embeddings", "post"): ("Embeddings", "EmbeddingAsked"),
    ("/models", "get"): ("Model list", ""),
    ("/models/{model}", "get"): ("Model", ""),
    ("/files", "get"): ("File list", ""),
    ("/files", "post"): ("File", "form"),
    ("/files/{file_id}", "get"): ("File", ""),
    ("/files/{file_id}", "delete"): ("FileDeleted", ""),
    ("/files/{file_id}/content", "get"): ("", ""),
    ("/batches", "get"): ("Batch list", ""),
    ("/batches", "post"): ("Batch", "BatchAsked"),
    ("/batches/{batch_id}", "get"): ("Batch", ""),
    ("/batches/{batch_id}/cancel", "post"): ("Batch", ""),
}
BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "n": (1, 128),
    "top_logprobs": (0, 20),
}
TEXT_BOUNDS = BOUNDS | {"logprobs": (0, 5), "best_of": (0, 20)}
MOST_LISTED = {"/files": 10_000, "/batches": 100}
READ = {
    *("EasyInputMessageParam", "Message", "ResponseOutputMessageParam", "ResponseReasoningItemParam"),
    *("ResponseFunctionToolCallParam", "FunctionCallOutput", "ItemReference"),
    *("ResponseCustomToolCallParam", "ResponseCustomToolCallOutputParam"),
    *("FunctionToolParam", "CustomToolParam", "NamespaceToolParam"),
}
"""Kinds of a response's items and tools that are read; any other is told by its type, whatever it holds."""
FORM = {
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": ["batch"]}},
    "required": ["file", "purpose"],
}
TEXT_OR_NULL = {"type": ["string", "null"]}
ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": TEXT_OR_NULL,
                "code": TEXT_OR_NULL,
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def from_file(path: Path) -> dict[str, Any]:
    """Return the served part of a specification, whose paths or server address may have /v1.

    Any refusal of ours has OpenAI's shape of errors.
    """
    whole = yaml.load(path.read_text(), yaml.CSafeLoader)
    paths = {}
    for place, methods in SERVED.items():
        known = whole["paths"].get(place) or whole["paths"].get(f"/v1{place}", {})
        paths[f"/v1{place}"] = {method: _open(known[method]) for method in methods if method in known}
    components = whole["components"]
    return {"openapi": whole["openapi"], "info": whole["info"], "paths": paths, "components": components}


def _open(operation: dict[str, Any]) -> dict[str, Any]:
    return operation | {"responses": {**operation["responses"], **_refusals()}}


def _refusals() -> dict[str, Any]:
    return {status: {"description": "refused", "content": _json(ERROR)} for status in ("4XX", "503")}


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def from_types() -> dict[str, Any]:
    """Request and response types of openai-python, as the specification that they were generated from."""
    schemas: dict[str, Any] = {}
    for name, kind in TYPES.items():
        schema = TypeAdapter(kind).json_schema(ref_template=f"#/components/schemas/{name}.{{model}}")
        defined = schema.pop("$defs", {})
        if name.endswith("Asked") and name != "BatchAsked":
            schema["properties"]["model"] = {"enum": ["m"]}  # which is served
        if name in ("ChatAsked", "TextAsked", "ResponseAsked"):
            _bound(schema["properties"], TEXT_BOUNDS if name == "TextAsked" else BOUNDS)
        schemas |= {name: schema} | {f"{name}.{inner}": each for inner, each in defined.items()}
    _cut_unread(schemas)
    paths: dict[str, Any] = {}
    for (place, method), (answered, asked) in ANSWERS.items():
        paths.setdefault(f"/v1{place}", {})[method] = _operation(place, answered, asked)
    info = {"title": "from the types of openai-python", "version": "1"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _cut_unread(schemas: dict[str, Any]) -> None:
    """Leave each kind of a response's items and tools that isn't read its type alone."""
    asked = schemas["ResponseAsked"]["properties"]
    for union in (asked["input"]["anyOf"][1]["items"]["anyOf"], asked["tools"]["items"]["anyOf"]):
        for name in (member["$ref"].rpartition("/")[2] for member in union):
            if name.rpartition(".")[2] not in READ:
                kind = {"type": schemas[name]["properties"]["type"]}
                schemas[name] = {"type": "object", "properties": kind, "required": ["type"]}


def _bound(properties: dict[str, Any], bounds: Mapping[str, tuple[float, float]]) -> None:
    for name, (low, high) in bounds.items():
        schema = properties.get(name, {})
        for each in schema.get("anyOf", [schema]):
            if each.get("type") in ("integer", "number"):
                each |= {"minimum": low, "maximum": high}


def _operation(place: str, answered: str, asked: str) -> dict[str, Any]:
    ok: dict[str, Any] = {"description": "answered"}
    if answered:
        ok["content"] = _json(_answer(answered))
    if asked in {"ChatAsked", "TextAsked"}:
        ok["content"]["text/event-stream"] = {}
    operation: dict[str, Any] = {"responses": {"200": ok, **_refusals()}}
    if asked:
        content = _json({"$ref": f"#/components/schemas/{asked}"})
        operation["requestBody"] = {
            "required": True,
            "content": {"multipart/form-data": {"schema": FORM}} if asked == "form" else content,
        }
    names = [part[1:-1] for part in place.split("/") if part.startswith("{")]
    text = {"type": "string", "minLength": 1}
    operation["parameters"] = [{"name": n, "in": "path", "required": True, "schema": text} for n in names]
    if place in MOST_LISTED and answered.endswith(" list"):
        limit = {"type": "integer", "minimum": 1, "maximum": MOST_LISTED[place]}
        operation["parameters"] += [
            {"name": "limit", "in": "query", "schema": limit},
            {"name": "after", "in": "query", "schema": {"type": "string"}},
        ]
    return operation


def _answer(answered: str) -> dict[str, Any]:
    name, _, several = answered.partition(" ")
    one = {"$ref": f"#/components/schemas/{name}"}
    if not several:
        return one
    properties = {"object": {"const": "list"}, "data": {"type": "array", "items": one}}
    return {"type": "object", "properties": properties, "required": ["object", "data"]}


def write(spec: dict[str, Any], path: Path) -> Path:
    path.write_text(json.dumps(spec))
    return path
