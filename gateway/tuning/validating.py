"""Checks the files of a job line by line, and takes their digests."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import NamedTuple

from gateway.tuning.values import TuningLimits
from wire.training_rows import MAX_FAULTS, MAX_LINE_BYTES, BadRow, Fault, read_row


class CheckedContent(NamedTuple):
    """The number of good rows, the faults of the others, and the digest of the whole, hexadecimal."""

    rows: int
    faults: tuple[Fault, ...]
    sha256: str
    bytes: int


Beside = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs a function beside the event loop."""


async def check(parts: AsyncIterator[bytes], limits: TuningLimits, beside: Beside) -> CheckedContent:
    """Read a file to its end, or to the last fault that is named. Holds one part and one line in memory.

    `beside` reads the lines of a part. Once the check is cancelled, no further line is read.
    """
    lines = _Lines()
    try:
        return await _check(parts, limits, lines, beside)
    finally:
        lines.stopped = True


async def _check(
    parts: AsyncIterator[bytes], limits: TuningLimits, lines: _Lines, beside: Beside
) -> CheckedContent:
    digest, size, rest = hashlib.sha256(), 0, b""
    async for part in parts:
        digest.update(part)
        size += len(part)
        *complete, rest = (rest + part).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:  # its fault is named now: it may be the rest of the file
            complete, rest = [*complete, rest], b""
            await beside(partial(lines.read, complete))
            break
        if complete:
            await beside(partial(lines.read, complete))
        if len(lines.faults) >= MAX_FAULTS or lines.rows > limits.rows:
            break
    if rest:
        await beside(partial(lines.read, [rest]))
    if lines.rows > limits.rows:
        lines.faults.append(Fault(0, f"the file has more than {limits.rows:,} rows"))
    if not lines.rows and not lines.faults:
        lines.faults.append(Fault(0, "the file has no lines"))
    return CheckedContent(lines.rows, tuple(lines.faults[:MAX_FAULTS]), digest.hexdigest(), size)


class _Lines:
    """What was read so far. Its thread reads no more lines once it is `stopped`."""

    def __init__(self) -> None:
        self.number = self.rows = 0
        self.faults: list[Fault] = []
        self.stopped = False

    def read(self, lines: list[bytes]) -> None:
        for line in lines:
            if self.stopped:
                return
            self.number += 1
            try:
                read_row(line)
            except BadRow as bad:
                self.faults.append(Fault(self.number, str(bad)))
                if len(self.faults) >= MAX_FAULTS:
                    return
            else:
                self.rows += 1
