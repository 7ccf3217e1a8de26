"""Cancels background tasks."""

from __future__ import annotations

import asyncio
from typing import Any

CANCEL_AGAIN_S = 5.0
"""Seconds after which a task that still runs is cancelled again. A connection that breaks during the
cancellation raises its own error instead of CancelledError, and the task may continue after that.
"""


async def cancel(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait until all have ended. Skips None, and ignores the tasks' errors."""
    live = {task for task in tasks if task is not None}
    while live:
        for task in live:
            task.cancel()
        ended, live = await asyncio.wait(live, timeout=CANCEL_AGAIN_S)
        for task in ended:
            if not task.cancelled():
                task.exception()  # mark as retrieved


def is_cancelled() -> bool:
    """Return whether the current task was cancelled, even if another error replaced CancelledError."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
