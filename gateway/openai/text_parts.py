"""Reads content that is a string or a list of text parts."""

from __future__ import annotations

from gateway.openai.fields import UNSUPPORTED, WRONG_TYPE, Fields, echo


def read_text(
    owner: Fields, name: str, content: object, kinds: tuple[str, ...] = ("text",), between: str = ""
) -> str:
    """Return the text of `content`, the value of the field `name`, its parts joined by `between`.

    `kinds`: the types of parts that hold text; others are refused.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        owner.refuse(name, f"must be a string or a list of text parts, got {echo(content)}", WRONG_TYPE)
        return ""
    return between.join(filter(None, [text_of(part, kinds) for part in owner.objects(name, content)]))


def text_of(part: Fields, kinds: tuple[str, ...], others: tuple[str, ...] = ()) -> str:
    """Return the text of a part. `others` are types that the caller reads itself; refusals name them, too."""
    kind = part.required("type")
    if kind in kinds:
        field = "refusal" if kind == "refusal" else "text"
        return "" if part.required(field) is None else part.text(field)
    if kind is not None:
        can_be = " or ".join(repr(each) for each in kinds + others)
        what = "texts and images are" if others else "text is"
        part.refuse("type", f"can only be {can_be}, got {echo(kind)}: only {what} read here", UNSUPPORTED)
    return ""
