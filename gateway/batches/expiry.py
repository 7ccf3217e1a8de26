"""Removes expired files and batches, in small steps; every replica does so, in any order."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from sqlalchemy.exc import SQLAlchemyError

from gateway.batches.files import Files
from gateway.batches.ledger import Ledger
from gateway.store.database import reason

log = logging.getLogger(__name__)

INTERVAL_S: Final = 600.0
PAGE: Final = 50


async def remove_expired(files: Files, ledger: Ledger, kept_s: float) -> int:
    """Remove what is too old and what a replica that died left behind.

    Returns the number of files and batches removed.
    """
    removed = 0
    for batch_id in await ledger.find_with_leftover_lines(PAGE):
        await ledger.remove_lines(batch_id)
    while expired := await files.find_expired(PAGE):
        for file_id in expired:
            await files.remove(file_id)
        removed += len(expired)
    while ended := await ledger.find_expired(kept_s, PAGE):
        for batch_id in ended:
            await ledger.remove(batch_id)
        removed += len(ended)
    return removed


async def expire_for_ever(files: Files, ledger: Ledger, kept_s: float) -> None:
    while True:
        try:
            if removed := await remove_expired(files, ledger, kept_s):
                log.info("removed %d files and batches that were too old", removed)
        except (SQLAlchemyError, OSError) as exc:
            log.warning("old files and batches stay for a while: %s", reason(exc))
        except Exception:
            log.exception("removing old files and batches went wrong in an unforeseen way")
        await asyncio.sleep(INTERVAL_S)
