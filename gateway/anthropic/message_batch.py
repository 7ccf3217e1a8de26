"""Translates Anthropic's Message Batches: requests to the lines of a batch, lines of its files to results."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from gateway.openai.fields import UNSUPPORTED, Fields, echo
from gateway.openai.frames import one_line

MAX_REQUESTS: Final = 8_000
MAX_MODEL_CHARS: Final = 512
CUSTOM_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


def read_batch_requests(fields: Fields, url: str) -> list[bytes]:
    """Return the requests as lines of a batch's input file, each a request to `url`.

    Checks what concerns all requests, such as unique ids and one model. The other fields of each message are
    read when it runs.
    """
    if fields.required("requests") is None:
        return []
    items = fields.items("requests")
    if fields.raw("requests") == [] or len(items) > MAX_REQUESTS:
        fields.refuse("requests", f"holds 1 to {MAX_REQUESTS} requests, got {len(items)}")
        return []
    lines, custom_ids, models = list[bytes](), set[str](), set[str]()
    for request in fields.objects("requests", items):
        custom_id = _custom_id(request, custom_ids)
        params = request.required("params")
        if params is not None and (message := request.child("params")) is not None:
            _check_params(message, models)
        line = {"custom_id": custom_id, "method": "POST", "url": url, "body": params}
        lines.append(msgspec.json.encode(line) + b"\n")
    return lines


def _custom_id(request: Fields, earlier: set[str]) -> str:
    custom_id = request.required_text("custom_id")
    if custom_id in earlier:
        request.refuse("custom_id", f"is {echo(custom_id)}, as that of an earlier request")
    elif custom_id and not CUSTOM_ID.fullmatch(custom_id):
        request.refuse("custom_id", "has 1 to 64 letters, digits, underscores and dashes")
    earlier.add(custom_id)
    return custom_id


def _check_params(message: Fields, models: set[str]) -> None:
    model = message.required_text("model")
    if len(model) > MAX_MODEL_CHARS or "\0" in model:
        message.refuse("model", f"has at most {MAX_MODEL_CHARS} characters, NUL not among them")
    models.add(model)
    if len(models) > 1:
        message.refuse("model", f"is {echo(model)}, not that of the first request: a batch asks one model")
    if message.flag("stream"):
        message.refuse("stream", "can't be true in a batch", UNSUPPORTED)


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response | None = None


_LINES: Final = msgspec.json.Decoder(_Line)


def result_line(line: bytes, unanswered: str) -> bytes:
    """Return the result for a line of a batch's output, error or input file. A line without a response, such
    as each of the input file, did not run; the type of its result is `unanswered`.
    """
    read = _LINES.decode(line)
    result: dict[str, object] = {"type": unanswered}
    if read.response is not None and read.response.status_code == 200:
        result = {"type": "succeeded", "message": read.response.body}
    elif read.response is not None:
        result = {"type": "errored", "error": read.response.body}
    return one_line(msgspec.json.encode({"custom_id": read.custom_id, "result": result})) + b"\n"
