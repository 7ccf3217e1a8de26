"""Determine the types of arguments that models write without quotes, from the functions' schemas."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from site_engine.text.call_syntax import Schema

ANY_TYPE: frozenset[str] = frozenset()
STRING = frozenset({"string"})
_MAX_DEPTH = 16
"""The maximum nesting depth of references and combinations in a schema."""
_LITERALS = {"True": "true", "False": "false", "None": "null"}
"""JSON literals by the Python literals that models write, as some templates contain them."""


def property_types(parameters: Schema, name: str) -> frozenset[str]:
    """Return the JSON types allowed for an argument, or ANY_TYPE if the schema does not specify any."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return schema_types(schema, parameters)


def schema_types(schema: object, root: Schema) -> frozenset[str]:
    """Return the JSON types that a schema allows. `root`: the schema that resolves references."""
    return _types(schema, root, {}, 0)


def _types(schema: object, root: Schema, found: dict[str, frozenset[str]], depth: int) -> frozenset[str]:
    """Return the allowed types. `found` caches the types of references, each of which is resolved once."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return ANY_TYPE
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(each for each in named if isinstance(each, str))
    if "const" in schema:
        return frozenset({json_type(json.dumps(schema["const"]))})
    if isinstance(schema.get("enum"), list):
        return frozenset(json_type(json.dumps(each)) for each in schema["enum"])
    if isinstance(schema.get("$ref"), str):
        reference = schema["$ref"]
        if reference not in found:
            found[reference] = ANY_TYPE  # the result for a cyclic reference
            found[reference] = _types(referenced(reference, root), root, found, depth + 1)
        return found[reference]
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return _union(_types(each, root, found, depth + 1) for each in schema[key])
    parts = schema.get("allOf")
    known = (_types(each, root, found, depth + 1) for each in parts) if isinstance(parts, list) else ()
    return next(filter(None, known), ANY_TYPE)


def referenced(reference: str, root: Schema) -> object:
    """Resolve a reference such as `#/$defs/city` in a schema. Return None if it can't be resolved."""
    found: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found if reference.startswith("#") else None


def argument_json(text: str, types: frozenset[str]) -> str:
    """Convert an argument to JSON. JSON text is kept if its type is allowed or strings are not allowed. Other
    text, and any text if `types` is STRING, becomes a string.
    """
    if types == STRING:
        return json.dumps(text, ensure_ascii=False)
    value = text.strip()
    literal = _LITERALS.get(value, "")
    if literal and json_type(literal) in types:
        return literal
    kind = json_type(value)
    is_allowed = kind in types or (kind == "integer" and "number" in types)
    if kind and (is_allowed or "string" not in types):
        return value
    return json.dumps(text, ensure_ascii=False)


def json_type(text: str) -> str:
    """Return the JSON type of a text, or an empty string if the text is not valid JSON."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return ""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    return names.get(type(value), "null")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _union(parts: Iterable[frozenset[str]]) -> frozenset[str]:
    union: frozenset[str] = frozenset()
    for each in parts:
        if not each:
            return ANY_TYPE
        union |= each
    return union
