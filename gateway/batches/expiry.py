"""Files and batches go when their time is over, in small steps and by whichever replica comes first."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from sqlalchemy.exc import SQLAlchemyError

from gateway.batches.files import Files
from gateway.batches.ledger import Ledger
from gateway.store.database import reason

log = logging.getLogger(__name__)

ROUND_S: Final = 600.0
AT_ONCE: Final = 50


async def sweep(files: Files, ledger: Ledger, kept_s: float) -> int:
    """Removes what is too old and what a replica that died left behind. The number of files and batches."""
    removed = 0
    for batch_id in await ledger.with_leftovers(AT_ONCE):
        await ledger.remove_lines(batch_id)
    while old := await files.expired(AT_ONCE):
        for file_id in old:
            await files.remove(file_id)
        removed += len(old)
    while ended := await ledger.over(kept_s, AT_ONCE):
        for batch_id in ended:
            await ledger.remove(batch_id)
        removed += len(ended)
    return removed


async def sweep_for_ever(files: Files, ledger: Ledger, kept_s: float) -> None:
    while True:
        try:
            if removed := await sweep(files, ledger, kept_s):
                log.info("removed %d files and batches that were too old", removed)
        except (SQLAlchemyError, OSError) as exc:
            log.warning("old files and batches stay for a while: %s", reason(exc))
        except Exception:
            log.exception("removing old files and batches went wrong in an unforeseen way")
        await asyncio.sleep(ROUND_S)
