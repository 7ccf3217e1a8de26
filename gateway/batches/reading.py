"""Reads the input file of a batch: splits it into lines, one in memory at a time, and decodes each."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import AsyncIterator
from typing import Final, NamedTuple, TypeGuard

import msgspec

from gateway.batches.values import BatchError, BatchLimits
from gateway.bounded_json import DECODE_ERRORS
from wire.json_structure import MAX_STRUCTURE, exceeds

JSON_WHITESPACE: Final = b" \t\r\n"


class RawLine(NamedTuple):
    """The bytes of a line without its end; `begins` is their offset in the file."""

    number: int
    begins: int
    data: bytes


class LineRequest(NamedTuple):
    """The decoded line: one request of the batch."""

    custom_id: str
    body: dict[str, object]


class InvalidLine(Exception):
    def __init__(self, error: BatchError) -> None:
        super().__init__(error.message)
        self.error = error


async def split_lines(parts: AsyncIterator[bytes], line_bytes: int) -> AsyncIterator[RawLine]:
    """Yield every line that is not blank; numbers count from 1. Raises InvalidLine above `line_bytes`."""
    rest, number, begins = b"", 0, 0
    async for part in parts:
        *complete, rest = (rest + part).split(b"\n")
        for data in complete:
            number += 1
            if data.strip(JSON_WHITESPACE):
                yield RawLine(number, begins, _check_length(data, number, line_bytes))
            begins += len(data) + 1
        _check_length(rest, number + 1, line_bytes)
    if rest.strip(JSON_WHITESPACE):
        yield RawLine(number + 1, begins, rest)


def read_line(raw: RawLine, endpoint: str, limits: BatchLimits) -> LineRequest:
    """Decode a line. Raises InvalidLine. Does not read the body: the job does so when the line runs.

    A file may begin with a byte-order mark, as those of some editors do.
    """
    entry = _decode(raw)
    custom_id, body = entry.get("custom_id"), entry.get("body")
    if not _is_valid_name(custom_id, limits.custom_id_chars):
        rule = f"a string of 1 to {limits.custom_id_chars} characters, NUL not among them"
        raise _invalid(raw, "missing_required_parameter", f"'custom_id' must be {rule}.", "custom_id")
    if entry.get("method") != "POST":
        raise _invalid(raw, "invalid_method", "'method' must be \"POST\".", "method")
    if entry.get("url") != endpoint:
        raise _invalid(raw, "invalid_url", f"'url' must be the endpoint of the batch, {endpoint!r}.", "url")
    if not isinstance(body, dict):
        raise _invalid(
            raw, "missing_required_parameter", "'body' must be the JSON object of a request.", "body"
        )
    if not _is_valid_name(body.get("model"), limits.custom_id_chars):
        raise _invalid(raw, "missing_required_parameter", "'body.model' must name a model.", "body.model")
    if body.get("stream"):
        raise _invalid(raw, "unsupported_parameter", "A line of a batch can't be streamed.", "body.stream")
    return LineRequest(custom_id, body)


def _is_valid_name(value: object, max_chars: int) -> TypeGuard[str]:
    """Return whether `value` is a string that is not too long and that every database can store."""
    return isinstance(value, str) and 0 < len(value) <= max_chars and "\0" not in value


def _decode(raw: RawLine) -> dict[str, object]:
    if len(raw.data) > MAX_STRUCTURE and exceeds(raw.data, MAX_STRUCTURE):
        message = f"This line holds more than {MAX_STRUCTURE} objects, lists and fields."
        raise _invalid(raw, "invalid_json_line", message)
    try:
        entry = msgspec.json.decode(raw.data if raw.begins else raw.data.removeprefix(BOM_UTF8))
    except DECODE_ERRORS as exc:
        raise _invalid(raw, "invalid_json_line", f"This line is not valid JSON: {str(exc)[:200]}.") from exc
    if not isinstance(entry, dict):
        raise _invalid(raw, "invalid_json_line", "This line must be a JSON object.")
    return entry


def _check_length(data: bytes, number: int, line_bytes: int) -> bytes:
    if len(data) > line_bytes:
        message = f"This line is longer than the limit of {line_bytes} bytes."
        raise InvalidLine(BatchError("line_too_long", message, number))
    return data


def _invalid(raw: RawLine, code: str, message: str, param: str | None = None) -> InvalidLine:
    return InvalidLine(BatchError(code, message, raw.number, param))
