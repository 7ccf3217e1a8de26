"""Ends tasks that run beside others."""

from __future__ import annotations

import asyncio
from typing import Any

CANCEL_AGAIN_S = 5.0
"""A connection that breaks as its task is cancelled raises its own error instead: a task that goes on after
such an error is cancelled again.
"""


async def cancel(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks, those there are, and wait until all have ended, however they do."""
    live = {task for task in tasks if task is not None}
    while live:
        for task in live:
            task.cancel()
        ended, live = await asyncio.wait(live, timeout=CANCEL_AGAIN_S)
        for task in ended:
            if not task.cancelled():
                task.exception()  # which nobody else asks for


def is_cancelled() -> bool:
    """Return whether the current task was cancelled, also where an error hid that."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
