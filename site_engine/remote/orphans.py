"""Free the connections that httpcore forgets when a request is cancelled.

Its pool gives a connection to a request before that runs, and takes it back once the answer is closed. A
request that is cancelled before it sends, or while its answer is being closed, leaves the connection behind:
not idle, closed never, and counted for good. A pool full of these answers nothing any more.
"""

from __future__ import annotations

from typing import Any

from httpcore._async import connection_pool

_Pool: Any = connection_pool.AsyncConnectionPool
_Answer: Any = connection_pool.PoolByteStream
_assign = _Pool._assign_requests_to_connections
_close = _Answer.aclose


def _assign_without_orphans(pool: Any) -> list[Any]:
    """Take orphans out of the pool, then let it assign connections; return those to be closed."""
    used = {id(each.connection) for each in pool._requests}
    orphans = [each for each in pool._connections if id(each) not in used and _is_of_no_use(each)]
    for each in orphans:
        pool._connections.remove(each)
    return [*orphans, *_assign(pool)]


def _is_of_no_use(connection: Any) -> bool:
    return not (connection.is_idle() or connection.is_closed() or connection.is_available())


async def _close_or_leave(answer: Any) -> None:
    """Close an answer; if that is cancelled, make an orphan of its connection."""
    if answer._closed:
        return
    try:
        await _close(answer)
    finally:
        pool = answer._pool
        if answer._pool_request in pool._requests:
            pool._requests.remove(answer._pool_request)
            await pool._close_connections(_assign_without_orphans(pool))


def free() -> None:
    """Make the pools of httpcore free orphans. The version of httpcore is bounded in pyproject.toml."""
    _Pool._assign_requests_to_connections = _assign_without_orphans
    _Answer.aclose = _close_or_leave
