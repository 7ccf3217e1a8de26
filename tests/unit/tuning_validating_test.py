"""The gateway's check of a training file: the same however the file arrives, with its bad lines by number."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from hashlib import sha256
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tuning import validating
from gateway.tuning.validating import CheckedContent, check
from gateway.tuning.values import TuningLimits
from wire.training_rows import MAX_FAULTS

GOOD, BAD = b'{"prompt": "a", "completion": "b"}\n', b"{\n"


def checked(parts: Iterable[bytes]) -> CheckedContent:
    async def arriving() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return asyncio.run(check(arriving(), TuningLimits()))


@given(st.lists(st.sampled_from([GOOD, BAD]), max_size=8), st.lists(st.integers(0, 300), max_size=6))
def test_a_file_is_checked_alike_wherever_it_is_cut(lines: list[bytes], cuts: list[int]) -> None:
    content = b"".join(lines)
    ends = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    found = checked(content[begin:end] for begin, end in pairwise(ends))
    bad = [number for number, line in enumerate(lines, 1) if line == BAD]
    assert found.rows == len(lines) - len(bad)
    assert [fault.line for fault in found.faults] == (bad if lines else [0])
    assert (found.sha256, found.bytes) == (sha256(content).hexdigest(), len(content))


def test_bad_lines_are_named_up_to_fifty() -> None:
    found = checked([GOOD, BAD * 2 * MAX_FAULTS])
    assert found.rows == 1
    assert [fault.line for fault in found.faults] == list(range(2, 2 + MAX_FAULTS))
    assert str(found.faults[0]).startswith("line 2: is not JSON")


def test_a_check_that_is_cancelled_reads_no_further_line(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on, read = threading.Event(), threading.Event(), list[bytes]()

    def read_slowly(line: bytes) -> None:
        read.append(line)
        reading.set()
        go_on.wait(10)

    async def parts() -> AsyncIterator[bytes]:
        yield GOOD * 100

    async def cancelled() -> None:
        task = asyncio.create_task(check(parts(), TuningLimits()))
        await asyncio.to_thread(reading.wait, 10)
        task.cancel()
        await asyncio.wait([task])
        go_on.set()

    monkeypatch.setattr(validating, "read_row", read_slowly)
    asyncio.run(cancelled())  # it waits for its threads
    assert len(read) == 1


def test_a_file_without_lines_is_a_fault_of_the_file() -> None:
    assert [str(fault) for fault in checked([]).faults] == ["the file has no lines"]
