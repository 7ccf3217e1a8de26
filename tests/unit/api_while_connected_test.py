"""Work for a client ends by itself, at a disconnect or at its time limit, and always cleans up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.errors import DeadlinePassed
from gateway.http.disconnect import while_connected


class Client:
    """A client whose `receive` reports a disconnect when the test says so."""

    def __init__(self, left: bool = False) -> None:
        self._left = asyncio.Event()
        if left:
            self._left.set()

    async def receive(self) -> Any:
        await self._left.wait()
        return {"type": "http.disconnect"}


class Work:
    def __init__(self, error: Exception | None = None, endless: bool = False) -> None:
        self.error, self.endless = error, endless
        self.wound_up = False

    async def do(self) -> None:
        try:
            if self.endless:
                await asyncio.Event().wait()
            if self.error:
                raise self.error
        finally:
            await asyncio.sleep(0)
            self.wound_up = True


def attend(work: Work, *, left: bool = False, within_s: float = 60.0) -> None:
    async def main() -> None:
        try:
            await while_connected(work.do(), Client(left).receive, within_s=within_s)
        finally:
            assert work.wound_up
            await asyncio.sleep(0)  # whoever watched the client is cancelled
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_work_runs_to_its_end() -> None:
    attend(Work())


def test_what_work_raises_comes_out() -> None:
    with pytest.raises(KeyError):
        attend(Work(error=KeyError("x")))


def test_work_is_cancelled_when_the_client_leaves() -> None:
    attend(Work(endless=True), left=True)


def test_a_client_that_does_not_read_runs_out_of_time() -> None:
    with pytest.raises(DeadlinePassed):
        attend(Work(endless=True), within_s=0.001)


def test_cancelling_from_outside_winds_up_too() -> None:
    work = Work(endless=True)

    async def main() -> None:
        attending = asyncio.create_task(while_connected(work.do(), Client().receive, within_s=60.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        attending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attending

    asyncio.run(main())
    assert work.wound_up
