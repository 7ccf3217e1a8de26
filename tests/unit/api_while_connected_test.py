"""Work for a client ends by itself, at a disconnect or at its time limit, and always cleans up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.errors import DeadlinePassed
from gateway.http.disconnect import while_connected

BOTH = pytest.mark.parametrize("by_future", (False, True))


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


def attend(work: Work, *, by_future: bool, left: bool = False, within_s: float = 60.0) -> None:
    """Do the work for a client whose end a future tells, or else `receive`."""

    async def main() -> None:
        future = asyncio.get_running_loop().create_future() if by_future else None
        if future is not None and left:
            future.set_result(None)
        client = Client(left and not by_future)
        try:
            await while_connected(work.do(), client.receive, within_s=within_s, left=future)
        finally:
            assert work.wound_up
            assert future is None or not future.cancelled()  # the connection's next request needs it
            await asyncio.sleep(0)  # whoever watched the client is cancelled
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


@BOTH
def test_work_runs_to_its_end(by_future: bool) -> None:
    attend(Work(), by_future=by_future)


@BOTH
def test_what_work_raises_comes_out(by_future: bool) -> None:
    with pytest.raises(KeyError):
        attend(Work(error=KeyError("x")), by_future=by_future)


@BOTH
def test_work_is_cancelled_when_the_client_leaves(by_future: bool) -> None:
    attend(Work(endless=True), by_future=by_future, left=True)


@BOTH
def test_a_client_that_does_not_read_runs_out_of_time(by_future: bool) -> None:
    with pytest.raises(DeadlinePassed):
        attend(Work(endless=True), by_future=by_future, within_s=0.001)


def test_a_client_that_leaves_later_ends_no_work_that_is_done() -> None:
    async def main() -> None:
        left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await while_connected(Work().do(), Client().receive, within_s=60.0, left=left)
        left.set_result(None)
        await asyncio.sleep(0.0)
        await asyncio.sleep(0.0)

    asyncio.run(main())


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
