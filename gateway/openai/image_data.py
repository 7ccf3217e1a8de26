"""Checks an image of a request and guesses its tokens. Does not decode images, and fetches nothing."""

from __future__ import annotations

import binascii
import struct
from math import ceil
from typing import Final, NamedTuple

MEDIA_TYPES: Final = ("image/png", "image/jpeg", "image/gif", "image/webp")
MISNAMED_JPEG: Final = "image/jpg"
"""A media type that programs derive from file names; OpenAI and similar APIs accept it."""
MAX_IMAGE_BYTES: Final = 20 * 2**20
MAX_ADDRESS_CHARS: Final = 8_192
PIECE_CHARS: Final = 2**18
"""Base64 characters decoded in one call, a multiple of 4: a few milliseconds of decoding."""

MAX_SEGMENTS: Final = 1_000
"""Segments of a JPEG that are searched for its size; cameras write some dozens before that segment."""

PATCH: Final = 28
"""Side, in pixels, of the square that most models read as one token (Qwen2-VL, §2.1)."""
MIN_TOKENS, MAX_TOKENS, UNSEEN_TOKENS = 64, 4_096, 1_024
"""Bounds of the guess, as models enlarge tiny images and shrink huge ones; the guess for unknown sizes."""


class Image(NamedTuple):
    """`url` is a data URL, or the address from which a server has to fetch the image."""

    url: str
    tokens: int
    fetched: bool = False
    detail: str = ""


class BadImage(Exception):
    """Raised for an image that is refused; the message continues a sentence that begins with the field."""


def image_at(url: str) -> Image:
    """Read an image's URL. Raises BadImage."""
    scheme, _, rest = url.partition(":")
    if scheme.lower() in ("http", "https"):
        if len(url) > MAX_ADDRESS_CHARS or not url.isprintable() or not rest.removeprefix("//"):
            raise BadImage(f"must be an address of at most {MAX_ADDRESS_CHARS} printable characters")
        return Image(url, UNSEEN_TOKENS, fetched=True)
    head, comma, data = rest.partition(",")
    media_type, *options = head.split(";")
    if scheme.lower() != "data" or not comma:
        raise BadImage("must be a data URL, such as 'data:image/png;base64,…', or begin with https://")
    if options[-1:] != ["base64"]:
        raise BadImage("must be a data URL in base64: 'data:image/png;base64,…'")
    return inline_image("image/jpeg" if media_type.lower() == MISNAMED_JPEG else media_type, data)


def inline_image(media_type: str, data: str) -> Image:
    """Return an image from its base64. Raises BadImage."""
    if media_type.lower() not in MEDIA_TYPES:
        raise BadImage(f"must be of a type among {', '.join(MEDIA_TYPES)}, got {media_type[:100]!r}")
    if len(data) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise BadImage(f"has more than the {MAX_IMAGE_BYTES} bytes that an image may have")
    try:
        raw = _decode(data)
    except ValueError as exc:  # also binascii.Error, and text that is not ASCII
        raise BadImage(f"is not valid base64: {exc}") from exc
    size = image_size(raw)
    if size is None:
        raise BadImage(f"holds no image: its bytes begin as none of {', '.join(MEDIA_TYPES)}")
    return Image(f"data:{media_type};base64,{data}", guess_tokens(*size))


def _decode(data: str) -> bytes:
    """Decode base64 in pieces, so that other threads can run between them. Raises ValueError."""
    if 0 <= data.find("=") < len(data) - 2:
        raise ValueError("there is padding before its end")
    starts = range(0, len(data), PIECE_CHARS)
    return b"".join(binascii.a2b_base64(data[at : at + PIECE_CHARS], strict_mode=True) for at in starts)


def guess_tokens(width: int, height: int) -> int:
    """Guess the tokens of an image: one for each square of PATCH pixels, within bounds."""
    if not width or not height:
        return UNSEEN_TOKENS
    return min(MAX_TOKENS, max(MIN_TOKENS, ceil(width / PATCH) * ceil(height / PATCH)))


def image_size(raw: bytes) -> tuple[int, int] | None:
    """Return width and height in pixels, zeros where the header does not say; None if `raw` is no image."""
    if raw.startswith(b"\x89PNG\r\n\x1a\n"):
        return _pair(">II", raw, 16)
    if raw.startswith((b"GIF87a", b"GIF89a")):
        return _pair("<HH", raw, 6)
    if raw.startswith(b"\xff\xd8\xff"):
        return _jpeg_size(raw)
    if raw.startswith(b"RIFF") and raw[8:12] == b"WEBP":
        return _webp_size(raw)
    return None


def _pair(layout: str, raw: bytes, offset: int) -> tuple[int, int]:
    if len(raw) < offset + struct.calcsize(layout):
        return 0, 0
    first, second = struct.unpack_from(layout, raw, offset)
    return first, second


def _jpeg_size(raw: bytes) -> tuple[int, int]:
    """Return width and height from the frame header, zeros if it is not among the first MAX_SEGMENTS."""
    offset = 2
    for _ in range(MAX_SEGMENTS):
        if offset + 4 > len(raw) or raw[offset] != 0xFF:
            break
        marker, length = raw[offset + 1], int.from_bytes(raw[offset + 2 : offset + 4])
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = _pair(">HH", raw, offset + 5)
            return width, height
        offset += 2 + max(2, length)
    return 0, 0


def _webp_size(raw: bytes) -> tuple[int, int]:
    kind = raw[12:16]
    if kind == b"VP8X" and len(raw) >= 30:
        return 1 + int.from_bytes(raw[24:27], "little"), 1 + int.from_bytes(raw[27:30], "little")
    if kind == b"VP8L" and len(raw) >= 25:
        bits = int.from_bytes(raw[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        width, height = _pair("<HH", raw, 26)
        return width & 0x3FFF, height & 0x3FFF
    return 0, 0
