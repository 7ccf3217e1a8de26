"""Lines of any order are read from two ends, so that a site has long prompts beside long answers."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batches.blend import PREFILL_SHARE, SPARE, Blend
from gateway.batches.files import Files
from gateway.batches.ledger import Ledger
from gateway.batches.order import prefill_heavy
from gateway.batches.pace import work_of
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


def start(blend: Blend, line: Line, left: Iterable[Line]) -> None:
    blend.started(line, sum(map(work_of, left)))


@pytest.mark.parametrize(("any_order", "heavy"), [(True, 0.5), (True, 0.0), (True, 1.0), (False, 0.5)])
def test_every_line_is_taken_once_and_both_kinds_run_while_there_are_both(
    tmp_path: Path, any_order: bool, heavy: float
) -> None:
    async def main() -> None:
        lines = some_lines(3 * PAGE_LINES, heavy)
        work, untaken = sum(map(work_of, lines)), {line.number: line for line in lines}
        ledger, rnd = await ledger_of(tmp_path, lines), random.Random(1)
        waiting, blend, taken, running = WaitingLines(any_order), Blend(), list[Line](), list[Line]()
        await waiting.refill(ledger, "batch_1")
        while waiting or running:
            await waiting.refill(ledger, "batch_1")
            while len(running) < AT_SITES and (end := waiting.next_end(blend, AT_SITES, 0)):
                running.append(end.popleft())
                taken.append(running[-1])
                untaken.pop(running[-1].number, None)
                blend.started(running[-1], work)
            if any_order and set(map(is_heavy, untaken.values())) == {True, False}:
                assert sum(map(is_heavy, running)) == PREFILL_SHARE * AT_SITES
            ended = [running.pop(rnd.randrange(len(running))) for _ in range(min(50, len(running)))]
            for line in ended:
                blend.ended(line.number)
            await ledger.write("batch_1", [Outcome(line.number, False, b"x") for line in ended])
        assert sorted(line.number for line in taken) == [line.number for line in lines]
        if not any_order:
            assert [line.number for line in taken] == [line.number for line in lines]

    asyncio.run(main())


@given(seed=st.integers(0, 1000), count=st.integers(1, 60), longest=st.integers(1, 9000))
def test_all_lines_end_with_the_longest_or_sites_are_full(seed: int, count: int, longest: int) -> None:
    """Sites run whatever they are sent, a token a turn; a line that ends is replaced at once."""
    rnd = random.Random(seed)
    lengths = [longest, *(rnd.randint(1, longest) for _ in range(count))]
    lines = [Line(at, at, "", 0, 1, 1, float(tokens)) for at, tokens in enumerate(lengths)]
    blend, waiting, at_sites = Blend(), deque(lines), rnd.randint(2, 20)
    left, ends, turn = {line.number: line for line in lines}, dict[int, float](), 0.0
    while left:
        while len(ends) < at_sites and (end := blend.next_end(waiting, deque(), at_sites, 0)):
            line = end.popleft()
            start(blend, line, left.values())
            ends[line.number] = turn + line.response_tokens
        number = min(ends, key=ends.__getitem__)
        turn = ends.pop(number)
        blend.ended(number)
        del left[number]
    assert turn <= max(longest, 1 + 2 * sum(lengths) / at_sites) + max(lengths[1:])


def test_few_lines_run_beside_one_that_is_much_longer_and_all_once_it_has_ended() -> None:
    blend, lines = Blend(), [Line(at, at, "", 0, 1, 1, 100.0) for at in range(100)]
    first = Line(100, 0, "", 0, 1, 1, 10_000.0)
    start(blend, first, [first, *lines])
    waiting = deque(lines)
    while end := blend.next_end(waiting, deque(), AT_SITES, 0):
        start(blend, end.popleft(), [first, *lines])
    assert 100 - len(waiting) == pytest.approx(SPARE * 2, abs=1)
    assert not blend.next_end(waiting, deque(), AT_SITES, 0)
    assert blend.next_end(waiting, deque(), AT_SITES, 3), "lines that wait for memory there keep none back"
    blend.ended(first.number)
    while end := blend.next_end(waiting, deque(), AT_SITES, 0):
        start(blend, end.popleft(), lines)
    assert not waiting


def test_lines_that_ended_before_a_restart_are_not_taken_again(tmp_path: Path) -> None:
    async def main() -> None:
        lines = some_lines(40, 0.5)
        ledger, waiting, taken = await ledger_of(tmp_path, lines), WaitingLines(any_order=True), set[int]()
        await ledger.write("batch_1", [Outcome(line.number, False, b"x") for line in lines[::2]])
        await waiting.refill(ledger, "batch_1")
        while waiting:
            taken.add(waiting.next_end(Blend(), AT_SITES, 0).popleft().number)
        assert taken == {line.number for line in lines[1::2]}

    asyncio.run(main())
