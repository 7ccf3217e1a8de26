"""Reads `response_format` as the JSON schema that a site enforces on the answer."""

from __future__ import annotations

import msgspec

from gateway.openai.fields import UNSUPPORTED, Fields, echo
from gateway.openai.tools import NAME, NAME_RULE

ANY_OBJECT = '{"type":"object"}'


def read_format(fields: Fields) -> str:
    """Return the schema as JSON, empty if there is none. It is enforced whether or not `strict` is set."""
    response_format = fields.child("response_format")
    if response_format is None:
        return ""
    kind = response_format.required("type")
    if kind == "json_object":
        return ANY_OBJECT
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
    return "" if json_schema is None else read_schema(json_schema)


def read_schema(fields: Fields) -> str:
    """Read `name`, `description`, `strict` and `schema` of a format; return the schema as JSON."""
    name = fields.required_text("name")
    if name and not NAME.fullmatch(name):
        fields.refuse("name", NAME_RULE)
    fields.text("description")
    fields.flag("strict")
    schema = fields.raw("schema")
    if schema is None:
        return "{}"
    if not isinstance(schema, dict):
        fields.nested("schema", schema)  # records the problem
        return ""
    return msgspec.json.encode(schema).decode()
