"""OpenAI's specification as far as this gateway serves it: cut from a file, or made from the SDK's own types.

The SDK's types are generated from the specification. They know shapes and enums; OpenAI's reference has the
bounds of numbers beside them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
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

from tests.support.openai_requests import REFUSED, accepted, refused

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
REFUSING = {"ChatAsked": "/chat/completions", "TextAsked": "/completions", "ResponseAsked": "/responses"}
MOST_LISTED = {"/files": 10_000, "/batches": 100}
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
    """Request and response types of openai-python without what is refused by name, as the specification that
    they were generated from.
    """
    schemas: dict[str, Any] = {}
    for name in TYPES:
        both = _schemas_of(name)
        schemas |= accepted(both, name) if name in REFUSED else both
    vector = schemas["Embeddings.Embedding"]["properties"]["embedding"]
    in_base64 = {"type": "string"}
    schemas["Embeddings.Embedding"]["properties"]["embedding"] = {"anyOf": [vector, in_base64]}
    paths: dict[str, Any] = {}
    for (place, method), (answered, asked) in ANSWERS.items():
        paths.setdefault(f"/v1{place}", {})[method] = _operation(place, answered, asked)
    return _specification(paths, schemas)


def of_refusals() -> dict[str, Any]:
    """Requests that are refused by name, each for one field or kind, and what is said of it. Beside them
    models as they are not, as the proof that a difference is seen.
    """
    schemas: dict[str, Any] = {}
    wrong = {"description": "answered", "content": _json({"properties": {"object": {"const": "no list"}}})}
    paths: dict[str, Any] = {"/v1/models": {"get": {"responses": {"200": wrong}}}}
    for name, place in REFUSING.items():
        schemas |= _schemas_of(name)
        bodies = refused(schemas, name)
        says = {"code": {"const": "unsupported_parameter"}, "param": {"enum": [*bodies]}}
        error = {"properties": {"error": {"properties": says}}}
        paths[f"/v1{place}"] = {
            "post": {
                "requestBody": {"required": True, "content": _json({"anyOf": [*bodies.values()]})},
                "responses": {"400": {"description": "refused", "content": _json({"allOf": [ERROR, error]})}},
            }
        }
    return _specification(paths, schemas)


def _schemas_of(name: str) -> dict[str, Any]:
    schema = json.loads(_schema_of(name))
    defined = schema.pop("$defs", {})
    return {name: schema} | {f"{name}.{inner}": each for inner, each in defined.items()}


@cache
def _schema_of(name: str) -> str:
    """Return the schema of a type, which takes long to make, as JSON: whoever reads it changes it."""
    reference = f"#/components/schemas/{name}.{{model}}"
    return json.dumps(TypeAdapter(TYPES[name]).json_schema(ref_template=reference))


def _specification(paths: Mapping[str, Any], schemas: Mapping[str, Any]) -> dict[str, Any]:
    info = {"title": "from the types of openai-python", "version": "1"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


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
