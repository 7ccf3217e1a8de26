"""What failed becomes a response: the log line of what nobody expected, then the error in OpenAI's shape."""

from __future__ import annotations

import logging

from litestar.types import Send

from gateway.http.exchange import Exchange
from gateway.openai.error_body import Problem, is_unexpected, translate

log = logging.getLogger(__name__)


def problem_of(exc: Exception, exchange: Exchange) -> Problem:
    if is_unexpected(exc):
        log.error("request %s failed", exchange.request_id, exc_info=exc)
    return translate(exc, exchange.request_id)


async def refuse(exc: Exception, exchange: Exchange, send: Send) -> None:
    """Raises it again once a status was sent: then only a cut connection can tell of it."""
    problem = problem_of(exc, exchange)
    if exchange.status:
        raise exc
    body = problem.body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *problem.headers,
    ]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
