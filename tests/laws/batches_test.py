"""Laws of batches that need no gateway: order, capacity, assignment, lines of a file, leases."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.batches.capacity import (
    MAX_AT_ONCE,
    Sharing,
    SiteCapacity,
    assign_sites,
    available,
    fair_share,
    lines_at_once,
    lines_of_batch,
)
from gateway.batches.expiry import remove_expired
from gateway.batches.files import Files, Page
from gateway.batches.job import Job, Retry
from gateway.batches.ledger import LeaseLost, Ledger
from gateway.batches.order import order
from gateway.batches.pace import LEARN_S, Progress, is_late
from gateway.batches.reading import InvalidLine, split_lines
from gateway.batches.values import Batch, BatchLimits, BatchStatus, Line, Order, Outcome
from gateway.domain import Credit, LoadReport, Model, Site, SiteIdentity, SiteState
from gateway.store.database import open_engine
from migrations import upgrade
from tests.support.line_sizes import sizes_of


def line(number: int, tokens: float = 1.0, place: int = 0) -> Line:
    return Line(number, place, f"c-{number}", 0, 10, 5, tokens)


def site(name: str, *, slots: int = 8, running: int = 0, engine: str = "native", assigned: int = 0) -> Site:
    models = {"m": Model("m", "r", 1024, 0, "mico")}
    identity = SiteIdentity(name, "boot", "aws", "here", models, slots, 10_000, engine=engine)
    load = LoadReport(1, 0.0, running=running, token_load=10.0 * running)
    return Site(identity, SiteState.READY, load, Credit(requests=assigned))


@given(st.lists(st.floats(0, 1e6)))
def test_an_order_names_every_line_once_longest_first(tokens: list[float]) -> None:
    sizes = sizes_of([line(number, each) for number, each in enumerate(tokens)])
    turns = order(sizes, Order.LONGEST).tolist()
    assert sorted(turns) == list(range(len(tokens)))
    ordered = [tokens[index] for index in turns]
    assert ordered == sorted(tokens, reverse=True)


sites = st.lists(
    st.tuples(
        st.integers(1, 64), st.integers(0, 80), st.sampled_from(["native", "openai"]), st.integers(0, 5)
    ),
    max_size=8,
)


@given(sites, st.integers(0, 20))
def test_no_site_is_given_more_than_it_has_room_for(
    drawn: list[tuple[int, int, str, int]], starting: int
) -> None:
    found = [
        site(str(number), slots=slots, running=running, engine=engine, assigned=assigned)
        for number, (slots, running, engine, assigned) in enumerate(drawn)
    ]
    free = available(found, "m", {"0": starting}, 0.0)
    for each, count in free:
        held = each.load.running + each.credit.requests + (starting if each.name == "0" else 0)
        slots = each.identity.slots
        assert count > 0
        most = slots + max(1, slots // 4) if each.identity.engine == "native" else max(1, slots - 1)
        assert held + count <= most
    total = sum(count for _, count in free)
    assert total == 0 or 1 <= fair_share(free, 3) <= total


@given(
    st.lists(st.just(0.0) | st.floats(1, 4000), min_size=1, max_size=60),
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
)
def test_a_window_goes_to_the_sites_by_what_they_have_free(lengths: list[float], spare: list[int]) -> None:
    free = [SiteCapacity(site(str(number)), count) for number, count in enumerate(spare)]
    chosen = assign_sites(lengths, free)
    assert len(chosen) == len(lengths)
    assert set(chosen) <= {each.name for each, _ in free}


def test_lines_of_which_nothing_is_expected_are_spread_too() -> None:
    # such a line's body will be refused, where a client's would
    assert assign_sites([0.0], [SiteCapacity(site("a"), 8)]) == ["a"]


def test_a_full_window_fills_every_site_and_none_beyond_a_line_or_two() -> None:
    free = [SiteCapacity(site(name), lines) for name, lines in (("a", 8), ("b", 4), ("c", 2))]
    counts = Counter(assign_sites([float(length) for length in range(14)], free))
    assert sum(counts.values()) == 14
    assert abs(counts["a"] - 8) <= 2 and abs(counts["b"] - 4) <= 2 and abs(counts["c"] - 2) <= 2


class Due(float):
    """The time when a line may run again. Counts the comparisons."""

    looks = 0

    def __radd__(self, now_s: float) -> Due:
        return Due(now_s + float(self))

    def __le__(self, now_s: float) -> bool:
        Due.looks += 1
        return super().__le__(now_s)


def test_lines_that_wait_to_run_again_cost_the_others_nothing_and_come_as_they_are_due() -> None:
    now_s = 0.0
    context: Any = SimpleNamespace(clock=lambda: now_s)
    job = Job(batch(), context, {}, lambda _: Sharing())
    waits_s = [Due(10.0 + number * 7 % 1_000) for number in range(1_000)]
    for number, wait_s in enumerate(waits_s):
        job._schedule(Retry(line(number), wait_s, pauses_batch=False))
    assert [job._next_line(now_s, deque()) for _ in range(1_000)] == [None] * 1_000
    assert Due.looks <= 1_000
    now_s = 2_000.0
    again = [job._next_line(now_s, deque()) for _ in range(1_000)]
    assert [waits_s[each.number] for each in again if each] == sorted(waits_s)
    assert job._next_line(now_s, deque()) is None


def test_a_batch_whose_last_line_is_not_due_again_yet_has_none_that_may_start() -> None:
    """While a late one has, no other batch starts a line."""
    now_s = 0.0
    context: Any = SimpleNamespace(clock=lambda: now_s)
    job = Job(batch(), context, {}, lambda _: Sharing())
    job._schedule(Retry(line(1), 4.0, pauses_batch=False))
    assert not job.can_start
    now_s = 4.0
    assert job.can_start


class Running:
    """Stands for the task of a line that runs."""

    def done(self) -> bool:
        return False

    def get_name(self) -> str:
        return "query"


def test_a_line_that_is_due_again_while_large_lines_run_runs_after_them() -> None:
    context: Any = SimpleNamespace(
        clock=lambda: 0.0,
        limits=BatchLimits(in_flight_bytes=25),
        sites=lambda: [site("a")],
        caller=lambda _: None,
        model_of=lambda _: "m",
        dispatched=lambda _: True,
    )
    job = Job(batch(), context, {}, lambda _: Sharing())
    running: dict[Any, Line] = job._running
    for each in (line(1, 100.0), line(2, 100.0)):
        running[Running()] = each
        job._blend.started(each, 100.0)  # beside so long answers no other line is to start
    job._schedule(Retry(replace(line(3), runs=1), 0.0, pauses_batch=False))
    assert job._take_lines(4, 1.0, Sharing()) == []
    running.clear()
    assert [each.number for each in job._take_lines(4, 1.0, Sharing())] == [3]


def test_a_batch_goes_first_once_its_pace_would_take_it_past_four_fifths_of_its_window() -> None:
    window = replace(batch(), created_at=0.0, expires_at=1_000.0 * LEARN_S)
    pace = partial(Progress, LEARN_S, 100, 0)  # work of 100 in this time
    assert not is_late(window, pace(79_000), LEARN_S)
    assert is_late(window, pace(81_000), LEARN_S)
    assert not is_late(window, Progress(LEARN_S - 1, 0, 0, 10**6), LEARN_S)  # nothing is known yet
    assert is_late(window, Progress(LEARN_S, 0, 0, 1_000), LEARN_S)
    assert is_late(window, Progress(0.0, 0, 0, 1), 801.0 * LEARN_S)
    assert not is_late(window, Progress(0.0, 0, 0, 0), 801.0 * LEARN_S)  # all its lines have ended


@given(st.lists(st.integers(1, 500), min_size=60, max_size=120), st.integers(1, 12))
def test_a_batch_is_expected_to_end_when_it_does_once_as_much_has_ended_as_runs(
    lengths: list[int], slots: int
) -> None:
    """Lines take as long as they are expected to be, a few at a time."""
    ends = [0.0] * slots
    spans = []
    for length in lengths:
        at = ends.index(min(ends))
        spans.append((ends[at], ends[at] + length))
        ends[at] += length
    took_s = max(ends)
    for now_s in [took_s * part / 10 for part in range(1, 10)]:
        ended = sum(end - begin for begin, end in spans if end <= now_s)
        running = sum(end - begin for begin, end in spans if begin <= now_s < end)
        progress = Progress(now_s, ended, running, sum(lengths) - ended)
        if progress.is_known:
            assert abs(now_s + progress.left_s - took_s) <= 0.5 * took_s + 2 * max(lengths)


def test_as_many_lines_run_as_all_sites_of_the_model_take() -> None:
    """Two sites of 256 slots take 640 lines, those that wait there included; 512 would leave slots idle."""
    two = [site("a", slots=256, running=256), site("b", slots=256)]
    assert lines_at_once(two, "m") == 640
    assert lines_at_once(two[:1], "m") == 320
    assert lines_at_once(two, "another") == 1
    assert lines_at_once([site("c", slots=10**9)], "m") == MAX_AT_ONCE


def test_a_batch_runs_as_many_lines_as_its_own_sites_take_whatever_others_run_elsewhere() -> None:
    two = [site("a", slots=256, running=256), site("b", slots=256)]
    assert lines_of_batch(two, "m", Sharing(replica=4, sites=1), 512) == 640
    assert lines_of_batch(two, "m", Sharing(replica=4, sites=4), 512) == 160
    assert lines_of_batch(two, "another", Sharing(replica=4, sites=1), 512) == 128
    vast = [site("c", slots=10**9)]
    assert lines_of_batch(vast, "m", Sharing(replica=4, sites=1), 512) == MAX_AT_ONCE // 4


def test_no_line_goes_where_an_operator_or_silence_says_no() -> None:
    from dataclasses import replace

    here = site("a")
    assert available([here], "m", {}, 0.0)
    assert not available([here], "other", {}, 0.0)
    assert not available([here], "m", {}, 60.0)
    assert not available([replace(here, state=SiteState.DRAINING)], "m", {}, 0.0)
    assert not available([replace(here, weight=0.0)], "m", {}, 0.0)
    assert not available([replace(here, pinned_off=frozenset({"m"}))], "m", {}, 0.0)


@given(st.binary(max_size=300), st.integers(1, 40))
def test_lines_lie_where_they_are_said_to_lie_however_the_file_is_cut(content: bytes, size: int) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(content), size):
            yield content[start : start + size]

    async def read() -> list[tuple[int, bytes]]:
        found = [raw async for raw in split_lines(parts(), 1000)]
        for raw in found:
            assert content[raw.begins : raw.begins + len(raw.data)] == raw.data
        return [(raw.number, raw.data) for raw in found]

    expected = enumerate(content.split(b"\n"), 1)
    assert asyncio.run(read()) == [each for each in expected if each[1].strip(b" \t\r\n")]


def test_an_endless_line_is_refused_before_it_is_held() -> None:
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield b"x" * 100

    async def read() -> None:
        async for _ in split_lines(endless(), 1000):
            pass

    with pytest.raises(InvalidLine, match="longer than the limit"):
        asyncio.run(read())
    assert taken <= 11


# ---- the ledger


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ledger") / "mico.db"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture
def url(template: Path, tmp_path: Path) -> str:
    shutil.copy(template, tmp_path / "mico.db")
    return f"sqlite:///{tmp_path}/mico.db"


def batch(batch_id: str = "batch_1", created_at: float = 0.0) -> Batch:
    return Batch(batch_id, "t", "key", "/v1/completions", "file-1", created_at, created_at + 86_400.0, 60.0)


async def submit(engine: AsyncEngine, ledger: Ledger, new: Batch) -> None:
    writer = await Files(engine, lambda: 0.0).begin(new.tenant)
    file = await writer.finish("in.jsonl", "batch", 1000.0)
    await ledger.create(replace(new, input_file_id=file.id), 9)


def test_an_outcome_is_written_once_and_by_the_holder_of_the_lease_alone(url: str) -> None:
    async def main() -> None:
        now = 0.0
        engine = open_engine(url)
        one, two = (Ledger(engine, name, lambda: now, lease_s=10.0) for name in ("one", "two"))
        await submit(engine, one, batch())
        assert [each.id for each in await one.lease(5)] == ["batch_1"]
        assert await two.lease(5) == []
        await one.add_lines("batch_1", [line(1), line(2, place=1)])
        await one.write("batch_1", [Outcome(1, False, b"first")])
        await one.write("batch_1", [Outcome(1, True, b"second")])
        now = 9.0
        assert await one.lease(5) and await two.lease(5) == []  # renewed
        now = 20.0
        assert [each.id for each in await two.lease(5)] == ["batch_1"]
        with pytest.raises(LeaseLost):
            await one.write("batch_1", [Outcome(2, False, b"late")])
        assert not await one.change("batch_1", status=BatchStatus.COMPLETED)
        assert [each.number for each in await two.unanswered("batch_1", -1, 9)] == [2]
        pages = [page async for page in two.outcomes("batch_1")]
        assert [(number, text.text if text else None) for number, _, text in pages[0]] == [
            (1, b"first"),
            (2, None),
        ]
        await engine.dispose()

    asyncio.run(main())


def test_who_validates_too_long_removes_no_line_of_the_next_holder(url: str) -> None:
    async def main() -> None:
        now = 0.0
        engine = open_engine(url)
        slow, next_one = (Ledger(engine, name, lambda: now, lease_s=10.0) for name in ("slow", "next"))
        await submit(engine, slow, batch())
        await slow.lease(5)
        await slow.add_lines("batch_1", [line(9)])  # as an earlier try may have left them
        now = 20.0
        await next_one.lease(5)
        await next_one.add_lines("batch_1", [line(1), line(2, place=1)])
        await next_one.write("batch_1", [Outcome(1, False, b"answered")])
        with pytest.raises(LeaseLost):
            await slow.add_lines("batch_1", [line(1), line(2, place=1)])
        pages = [page async for page in next_one.outcomes("batch_1")]
        assert [[number for number, _, _ in page] for page in pages] == [[1, 2]]
        assert [each.number for each in await next_one.unanswered("batch_1", -1, 9)] == [2]
        await engine.dispose()

    asyncio.run(main())


def test_a_replica_keeps_what_it_has_before_it_takes_more(url: str) -> None:
    async def main() -> None:
        engine = open_engine(url)
        one, two = (Ledger(engine, name, lambda: 0.0) for name in ("one", "two"))
        for number in range(5):
            await submit(engine, one, batch(f"batch_{number}", created_at=float(number)))
        assert [each.id for each in await one.lease(2)] == ["batch_0", "batch_1"]
        assert [each.id for each in await two.lease(2)] == ["batch_2", "batch_3"]
        assert [each.id for each in await two.lease(2)] == ["batch_2", "batch_3"]
        await one.release("batch_0")
        assert [each.id for each in await two.lease(3)] == ["batch_2", "batch_3", "batch_0"]
        await engine.dispose()

    asyncio.run(main())


def test_what_is_too_old_goes_and_what_a_batch_reads_stays(url: str) -> None:
    async def main() -> None:
        now = 0.0
        engine = open_engine(url)
        files, ledger = Files(engine, lambda: now), Ledger(engine, "one", lambda: now, lease_s=10.0)
        writers = [await files.begin("t") for _ in range(3)]
        for writer in writers:
            await writer.write(b"x" * 200_000)
        kept, read = [await writer.finish("f", "batch", 1000.0) for writer in writers[:2]]
        await ledger.create(replace(batch("going"), input_file_id=read.id), 2)
        await ledger.create(replace(batch("over"), input_file_id=kept.id), 2)
        for each in await ledger.lease(5):
            await ledger.add_lines(each.id, [line(1)])
        assert await ledger.end("over", BatchStatus.COMPLETED, at=now)
        now = 500.0
        assert await remove_expired(files, ledger, 100.0) == 1  # the batch that is over
        assert [each.id for each in await files.list_page("t", None, Page(9, newest_first=False))] == sorted(
            [kept.id, read.id]
        )
        now = 90_000.0
        assert await remove_expired(files, ledger, 100.0) == 2  # one that nobody reads, one never finished
        assert [each.id for each in await files.list_page("t", None, Page(9))] == [read.id]
        assert [each.id for each in await ledger.list_page("t", Page(9))] == ["going"]
        assert await files.read(read.id, 65_530, 20) == b"x" * 20
        await engine.dispose()

    asyncio.run(main())
