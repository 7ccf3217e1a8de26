"""Ask a server whose answers fail for the plainest: only a broken server gives none."""

from __future__ import annotations

import json
from typing import Any

from site_engine.errors import Reason
from site_engine.remote.request import HttpRequest
from site_engine.remote.server import Server, ServerLost, ServerRefused, refused_in_stream
from site_engine.remote.stream import FailedStream, MalformedStream, ResponseStream

_KEPT = ("model", "stream", "encoding_format")
_PLAIN: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "prompt": "Hi",
    "input": ["Hi"],
    "query": "Hi",
    "documents": ["Hi"],
    "texts": ["Hi"],
}


async def serves(server: Server, like: HttpRequest) -> bool:
    """Return whether a server answers a plain request, or refuses it as one that works does."""
    try:
        await _ask(server, plain_request(like))
    except ServerRefused as refused:
        return refused.refusal.reason is not Reason.INTERNAL
    except FailedStream as failed:
        return refused_in_stream(failed.error) is not None
    except (ServerLost, MalformedStream):
        return False
    return True


def plain_request(like: HttpRequest) -> HttpRequest:
    """Return the plainest request of the same kind, to the same model."""
    body = {name: like.body[name] for name in _KEPT if name in like.body}
    body |= {name: value for name, value in _PLAIN.items() if name in like.body}
    if like.pooling is None:
        body["max_tokens"] = 1
    return HttpRequest(like.path, body, pooling=like.pooling)


async def _ask(server: Server, request: HttpRequest) -> None:
    """Wait for a whole answer. Raises ServerRefused, ServerLost or MalformedStream if none comes."""
    async with server.stream(request) as received:
        data = b"".join([part async for part in received])
    if request.pooling is None:
        stream = ResponseStream(["plain"])
        stream.feed(data)
        stream.end()
        return
    try:
        json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise MalformedStream("what the server answers is no JSON") from exc
