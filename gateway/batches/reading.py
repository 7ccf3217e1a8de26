"""Reads the input file of a batch: its lines one after another, holding one, and what each asks for."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import AsyncIterator
from typing import Final, NamedTuple, TypeGuard

import msgspec

from gateway.batches.values import BatchLimits, Fault

JSON_WHITESPACE: Final = b" \t\r\n"


class Raw(NamedTuple):
    """The bytes of a line without its end; `begins` is where they lie in the file."""

    number: int
    begins: int
    data: bytes


class Wanted(NamedTuple):
    """One query of a batch as its line says it."""

    custom_id: str
    body: dict[str, object]


class BadLine(Exception):
    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


async def lines(parts: AsyncIterator[bytes], line_bytes: int) -> AsyncIterator[Raw]:
    """Every line that is not blank, counted from 1. Raises BadLine for one of more than `line_bytes`."""
    rest, number, begins = b"", 0, 0
    async for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        for data in whole:
            number += 1
            if data.strip(JSON_WHITESPACE):
                yield Raw(number, begins, _bounded(data, number, line_bytes))
            begins += len(data) + 1
        _bounded(rest, number + 1, line_bytes)
    if rest.strip(JSON_WHITESPACE):
        yield Raw(number + 1, begins, rest)


def read_line(raw: Raw, endpoint: str, limits: BatchLimits) -> Wanted:
    """Raises BadLine. What the body itself asks for is read when the line runs, as any query's.

    A file may begin with a byte-order mark, as those of some editors do.
    """
    entry = _entry(raw)
    custom_id, body = entry.get("custom_id"), entry.get("body")
    if not _is_name(custom_id, limits.custom_id_chars):
        said = f"a string of 1 to {limits.custom_id_chars} characters, NUL not among them"
        raise _bad(raw, "missing_required_parameter", f"'custom_id' must be {said}.", "custom_id")
    if entry.get("method") != "POST":
        raise _bad(raw, "invalid_method", "'method' must be \"POST\".", "method")
    if entry.get("url") != endpoint:
        raise _bad(raw, "invalid_url", f"'url' must be the endpoint of the batch, {endpoint!r}.", "url")
    if not isinstance(body, dict):
        raise _bad(raw, "missing_required_parameter", "'body' must be the JSON object of a request.", "body")
    if not _is_name(body.get("model"), limits.custom_id_chars):
        raise _bad(raw, "missing_required_parameter", "'body.model' must name a model.", "body.model")
    if body.get("stream"):
        raise _bad(raw, "unsupported_parameter", "A line of a batch can't be streamed.", "body.stream")
    return Wanted(custom_id, body)


def _is_name(value: object, most: int) -> TypeGuard[str]:
    """Short, and what every database can keep."""
    return isinstance(value, str) and 0 < len(value) <= most and "\0" not in value


def _entry(raw: Raw) -> dict[str, object]:
    try:
        entry = msgspec.json.decode(raw.data if raw.begins else raw.data.removeprefix(BOM_UTF8))
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:
        raise _bad(raw, "invalid_json_line", f"This line is not valid JSON: {str(exc)[:200]}.") from exc
    if not isinstance(entry, dict):
        raise _bad(raw, "invalid_json_line", "This line must be a JSON object.")
    return entry


def _bounded(data: bytes, number: int, line_bytes: int) -> bytes:
    if len(data) > line_bytes:
        message = f"This line is longer than the limit of {line_bytes} bytes."
        raise BadLine(Fault("line_too_long", message, number))
    return data


def _bad(raw: Raw, code: str, message: str, param: str | None = None) -> BadLine:
    return BadLine(Fault(code, message, raw.number, param))
