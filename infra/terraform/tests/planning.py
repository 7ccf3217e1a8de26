"""Plan and apply as a provider would, by its schema alone: pure functions on decoded values.

A schema block has Terraform's JSON form (`terraform providers schema -json`). Terraform itself checks names,
types, required arguments and blocks; this module does the rest. Does not know any cloud's rules.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import msgpack  # type: ignore[import-untyped]

Block = dict[str, Any]
Values = dict[str, Any]

UNKNOWN = msgpack.ExtType(0, b"")


def is_unknown(value: object) -> bool:
    """Return whether a value is only known after apply."""
    return isinstance(value, msgpack.ExtType)


def read_only(attribute: Values) -> bool:
    """Return whether only the provider sets an attribute."""
    return bool(attribute.get("computed")) and not attribute.get("optional")


def children(mode: str, value: Any, visit: Callable[[Values, object], Values]) -> Any:
    """Rebuild the content of a nested block or attribute, calling visit(object, its key) on each object."""
    if value is None or is_unknown(value):
        return value
    if mode in ("single", "group"):
        return visit(value, None)
    if mode == "map":
        return {key: visit(item, key) for key, item in value.items()}
    return [visit(item, index) for index, item in enumerate(value)]


def child_at(value: Any, key: object) -> Values:
    """Return the object that was at the same place before, or an empty one."""
    if key is None:
        return value or {}
    if isinstance(value, dict):
        return value.get(key) or {}
    return value[key] if isinstance(value, list) and isinstance(key, int) and key < len(value) else {}


def nested(block: Block) -> Iterator[tuple[str, str, Block]]:
    """Yield every nested block and nested attribute: name, nesting mode, its own block."""
    for name, inner in block.get("block_types", {}).items():
        yield name, inner["nesting_mode"], inner["block"]
    for name, attribute in block.get("attributes", {}).items():
        if "nested_type" in attribute:
            yield name, attribute["nested_type"]["nesting_mode"], attribute["nested_type"]


def plan(block: Block, proposed: Values | None, prior: Values | None) -> Values | None:
    """Return the planned state: unset computed values are unknown, write-only values are absent."""
    if proposed is None or is_unknown(proposed):
        return proposed
    planned, before = dict(proposed), prior or {}
    for name, attribute in block.get("attributes", {}).items():
        if attribute.get("write_only"):
            planned[name] = None
        elif planned.get(name) is None and attribute.get("computed"):
            planned[name] = UNKNOWN
    for name, mode, inner in nested(block):

        def visit(item: Values, key: object, inner: Block = inner, name: str = name) -> Values:
            return plan(inner, item, child_at(before.get(name), key)) or {}

        planned[name] = children(mode, planned.get(name), visit)
    return planned


def apply(block: Block, planned: Values | None, seed: str) -> Values | None:
    """Return the state after apply: every unknown becomes a made-up value that depends on the seed alone."""
    if planned is None:
        return None
    state = dict(planned)
    for name, attribute in block.get("attributes", {}).items():
        if is_unknown(state.get(name)):
            state[name] = made_up(attribute["type"], name, seed) if "type" in attribute else None
    for name, mode, inner in nested(block):

        def visit(item: Values, _: object, inner: Block = inner) -> Values:
            return apply(inner, item, seed) or {}

        state[name] = children(mode, state.get(name), visit)
    return state


def misuse(block: Block, config: Values | None) -> list[str]:
    """Return the read-only attributes that are configured; Terraform leaves that check to the provider."""
    found: list[str] = []
    if config is None or is_unknown(config):
        return found
    for name, attribute in block.get("attributes", {}).items():
        if read_only(attribute) and config.get(name) is not None:
            found.append(name)
    for name, mode, inner in nested(block):

        def visit(item: Values, _: object, inner: Block = inner) -> Values:
            found.extend(misuse(inner, item))
            return item

        children(mode, config.get(name), visit)
    return found


def made_up(kind: Any, name: str, seed: str) -> Any:
    """Return a value of a cty type (in its JSON form), recognisable as made up."""
    if isinstance(kind, str):
        text = f"stub-{name}-{seed}"
        return {"string": text, "number": 1, "bool": False, "dynamic": [b'"string"', text]}[kind]
    if kind[0] == "object":
        return {key: made_up(inner, f"{name}-{key}", seed) for key, inner in kind[1].items()}
    return {} if kind[0] == "map" else [made_up(kind[1], f"{name}-{n}", seed) for n in range(2)]


def seed_of(*parts: Any) -> str:
    """Return eight hex digits that depend on the parts alone."""
    return hashlib.sha256(b"".join(msgpack.packb(part) for part in parts)).hexdigest()[:8]
