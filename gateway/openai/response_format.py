"""Reads `response_format`: what an answer must look like, as a JSON schema that a site enforces."""

from __future__ import annotations

import msgspec

from gateway.openai.fields import UNSUPPORTED, Fields, echo
from gateway.openai.tools import NAME, NAME_RULE

_ANY_OBJECT = '{"type":"object"}'


def read_format(fields: Fields) -> str:
    """The schema as text, empty where any text will do. `strict` or not, it is enforced."""
    wanted = fields.child("response_format")
    if wanted is None:
        return ""
    kind = wanted.required("type")
    if kind == "json_object":
        return _ANY_OBJECT
    if kind == "json_schema":
        return _schema(wanted)
    if kind not in (None, "text"):
        message = f"can be 'text', 'json_object' or 'json_schema', got {echo(kind)}: no other can be enforced"
        wanted.refuse("type", message, UNSUPPORTED)
    return ""


def _schema(wanted: Fields) -> str:
    if wanted.required("json_schema") is None:
        return ""
    given = wanted.child("json_schema")
    if given is None:
        return ""
    name = given.required_text("name")
    if name and not NAME.fullmatch(name):
        given.refuse("name", NAME_RULE)
    given.text("description")
    given.flag("strict")
    schema = given.raw("schema")
    if schema is None:
        return "{}"
    if not isinstance(schema, dict):
        given.nested("schema", schema)  # says what is wrong with it
        return ""
    return msgspec.json.encode(schema).decode()
