"""How a batch ends: its output and error files are written from the lines, then it is said to be over.

Whoever takes over from a replica that died in between writes new files; nobody ever sees the old ones, and
they expire.
"""

from __future__ import annotations

from typing import Final

from gateway.batches.answer_line import never_ran
from gateway.batches.context import BatchContext
from gateway.batches.files import FileWriter
from gateway.batches.ledger import LeaseLost
from gateway.batches.values import Batch, BatchStatus, Fault, File, Purpose

_NEVER_RAN: Final = {
    BatchStatus.CANCELLED: ("batch_cancelled", "The batch was cancelled before this line was answered."),
    BatchStatus.EXPIRED: ("batch_expired", "The batch expired before this line was answered."),
}


async def refuse(batch: Batch, faults: list[Fault], context: BatchContext) -> None:
    """The input file is no batch."""
    errors = [fault._asdict() for fault in faults]
    now = context.unix_time()
    await context.ledger.change(
        batch.id, (BatchStatus.VALIDATING,), status=BatchStatus.FAILED, failed_at=now, errors=errors
    )


async def close(batch: Batch, context: BatchContext, *, cancelled: bool) -> None:
    """Raises LeaseLost."""
    if not cancelled:
        going = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
        now = context.unix_time()
        status = BatchStatus.FINALIZING
        cancelled = not await context.ledger.change(batch.id, going, status=status, finalizing_at=now)
    unanswered = BatchStatus.CANCELLED if cancelled else BatchStatus.EXPIRED
    output, errors = _Side(batch, context), _Side(batch, context)
    try:
        missing = await _sort(batch, context, unanswered, output, errors)
        files = await output.end("output"), await errors.end("error")
    except BaseException:
        await _discard(output, errors)
        raise
    never_began = not batch.total
    status = unanswered if cancelled or missing or never_began else BatchStatus.COMPLETED
    ended = await context.ledger.end(  # if this breaks off, it may have taken effect: the files stay
        batch.id,
        status,
        shown=[file for file in files if file is not None],
        output_file_id=files[0] and files[0].id,
        error_file_id=files[1] and files[1].id,
        total=output.lines + errors.lines,  # one that was cancelled while it was read has none yet
        completed=output.lines,
        failed=errors.lines,
        at=context.unix_time(),
    )
    if not ended:
        await _discard(output, errors)
        raise LeaseLost(batch.id)
    await context.ledger.remove_lines(batch.id)


async def _discard(output: _Side, errors: _Side) -> None:
    await output.discard()
    await errors.discard()


async def _sort(
    batch: Batch, context: BatchContext, unanswered: BatchStatus, output: _Side, errors: _Side
) -> int:
    """Each line goes to one of the two files; returns how many have no outcome."""
    missing = 0
    async for page in context.ledger.outcomes(batch.id):
        for number, custom_id, outcome in page:
            if outcome is None:
                missing += 1
                code, message = _NEVER_RAN[unanswered]
                await errors.add(never_ran(custom_id, f"{batch.id}-{number}", code, message))
            else:
                await (errors if outcome.failed else output).add(outcome.text)
    return missing


class _Side:
    """One of the two files, which is there only if it has lines."""

    def __init__(self, batch: Batch, context: BatchContext) -> None:
        self._batch = batch
        self._context = context
        self._writer: FileWriter | None = None
        self.lines = 0

    async def add(self, line: bytes) -> None:
        if self._writer is None:
            self._writer = await self._context.files.begin(self._batch.tenant)
        await self._writer.write(line)
        self.lines += 1

    async def end(self, name: str) -> File | None:
        if self._writer is None:
            return None
        filename = f"{self._batch.id}_{name}.jsonl"
        return await self._writer.end(filename, Purpose.BATCH_OUTPUT, self._batch.output_kept_s)

    async def discard(self) -> None:
        if self._writer is not None:
            await self._writer.discard()
