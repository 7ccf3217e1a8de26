"""Lines of any order are read from two ends, so that a site has long prompts beside long answers."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from gateway.batches.files import Files
from gateway.batches.ledger import Ledger
from gateway.batches.order import PREFILL_SHARE, prefill_heavy
from gateway.batches.values import Batch, Line, Outcome
from gateway.batches.waiting import PAGE_LINES, WaitingLines
from gateway.store.database import open_engine
from migrations import upgrade

AT_SITES = 320


def is_heavy(line: Line) -> bool:
    return prefill_heavy(line.prompt_tokens, line.response_tokens)


async def ledger_of(folder: Path, lines: list[Line]) -> Ledger:
    url = f"sqlite:///{folder}/mico.db"
    upgrade(url)
    engine = open_engine(url)
    ledger = Ledger(engine, "one", lambda: 0.0, lease_s=1000.0)
    file = await (await Files(engine, lambda: 0.0).begin("t")).finish("in.jsonl", "batch", 1000.0)
    batch = Batch("batch_1", "t", "key", "/v1/completions", file.id, 0.0, 86_400.0, 60.0)
    await ledger.create(batch, 9)
    await ledger.lease(5)
    await ledger.add_lines("batch_1", lines)
    return ledger


def some_lines(count: int, heavy: float) -> list[Line]:
    rnd = random.Random(count)
    sizes = [(400, 4.0) if rnd.random() < heavy else (4, 400.0) for _ in range(count)]
    return [Line(at + 1, at, f"c-{at}", 0, 10, *size) for at, size in enumerate(sizes)]


@pytest.mark.parametrize(("any_order", "heavy"), [(True, 0.5), (True, 0.0), (True, 1.0), (False, 0.5)])
def test_every_line_is_taken_once_and_both_kinds_run_while_there_are_both(
    tmp_path: Path, any_order: bool, heavy: float
) -> None:
    async def main() -> None:
        lines = some_lines(3 * PAGE_LINES, heavy)
        ledger, rnd = await ledger_of(tmp_path, lines), random.Random(1)
        waiting, taken, running = WaitingLines(any_order), list[Line](), list[Line]()
        await waiting.refill(ledger, "batch_1")
        while waiting or running:
            await waiting.refill(ledger, "batch_1")
            while waiting and len(running) < AT_SITES:
                running.append(waiting.next_end(sum(map(is_heavy, running)), AT_SITES).popleft())
                taken.append(running[-1])
            left = [line for line in lines if line not in taken]
            if any_order and {is_heavy(line) for line in left} == {True, False}:
                assert sum(map(is_heavy, running)) == PREFILL_SHARE * AT_SITES
            ended = [running.pop(rnd.randrange(len(running))) for _ in range(min(50, len(running)))]
            await ledger.write("batch_1", [Outcome(line.number, False, b"x") for line in ended])
        assert sorted(line.number for line in taken) == [line.number for line in lines]
        if not any_order:
            assert [line.number for line in taken] == [line.number for line in lines]

    asyncio.run(main())


def test_lines_that_ended_before_a_restart_are_not_taken_again(tmp_path: Path) -> None:
    async def main() -> None:
        lines = some_lines(40, 0.5)
        ledger, waiting, taken = await ledger_of(tmp_path, lines), WaitingLines(any_order=True), set[int]()
        await ledger.write("batch_1", [Outcome(line.number, False, b"x") for line in lines[::2]])
        await waiting.refill(ledger, "batch_1")
        while waiting:
            taken.add(waiting.next_end(0, AT_SITES).popleft().number)
        assert taken == {line.number for line in lines[1::2]}

    asyncio.run(main())
