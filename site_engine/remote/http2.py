"""Reset HTTP/2 streams whose reader leaves, so that no server generates on for nobody.

httpcore only stops reading such a stream. Over HTTP/1.1 it closes the connection, which suffices.
"""

from __future__ import annotations

from contextlib import suppress

import httpcore
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from httpcore._async import http2

WRITE_S = 5.0
_Connection = http2.AsyncHTTP2Connection
_GONE = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, ProtocolError)


class _ResettingConnection(_Connection):
    async def _response_closed(self, stream_id: int) -> None:
        """Reset the stream, also of a request that was given up before its answer began."""
        with suppress(*_GONE):
            stream = self._h2_state.streams.get(stream_id)
            if stream is not None and not stream.closed:
                self._h2_state.reset_stream(stream_id, ErrorCodes.CANCEL)
                extensions = {"timeout": {"write": WRITE_S}}
                await self._write_outgoing_data(
                    httpcore.Request("POST", "https://left", extensions=extensions)
                )
        await super()._response_closed(stream_id)


def enable() -> bool:
    """Make httpcore reset streams; return False, and leave HTTP/2 off, with an httpcore made otherwise."""
    if not hasattr(_Connection, "_response_closed") or not hasattr(_Connection, "_write_outgoing_data"):
        return False
    http2.AsyncHTTP2Connection = _ResettingConnection  # type: ignore[misc]
    return True
