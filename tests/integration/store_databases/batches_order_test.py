"""The order of a batch's lines: the client's choice, what begins alike, and no wait for other queries."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from gateway.batches import line_table
from gateway.batches.order import Integers, LineSizes
from gateway.batches.pace import FIRST_PRIORITY
from gateway.batches.values import WINDOW_S, Order
from tests.support.batch_replica import POLL_S, Replica, asked_at_least, chat_line, jsonl, replica


def test_the_lines_of_a_batch_are_put_in_order_beside_the_event_loop(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of 50,000 lines takes a tenth of a second."""
    real, threads = line_table.order, list[threading.Thread]()

    def seen(sizes: LineSizes, how: Order, at_once: int) -> Integers:
        threads.append(threading.current_thread())
        return real(sizes, how, at_once)

    monkeypatch.setattr(line_table, "order", seen)

    async def main() -> None:
        async with replica(url) as here:
            done = await here.ended(await here.submit(jsonl(*(chat_line(number) for number in range(3)))))
            assert done.status == "completed"

    asyncio.run(main())
    assert threads and threading.main_thread() not in threads


def test_the_order_that_the_client_names_and_the_lines_that_begin_alike_are_known(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, found = line_table.order, list[tuple[Order, LineSizes]]()

    def seen(sizes: LineSizes, how: Order, at_once: int) -> Integers:
        found.append((how, sizes))
        return real(sizes, how, at_once)

    monkeypatch.setattr(line_table, "order", seen)
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
    for _, sizes in found:
        assert sizes.group.tolist() == [1, 2, 1]
        shares = sizes.shared_tokens / sizes.prompt_tokens
        assert shares[[0, 2]].min() > 0.6 and shares[1] < 0.1


def test_sites_know_which_lines_may_overtake_others_and_which_have_long_prompts(url: str) -> None:
    long = {"messages": [{"role": "user", "content": "to be, or not to be " * 400}], "max_tokens": 5}
    lines = [chat_line(1), chat_line(2, **long)]

    async def main() -> None:
        async with replica(url) as here:
            for chosen in ("blend", "longest"):
                submitted = await here.submit(jsonl(*lines), metadata={"mico_order": chosen})
                assert (await here.ended(submitted)).status == "completed"
            flags = sorted((assign.any_order, assign.prefill_heavy) for assign in here.assigned)
            assert flags == [(False, False), (False, False), (True, False), (True, True)]

    asyncio.run(main())


def test_a_batch_says_what_its_lines_share_how_many_run_and_when_it_ends(url: str) -> None:
    one = "to be, or not to be " * 40
    lines = [
        chat_line(number, messages=[{"role": "user", "content": f"{one if number % 2 else number} who?"}])
        for number in range(100)
    ]

    async def seen(here: Replica, batch_id: str, name: str) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while True:
                said: dict[str, Any] = (await here.raw("GET", f"/v1/batches/{batch_id}")).json()
                if name in said["mico"]:
                    return said
                await asyncio.sleep(POLL_S)

    async def main() -> None:
        async with replica(url) as here:
            here.open.clear()
            batch_id = await here.submit(jsonl(*lines))
            said = await seen(here, batch_id, "in_flight")
            assert (said["mico"]["order"], said["mico"]["groups"]) == ("blend", 1)
            assert 0.8 < said["mico"]["shared_prompt_share"] < 1.0
            assert said["mico"]["expected_tokens"] > 0
            here.open.set()
            await asked_at_least(here, 40)
            here.open.clear()
            said = await seen(here, batch_id, "ends_at")
            assert said["created_at"] <= said["mico"]["ends_at"] <= said["expires_at"]
            assert 0 < said["mico"]["in_flight"] <= 24
            (of_all,) = (await here.raw("GET", "/admin/api/batches", "boss")).json()["data"]
            assert of_all["mico"].keys() == said["mico"].keys()
            here.open.set()
            assert (await here.ended(batch_id)).status == "completed"
            said = (await here.raw("GET", f"/v1/batches/{batch_id}")).json()
            assert said["mico"].keys() == {"order", "groups", "shared_prompt_share", "expected_tokens"}

    asyncio.run(main())


def test_a_batch_that_would_end_too_late_goes_before_others(url: str) -> None:
    """In the gateway none of their lines start before all of its own; at a site its own start first."""

    async def main() -> None:
        async with replica(url) as here:
            here.open.clear()
            late = await here.submit(jsonl(*(chat_line(number) for number in range(40))))
            await asked_at_least(here, 2)
            here.pass_time(0.85 * WINDOW_S)
            on_time = await here.submit(jsonl(*(chat_line(number) for number in range(100, 110))))
            await here.reached(on_time, "in_progress")
            here.open.set()
            for batch_id in (late, on_time):
                assert (await here.ended(batch_id)).status == "completed"
            of_late = [int(prompt.split()[1]) < 100 for prompt in here.asked]
            assert all(of_late[:30])  # all others but those that are on their way to sites
            priorities = [assign.priority for assign in here.assigned]
            first = [priority == FIRST_PRIORITY for priority in priorities]
            assert first[12:] == of_late[12:]  # the lines before had started when it was not late yet

    asyncio.run(main())
