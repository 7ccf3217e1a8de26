"""Reads content that is a string or a list of text parts."""

from __future__ import annotations

from gateway.openai.fields import UNSUPPORTED, WRONG_TYPE, Fields, echo


def read_text(owner: Fields, name: str, content: object, kinds: tuple[str, ...] = ("text",)) -> str:
    """Return the text of `content`, the value of the field `name`; parts are joined as they are.

    `kinds`: the types of parts that hold text; others are refused.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        owner.refuse(name, f"must be a string or a list of text parts, got {echo(content)}", WRONG_TYPE)
        return ""
    parts = (owner.nested(f"{name}.{number}", item) for number, item in enumerate(content))
    return "".join(_text_of(part, kinds) for part in parts if part is not None)


def _text_of(part: Fields, kinds: tuple[str, ...]) -> str:
    kind = part.required("type")
    if kind in kinds:
        field = "refusal" if kind == "refusal" else "text"
        return "" if part.required(field) is None else part.text(field)
    if kind is not None:
        can_be = " or ".join(repr(each) for each in kinds)
        part.refuse(
            "type", f"can only be {can_be}, got {echo(kind)}: this endpoint reads text alone", UNSUPPORTED
        )
    return ""
