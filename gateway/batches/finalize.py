"""Ends a batch: writes its output and error files from the lines, then sets its last status.

If a replica dies in between, the next holder writes new files; the old ones were never visible and expire.
"""

from __future__ import annotations

from typing import Final

from gateway.batches.answer_line import unanswered_line
from gateway.batches.context import BatchContext
from gateway.batches.files import FileWriter
from gateway.batches.ledger import LeaseLost
from gateway.batches.usage import batch_usage, usage_of
from gateway.batches.values import Batch, BatchError, BatchStatus, File, Purpose
from gateway.domain import Usage
from gateway.openai.merge import merge_usages

_UNANSWERED: Final = {
    BatchStatus.CANCELLED: ("batch_cancelled", "The batch was cancelled before this line was answered."),
    BatchStatus.EXPIRED: ("batch_expired", "The batch expired before this line was answered."),
}


async def fail(batch: Batch, batch_errors: list[BatchError], context: BatchContext) -> None:
    """End a batch whose input file is invalid."""
    errors = [error._asdict() for error in batch_errors]
    now = context.unix_time()
    await context.ledger.change(
        batch.id, (BatchStatus.VALIDATING,), status=BatchStatus.FAILED, failed_at=now, errors=errors
    )


async def finalize(batch: Batch, context: BatchContext, *, cancelled: bool) -> None:
    """Write the result files and end the batch. Raises LeaseLost."""
    if not cancelled:
        open_statuses = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
        now = context.unix_time()
        status = BatchStatus.FINALIZING
        cancelled = not await context.ledger.change(batch.id, open_statuses, status=status, finalizing_at=now)
    unanswered = BatchStatus.CANCELLED if cancelled else BatchStatus.EXPIRED
    output, errors = _ResultFile(batch, context), _ResultFile(batch, context)
    try:
        missing, used = await _write_lines(batch, context, unanswered, output, errors)
        files = await output.complete("output"), await errors.complete("error")
    except BaseException:
        await _discard(output, errors)
        raise
    total = output.lines + errors.lines  # 0: the batch ended before it was read
    status = unanswered if cancelled or missing or not total else BatchStatus.COMPLETED
    ended = await context.ledger.end(  # if this fails, it may still have taken effect: the files stay
        batch.id,
        status,
        visible_files=[file for file in files if file is not None],
        output_file_id=files[0] and files[0].id,
        error_file_id=files[1] and files[1].id,
        total=total or batch.total,
        completed=output.lines,
        failed=errors.lines - missing,
        usage=batch_usage(used),
        at=context.unix_time(),
    )
    if not ended:
        await _discard(output, errors)
        raise LeaseLost(batch.id)
    await context.ledger.remove_lines(batch.id)


async def _discard(output: _ResultFile, errors: _ResultFile) -> None:
    await output.discard()
    await errors.discard()


async def _write_lines(
    batch: Batch, context: BatchContext, unanswered: BatchStatus, output: _ResultFile, errors: _ResultFile
) -> tuple[int, Usage]:
    """Write each line to one of the two files. Return the number without an outcome, and the usage."""
    missing, used = 0, Usage(0, 0)
    async for page in context.ledger.outcomes(batch.id):
        for number, custom_id, outcome in page:
            if outcome is None:
                missing += 1
                code, message = _UNANSWERED[unanswered]
                await errors.add(unanswered_line(custom_id, f"{batch.id}-{number}", code, message))
            elif outcome.failed:
                await errors.add(outcome.text)
            else:
                await output.add(outcome.text)
                used = merge_usages((used, usage_of(outcome.text)))
    return missing, used


class _ResultFile:
    """The output or the error file. It exists only if it has lines."""

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

    async def complete(self, name: str) -> File | None:
        if self._writer is None:
            return None
        filename = f"{self._batch.id}_{name}.jsonl"
        return await self._writer.complete(filename, Purpose.BATCH_OUTPUT, self._batch.output_kept_s)

    async def discard(self) -> None:
        if self._writer is not None:
            await self._writer.discard()
