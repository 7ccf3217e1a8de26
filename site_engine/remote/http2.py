"""HTTP/2 whose streams are reset when their reader leaves, so that no server generates on for nobody.

httpcore only stops reading such a stream: over HTTP/1.1, where it closes the connection, that says enough.
"""

from __future__ import annotations

from contextlib import suppress

import httpcore
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from httpcore._async import http2

WRITE_S = 5.0
_AS_IT_IS = http2.AsyncHTTP2Connection
_GONE = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, ProtocolError)


class _Resetting(_AS_IT_IS):
    async def _response_closed(self, stream_id: int) -> None:
        """Also of a request that was given up before its answer began."""
        with suppress(*_GONE):
            stream = self._h2_state.streams.get(stream_id)
            if stream is not None and not stream.closed:
                self._h2_state.reset_stream(stream_id, ErrorCodes.CANCEL)
                patience = {"timeout": {"write": WRITE_S}}
                await self._write_outgoing_data(httpcore.Request("POST", "https://left", extensions=patience))
        await super()._response_closed(stream_id)


def offered() -> bool:
    """Whether HTTP/2 may be spoken, its streams reset from now on: not with an httpcore made otherwise."""
    if not hasattr(_AS_IT_IS, "_response_closed") or not hasattr(_AS_IT_IS, "_write_outgoing_data"):
        return False
    http2.AsyncHTTP2Connection = _Resetting  # type: ignore[misc]
    return True
