"""The gateway's check of a training file: the same however the file arrives, with its bad lines by number."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from functools import partial
from hashlib import sha256
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.side_work import SideWork
from gateway.tuning import validating
from gateway.tuning.validating import CheckedContent, check
from gateway.tuning.values import TuningLimits
from wire.training_rows import MAX_FAULTS

GOOD, BAD = b'{"prompt": "a", "completion": "b"}\n', b"{\n"


def checked(parts: Iterable[bytes]) -> CheckedContent:
    async def arriving() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return asyncio.run(check(arriving(), TuningLimits(), asyncio.to_thread))


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
        task = asyncio.create_task(check(parts(), TuningLimits(), asyncio.to_thread))
        await asyncio.to_thread(reading.wait, 10)
        task.cancel()
        await asyncio.wait([task])
        go_on.set()

    monkeypatch.setattr(validating, "read_row", read_slowly)
    asyncio.run(cancelled())  # it waits for its threads
    assert len(read) == 1


def test_lines_of_many_files_are_read_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many threads would take the interpreter from the event loop for its turn."""
    threads = set[int]()

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield GOOD * 3

    async def check_all() -> list[CheckedContent]:
        work = SideWork()
        runs = [partial(work.run, f"tenant {number % 3}") for number in range(9)]
        return await asyncio.gather(*(check(parts(), TuningLimits(), run) for run in runs))

    monkeypatch.setattr(validating, "read_row", lambda line: threads.add(threading.get_ident()))
    assert [found.rows for found in asyncio.run(check_all())] == [12] * 9
    assert len(threads) == 1


def test_a_file_without_lines_is_a_fault_of_the_file() -> None:
    assert [str(fault) for fault in checked([]).faults] == ["the file has no lines"]
