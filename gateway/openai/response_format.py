"""Reads `response_format` as the JSON schema that a site enforces on the answer."""

from __future__ import annotations

import msgspec

from gateway.openai.fields import UNSUPPORTED, Fields, echo
from gateway.openai.tools import NAME, NAME_RULE

_ANY_OBJECT = '{"type":"object"}'


def read_format(fields: Fields) -> str:
    """Return the schema as JSON, empty if there is none. It is enforced, `strict` or not."""
    response_format = fields.child("response_format")
    if response_format is None:
        return ""
    kind = response_format.required("type")
    if kind == "json_object":
        return _ANY_OBJECT
    if kind == "json_schema":
        return _schema(response_format)
    if kind not in (None, "text"):
        message = f"can be 'text', 'json_object' or 'json_schema', got {echo(kind)}: no other can be enforced"
        response_format.refuse("type", message, UNSUPPORTED)
    return ""


def _schema(response_format: Fields) -> str:
    if response_format.required("json_schema") is None:
        return ""
    json_schema = response_format.child("json_schema")
    if json_schema is None:
        return ""
    name = json_schema.required_text("name")
    if name and not NAME.fullmatch(name):
        json_schema.refuse("name", NAME_RULE)
    json_schema.text("description")
    json_schema.flag("strict")
    schema = json_schema.raw("schema")
    if schema is None:
        return "{}"
    if not isinstance(schema, dict):
        json_schema.nested("schema", schema)  # records the problem
        return ""
    return msgspec.json.encode(schema).decode()
