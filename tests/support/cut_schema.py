"""Cuts the schema of a request to what is served."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cut:
    """`is_read` tells of a member of a union, by the name of its type, whether it is read. `left_out`: names
    of fields, those of one type with its name before. `bounded` returns the schema of a field within its
    bounds, by the name of its type and its own.
    """

    is_read: Callable[[str], bool]
    left_out: Set[str]
    bounded: Callable[[str, str, Schema], Schema]

    def __call__(self, schemas: Schema, name: str) -> Schema:
        """Return the schema of this name, and those that it needs."""
        kept: Schema = {}
        wanted = [name]
        while wanted:
            if (each := wanted.pop()) not in kept:
                kept[each] = self._cut(each.rpartition(".")[2], schemas[each], wanted)
        return kept

    def _cut(self, owner: str, schema: Any, wanted: list[str]) -> Any:
        if isinstance(schema, list):
            return [self._cut(owner, each, wanted) for each in schema if self._is_served(each)]
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            wanted.append(schema["$ref"].rpartition("/")[2])
            return schema
        found = {key: self._cut(owner, value, wanted) for key, value in schema.items() if key != "properties"}
        if isinstance(properties := schema.get("properties"), dict):
            read = {
                key: value for key, value in properties.items() if not {key, f"{owner}.{key}"} & self.left_out
            }
            found["properties"] = {
                key: self.bounded(owner, key, self._cut(owner, value, wanted)) for key, value in read.items()
            }
            found["required"] = [key for key in schema.get("required", []) if key in read]
        return found

    def _is_served(self, member: Any) -> bool:
        reference = member.get("$ref", "") if isinstance(member, dict) else ""
        return not reference or self.is_read(reference.rpartition("/")[2].rpartition(".")[2])


def with_nulls(schema: Schema, required: Iterable[str]) -> Schema:
    """Return the schema with these fields required. The others may be null, which means left out."""
    if "properties" not in schema:
        return schema
    needed = sorted(required)
    properties = {
        name: each if name in needed or None in each.get("enum", ()) else {"anyOf": [each, {"type": "null"}]}
        for name, each in schema["properties"].items()
    }
    return schema | {"properties": properties, "required": needed}
