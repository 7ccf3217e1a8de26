"""Reads the bodies of POST /v1/embeddings and POST /v1/rerank. Their queries generate no text."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gateway.domain import Sampling
from gateway.openai.fields import MISSING, UNSUPPORTED, WRONG_TYPE, Fields, echo
from gateway.openai.request import GenerationRequest, StreamOptions
from gateway.openai.sampling import MAX_COUNT, read_priority, token_ids
from gateway.prompt import EMBED, MAX_VECTOR_BYTES, RERANK, Pooling

MAX_INPUTS = 2_048
MAX_DIMENSIONS = MAX_VECTOR_BYTES // 4
CHARS_PER_TOKEN = 4
NOTHING = Sampling(max_tokens=0)
_IGNORED_FIELDS = frozenset({"user"})
_UNSUPPORTED_FIELDS = frozenset(
    {
        "add_special_tokens",
        "embed_dtype",
        "embedding_type",
        "embedding_types",
        "input_type",
        "instruction",
        "late_chunking",
        "max_chunks_per_doc",
        "max_tokens_per_doc",
        "messages",
        "normalize",
        "output_dtype",
        "output_dimension",
        "rank_fields",
        "task",
        "truncate",
        "truncate_prompt_tokens",
        "use_activation",
    }
)
"""Extensions of other servers, refused because they would silently have no effect."""


def read_embeddings(fields: Fields) -> GenerationRequest:
    model = fields.required_text("model")
    inputs = _inputs(fields)
    dimensions = fields.integer("dimensions", 1, MAX_DIMENSIONS, None)
    encoding = fields.raw("encoding_format")
    if encoding not in (None, "float", "base64"):
        fields.refuse("encoding_format", f"must be 'float' or 'base64', got {echo(encoding)}")
    body: dict[str, object] = {"input": inputs}
    if dimensions is not None:
        body["dimensions"] = dimensions
    tokens = sum(1 + len(each) // CHARS_PER_TOKEN if isinstance(each, str) else len(each) for each in inputs)
    _refuse_unsupported(fields)
    prompt = Pooling(EMBED, msgspec.json.encode(body).decode(), len(inputs), tokens)
    return _request(model, prompt, read_priority(fields), {"base64": encoding == "base64"}, "input")


def read_rerank(fields: Fields) -> GenerationRequest:
    model = fields.required_text("model")
    query = fields.required_text("query")
    documents = _documents(fields)
    top_n = fields.integer("top_n", 1, MAX_COUNT, None)
    shown = documents if fields.flag("return_documents") else None
    tokens = sum(1 + (len(query) + len(each)) // CHARS_PER_TOKEN for each in documents)
    _refuse_unsupported(fields)
    body = msgspec.json.encode({"query": query, "documents": documents}).decode()
    prompt = Pooling(RERANK, body, len(documents), tokens)
    return _request(model, prompt, read_priority(fields), {"top_n": top_n, "documents": shown}, "documents")


def _request(
    model: str, prompt: Pooling, priority: int, repeated: Mapping[str, object], prompt_field: str
) -> GenerationRequest:
    return GenerationRequest(
        model, (prompt,), NOTHING, "", StreamOptions(), priority, repeated, prompt_field=prompt_field
    )


def _refuse_unsupported(fields: Fields) -> None:
    if fields.flag("stream"):
        fields.refuse("stream", "can only be false: results come at once", UNSUPPORTED)
    for name in fields.present(_UNSUPPORTED_FIELDS):
        if fields.raw(name) is not None:
            fields.refuse(name, "is not supported; leave it out", UNSUPPORTED)
    fields.present(_IGNORED_FIELDS)


# ---- embeddings


def _inputs(fields: Fields) -> list[str | tuple[int, ...]]:
    """Read a text, token ids, or a list of either; the first item of a list decides which."""
    value = fields.required("input")
    if value is None:
        return []
    if value in ("", []):
        fields.refuse("input", "must not be empty")
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        message = f"must be a string, token ids, or a list of either, got {echo(value)}"
        fields.refuse("input", message, WRONG_TYPE)
        return []
    if not isinstance(value[0], str | list):
        return [token_ids(fields, "input", value)]
    if _too_many(fields, "input", value):
        return []
    kind = type(value[0])
    return [_input(fields, number, each, kind) for number, each in enumerate(value)]


def _input(fields: Fields, number: int, value: object, kind: type) -> str | tuple[int, ...]:
    name = f"input.{number}"
    if isinstance(value, kind) and value:
        return value if isinstance(value, str) else token_ids(fields, name, list(value))  # type: ignore[call-overload]
    what = "a string of at least one character" if kind is str else "a list of at least one token id"
    fields.refuse(name, f"must be {what}, as the first, got {echo(value)}", WRONG_TYPE)
    return ""


# ---- ranks


def _documents(fields: Fields) -> list[str]:
    """Read documents: texts, or objects with a `text`."""
    if fields.required("documents") is None:
        return []
    items = fields.items("documents")
    if fields.raw("documents") == []:
        fields.refuse("documents", "must hold at least one document")
    if _too_many(fields, "documents", items):
        return []
    return [_document(fields, f"documents.{number}", item) for number, item in enumerate(items)]


def _document(fields: Fields, name: str, item: object) -> str:
    if isinstance(item, dict):
        text = item.get("text")
        if isinstance(text, str) and text:
            return text
        fields.refuse(f"{name}.text", "must be a string of at least one character", MISSING)
    elif isinstance(item, str) and item:
        return item
    else:
        message = f"must be a string of at least one character, or an object with one, got {echo(item)}"
        fields.refuse(name, message, WRONG_TYPE)
    return ""


def _too_many(fields: Fields, name: str, items: list[object]) -> bool:
    if len(items) > MAX_INPUTS:
        fields.refuse(name, f"holds at most {MAX_INPUTS} items, got {len(items)}")
    return len(items) > MAX_INPUTS
