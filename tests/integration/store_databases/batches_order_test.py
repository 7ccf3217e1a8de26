"""The order of a batch's lines: the client's choice, what begins alike, and no wait for other queries."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from gateway.batches import validate
from gateway.batches.values import Line, Order
from tests.support.batch_replica import chat_line, jsonl, replica


def test_the_lines_of_a_batch_are_put_in_order_beside_the_event_loop(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of 50,000 lines takes a third of a second."""
    real, threads = validate.order, list[threading.Thread]()

    def seen(lines: Sequence[Line], how: Order) -> list[int]:
        threads.append(threading.current_thread())
        return real(lines, how)

    monkeypatch.setattr(validate, "order", seen)

    async def main() -> None:
        async with replica(url) as here:
            done = await here.ended(await here.submit(jsonl(*(chat_line(number) for number in range(3)))))
            assert done.status == "completed"

    asyncio.run(main())
    assert threads and threading.main_thread() not in threads


def test_the_order_that_the_client_names_and_the_lines_that_begin_alike_are_known(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, found = validate.order, list[tuple[Order, list[Line]]]()

    def seen(lines: Sequence[Line], how: Order) -> list[int]:
        found.append((how, list(lines)))
        return real(lines, how)

    monkeypatch.setattr(validate, "order", seen)
    one, other = "to be, or not to be " * 40, "that is the question " * 40
    texts = [one + "who?", other + "who?", one + "when?"]
    lines = [
        chat_line(number, messages=[{"role": "user", "content": text}]) for number, text in enumerate(texts)
    ]

    async def main() -> None:
        async with replica(url) as here:
            for chosen in ({}, {"metadata": {"mico_order": "prefix"}}):
                submitted = await here.submit(jsonl(*lines), **chosen)
                assert (await here.ended(submitted)).status == "completed"

    asyncio.run(main())
    assert [how for how, _ in found] == [Order.BLEND, Order.PREFIX]
    for _, ordered in found:
        assert [line.group for line in ordered] == [1, 2, 1]
        assert all(line.shared_tokens > 0.6 * line.prompt_tokens for line in ordered[::2])
        assert ordered[1].shared_tokens < 0.1 * ordered[1].prompt_tokens
