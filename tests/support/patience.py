"""Clients that ask again where the reports of all sites that could answer are late.

A site is not asked anything more than 3 s after its last report, and a busy machine stalls for longer. What
else a gateway refuses is not asked again.
"""

from __future__ import annotations

import threading
import time
from typing import Any, TypeVar

LATE = b": load report "
WITHIN_S = 120.0
PAUSE_S = 0.25
Client = TypeVar("Client")


def patient(client: Client) -> Client:
    """Return the client of httpx, or of httpx2, which SDKs have, with a transport that asks again."""
    inner: Any = client
    inner._transport = Patience(inner._transport)
    return client


class Patience:
    """A transport before another one."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def handle_request(self, request: Any) -> Any:
        pause, until_s = threading.Event(), time.monotonic() + WITHIN_S
        while True:
            response = self._transport.handle_request(request)
            if response.status_code != 503 or LATE not in response.read() or time.monotonic() > until_s:
                return response
            pause.wait(PAUSE_S)

    def __enter__(self) -> Patience:
        self._transport.__enter__()
        return self

    def __exit__(self, *ended: Any) -> None:
        self._transport.__exit__(*ended)

    def close(self) -> None:
        self._transport.close()
