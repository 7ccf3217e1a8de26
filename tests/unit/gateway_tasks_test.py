"""Tasks that are cancelled end, also where an error hides that from them."""

from __future__ import annotations

import asyncio

import pytest

from gateway import tasks


def test_a_task_that_goes_on_after_it_was_cancelled_is_cancelled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "CANCEL_AGAIN_S", 0.01)
    hidden = list[bool]()

    async def hides(times: int) -> None:
        for _ in range(times):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                hidden.append(tasks.is_cancelled())
        await asyncio.Event().wait()

    async def fails() -> None:
        raise OSError

    async def main() -> None:
        ended = [asyncio.create_task(each) for each in (hides(2), hides(0), fails())]
        await asyncio.sleep(0)
        assert not tasks.is_cancelled()
        async with asyncio.timeout(60):
            await tasks.cancel(*ended, None)
        assert all(task.done() for task in ended)

    asyncio.run(main())
    assert hidden == [True, True]
