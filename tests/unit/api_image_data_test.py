"""What an image's URL must be, and the guess of its tokens."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai.image_data import (
    MAX_IMAGE_BYTES,
    MAX_SEGMENTS,
    MAX_TOKENS,
    MIN_TOKENS,
    PIECE_CHARS,
    UNSEEN_TOKENS,
    BadImage,
    guess_tokens,
    image_at,
    image_size,
)
from tests.support.server_abilities import data_url, png

EXIF = b"\xff\xe1\x01\x00" + bytes(254)
FRAME = b"\xff\xc2\x00\x11\x08" + struct.pack(">HH", 480, 640) + bytes(8)
JPEG = b"\xff\xd8" + EXIF + FRAME
VP8X = b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + (639).to_bytes(3, "little") + (479).to_bytes(3, "little")
VP8L = b"RIFF\0\0\0\0WEBPVP8L\0\0\0\0\x2f" + (639 | 479 << 14).to_bytes(4, "little")
VP8 = b"RIFF\0\0\0\0WEBPVP8 \0\0\0\0\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 640, 480)
GIF = b"GIF89a" + struct.pack("<HH", 640, 480)


@pytest.mark.parametrize("raw", [png(640, 480), JPEG, VP8X, VP8L, VP8, GIF])
def test_the_size_is_read_from_the_header_of_every_kind(raw: bytes) -> None:
    assert image_size(raw) == (640, 480)


def test_the_size_is_looked_for_among_so_many_segments_alone() -> None:
    """A million of empty ones took longer to look at than all the rest of a body."""
    empty = b"\xff\xe0\x00\x02"
    assert image_size(b"\xff\xd8" + empty * (MAX_SEGMENTS - 1) + FRAME) == (640, 480)
    assert image_size(b"\xff\xd8" + empty * MAX_SEGMENTS + FRAME) == (0, 0)


@given(st.sampled_from([png(64, 48)[:40], JPEG, VP8X, VP8L, VP8, GIF]), st.integers(0, 400), st.binary())
def test_no_bytes_are_too_broken_to_be_looked_at(raw: bytes, kept: int, more: bytes) -> None:
    size = image_size(raw[:kept] + more)
    assert size is None or MIN_TOKENS <= guess_tokens(*size) <= MAX_TOKENS


def test_tokens_grow_with_the_area_within_bounds() -> None:
    assert guess_tokens(640, 480) == 23 * 18
    assert guess_tokens(1, 1) == MIN_TOKENS
    assert guess_tokens(10_000, 10_000) == MAX_TOKENS
    assert guess_tokens(0, 0) == UNSEEN_TOKENS


@pytest.mark.parametrize("more", [0, 1, 2, 3, 4])
def test_an_image_of_several_pieces_is_read_whole(more: int) -> None:
    url = data_url(png(640, 480)[:33] + bytes(PIECE_CHARS + more))
    assert image_at(url).url == url
    with pytest.raises(BadImage, match="not valid base64"):
        image_at(url[:PIECE_CHARS] + "*" + url[PIECE_CHARS + 1 :])


def test_an_image_keeps_its_url() -> None:
    url = data_url(png(640, 480))
    assert image_at(url) == (url, 23 * 18, False, "")
    assert image_at("https://host/a.png") == ("https://host/a.png", UNSEEN_TOKENS, True, "")


def test_a_jpeg_may_be_named_by_the_end_of_its_file_and_reaches_the_site_by_its_right_type() -> None:
    assert image_at(data_url(JPEG, "image/jpg")).url == data_url(JPEG, "image/jpeg")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///etc/passwd", "must be a data URL"),
        ("a.png", "must be a data URL"),
        ("data:image/png;base64", "must be a data URL"),
        ("http://", "must be an address"),
        ("http://host/\n", "must be an address"),
        ("https://host/" + "x" * 9_000, "must be an address"),
        ("data:image/png,raw", "in base64"),
        (data_url(png(2, 2), "image/tiff"), "of a type among"),
        (data_url(png(2, 2), "text/html"), "of a type among"),
        (data_url(b"<html>"), "holds no image"),
        (data_url(b""), "holds no image"),
        ("data:image/png;base64,iVBO*w0KGgo=", "not valid base64"),
        ("data:image/png;base64,iVBO\nRw0KGgo=", "not valid base64"),
        ("data:image/png;base64,iVBORw0KGg", "not valid base64"),
        ("data:image/png;base64,ü", "not valid base64"),
        (data_url(bytes(PIECE_CHARS * 3 // 4 - 1)) + data_url(b"x").partition(",")[2], "padding before"),
        ("data:image/png;base64," + "A" * (MAX_IMAGE_BYTES * 4 // 3 + 8), "has more than"),
    ],
)
def test_what_is_no_image_is_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(BadImage, match=reason):
        image_at(url)
