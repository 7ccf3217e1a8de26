"""Reads content that is a string or a list of parts, texts and images.

Each format encodes images in its own way; sites receive them as chat completions encode them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from gateway.openai.fields import MISSING, UNSUPPORTED, WRONG_TYPE, Fields, echo
from gateway.openai.image_data import BadImage, Image, image_at
from gateway.openai.text_parts import text_of
from gateway.prompt import Images

DETAILS = ("auto", "low", "high", "original")


class Content(NamedTuple):
    """`text` is the joined text of all parts."""

    text: str = ""
    images: Images | None = None


class ImagePart(NamedTuple):
    """A type of part that holds an image, and its reader, which returns None for a refused image."""

    type: str
    read: Callable[[Fields], Image | None]


def read_content(
    owner: Fields, name: str, content: object, kinds: tuple[str, ...], image: ImagePart, *, between: str = ""
) -> Content:
    """Read `content`, the value of the field `name`. `kinds` are the types of parts that hold text; `between`
    separates their texts.
    """
    if isinstance(content, str):
        return Content(content)
    if not isinstance(content, list):
        owner.refuse(name, f"must be a string or a list of parts, got {echo(content)}", WRONG_TYPE)
        return Content()
    return content_of([_read_part(part, kinds, image) for part in owner.objects(name, content)], between)


def content_of(parts: Sequence[str | Image], between: str) -> Content:
    """Return the content of texts and images."""
    text = between.join(part for part in parts if isinstance(part, str) and part)
    images = [part for part in parts if isinstance(part, Image)]
    if not images:
        return Content(text)
    encoded = msgspec.json.encode([_chat_part(part) for part in parts]).decode()
    tokens, fetched = sum(each.tokens for each in images), any(each.fetched for each in images)
    return Content(text, Images(encoded, tokens, fetched))


def read_url(part: Fields, name: str, url: str) -> Image | None:
    """Read the URL of an image, the value of the field `name`."""
    if not url:
        return None  # refused before
    part.problems.count_image(part.param(name))
    try:
        return image_at(url)
    except BadImage as bad:
        part.refuse(name, str(bad))
        return None


def _read_part(part: Fields, kinds: tuple[str, ...], image: ImagePart) -> str | Image:
    if part.raw("type") == image.type:
        return image.read(part) or ""
    return text_of(part, kinds, (image.type,))


def _chat_part(part: str | Image) -> dict[str, object]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    detail = {"detail": part.detail} if part.detail else {}
    return {"type": "image_url", "image_url": {"url": part.url, **detail}}


def _detail(fields: Fields) -> str:
    detail = fields.text("detail")
    if detail and detail not in DETAILS:
        fields.refuse("detail", f"must be one of {', '.join(DETAILS)}, got {echo(detail)}")
    return detail


def _read_chat_image(part: Fields) -> Image | None:
    nested = part.child("image_url")
    if nested is None:
        if part.raw("image_url") is None:
            part.refuse("image_url", "is required", MISSING)
        return None
    detail = _detail(nested)
    image = read_url(nested, "url", nested.required_text("url"))
    return image and image._replace(detail=detail)


def _read_response_image(part: Fields) -> Image | None:
    if part.raw("file_id") is not None:
        part.refuse("file_id", "is not supported: send the image as a data URL in 'image_url'", UNSUPPORTED)
        return None
    detail = _detail(part)
    image = read_url(part, "image_url", part.required_text("image_url"))
    return image and image._replace(detail=detail)


CHAT_IMAGE: Final = ImagePart("image_url", _read_chat_image)
RESPONSE_IMAGE: Final = ImagePart("input_image", _read_response_image)
