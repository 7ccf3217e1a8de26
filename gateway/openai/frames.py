"""Encodes JSON as one frame of server-sent events, or as one line of a JSON Lines file."""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"


def frame(body: bytes) -> bytes:
    return b"data: " + one_line(body) + b"\n\n"


def named_frame(name: str, body: bytes) -> bytes:
    """Return a frame of a named event."""
    return b"event: " + name.encode() + b"\ndata: " + one_line(body) + b"\n\n"


def one_line(body: bytes) -> bytes:
    """Escape the characters of a JSON `body` that many clients treat as line ends: U+0085, U+2028, U+2029."""
    if body.isascii():
        return body
    body = body.replace(b"\xc2\x85", b"\\u0085")
    return body.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
