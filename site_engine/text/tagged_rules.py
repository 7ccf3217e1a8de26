"""Generate Lark grammars of tool calls that enclose raw values in tags."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from site_engine.errors import NotServed, Reason
from site_engine.text.argument_types import STRING, referenced, schema_types
from site_engine.text.call_syntax import NO_PARAMETERS, Schema, json_rule, quoted

if TYPE_CHECKING:
    from site_engine.text.tagged_call import TaggedSyntax

_OBJECT_KEYS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "strict"}
_NOTES = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated"}
_TEXT_KEYS = {"type", "minLength", "maxLength", "anyOf", "enum", "const", "$ref"}
TEXT_OR_NULL = STRING | {"null"}


class _Unenforceable(Exception):
    """Raised for a part of a schema that can't be enforced. The message names the part."""


def tagged_rules(
    syntax: TaggedSyntax, rule: str, function: Mapping[str, Any], literal: Callable[[str], str]
) -> str:
    """Return the rules of a call, with arguments in schema order. Arguments are optional unless required.

    Raises NotServed if the parameter schema can't be enforced on raw values.
    """
    parameters = function.get("parameters") or NO_PARAMETERS
    name = function["name"]
    line = '"\\n"' if syntax.lines else '"\\n"?'
    try:
        _check_object(parameters)
        arguments = _Arguments(syntax, rule, parameters, literal, line)
        rules = [f"{rule}: {quoted(syntax.start + name + syntax.name_end)} {line} {arguments.names()}"]
        rules[0] += literal(syntax.call_end)
        return "\n".join([*rules, *arguments.rules()]) + "\n"
    except _Unenforceable as exc:
        message = f"{exc} of {name} can't be enforced in the form in which this model writes calls"
        raise NotServed(Reason.UNSUPPORTED, message, "tools") from exc


def _check_object(parameters: Schema) -> None:
    others = parameters.keys() - _OBJECT_KEYS - _NOTES
    if others:
        raise _Unenforceable(f"{min(others)!r} in the parameters")
    properties, required = parameters.get("properties") or {}, parameters.get("required") or []
    names_strings = isinstance(required, list) and all(isinstance(each, str) for each in required)
    if (
        not isinstance(properties, Mapping)
        or not names_strings
        or parameters.get("type", "object") != "object"
    ):
        raise _Unenforceable("the schema of the parameters")
    missing = set(required) - properties.keys()
    if missing:
        raise _Unenforceable(f"the property {min(missing)!r}, which is required without a schema,")


class _Arguments(NamedTuple):
    syntax: TaggedSyntax
    rule: str
    parameters: Schema
    literal: Callable[[str], str]
    line: str

    @property
    def properties(self) -> Mapping[str, Any]:
        return self.parameters.get("properties") or {}

    def names(self) -> str:
        """Return the sequence of the names of all argument rules."""
        required = self.parameters.get("required") or ()
        return "".join(
            f"{self.rule}_{number}{'' if name in required else '?'} "
            for number, name in enumerate(self.properties)
        )

    def rules(self) -> Iterator[str]:
        syntax, literal = self.syntax, self.literal
        inner = '"\\n"' if syntax.lines else ""
        for number, (name, schema) in enumerate(self.properties.items()):
            if any(char in name for char in "<>\n") or name != name.strip():
                raise _Unenforceable(f"the name of the property {name!r}")
            rule = f"{self.rule}_{number}"
            between = f"{self.line} {literal(syntax.value)}" if syntax.value else ""
            head = f"{literal(syntax.key)} {quoted(name)} {literal(syntax.key_end)} {between} {inner}"
            yield f"{rule}: {head} {rule}_value {self.line}"
            yield from self._value_rules(f"{rule}_value", schema, name)

    def _value_rules(self, rule: str, schema: object, name: str) -> Iterator[str]:
        """Yield the rules of a value and its end tag, which terminates free text."""
        syntax, root = self.syntax, self.parameters
        end = self.literal(syntax.value_end)
        if syntax.lines:
            end = quoted("\n" + syntax.value_end)
        known = schema if isinstance(schema, Mapping) else {}
        types = schema_types(known, root)
        if not types or "string" not in types:
            shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
            yield f"{rule}: {rule}_json {end}"
            yield f"{rule}_json: {json_rule({**shared, **known})}"
            return
        choices = _choices(known, root)
        if choices is not None:
            yield f"{rule}: ({' | '.join(map(quoted, choices))}) {end}"
            return
        text = f"{rule.upper()}_TEXT"
        if not types <= TEXT_OR_NULL or not _is_free_text(known, root):
            raise _Unenforceable(f"the property {name!r}")
        yield f"{rule}{'' if end.startswith('<[') else '[lazy]'}: {text} {end}"
        yield f"{text}: {self._text(known)}"

    def _text(self, schema: Schema) -> str:
        """Return the expression for text that contains none of the tags that could end the text."""
        syntax = self.syntax
        tags = (syntax.value_end, syntax.call_end, *((syntax.key,) if syntax.lines else ()))
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        length = f"{{{least},{most}}}" if least or most != "" else "*"
        escaped = "|".join(tag.replace("/", "\\/") for tag in tags)
        return f"/(.|\\n){length}/ & ~/(.|\\n)*({escaped})(.|\\n)*/"


def _choices(schema: Schema, root: Schema) -> list[str] | None:
    """Return the values of an `enum` or `const` as models write them, or None if there is neither."""
    if isinstance(schema.get("$ref"), str):
        found = referenced(schema["$ref"], root)
        return _choices(found, root) if isinstance(found, Mapping) else None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return [each if isinstance(each, str) else json.dumps(each) for each in values]


def _is_free_text(schema: object, root: Schema) -> bool:
    """Return whether a schema of strings (or null) has no constraint except on the length."""
    if not isinstance(schema, Mapping) or schema.keys() - _TEXT_KEYS - _NOTES:
        return False
    branches = schema.get("anyOf")
    return "$ref" not in schema and all(
        _is_free_text(each, root)
        and "minLength" not in each
        and "maxLength" not in each
        and "enum" not in each
        for each in (branches if isinstance(branches, list) else ())
    )
