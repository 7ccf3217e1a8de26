"""Lines of a batch that begin alike are found and run together; every order names every line once."""

from __future__ import annotations

import gc
import random
import statistics
import sys
import tracemalloc
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batches.capacity import SiteCapacity
from gateway.batches.groups import PrefixGroups
from gateway.batches.homes import LOOK_AHEAD, Homes
from gateway.batches.line_table import LineTable
from gateway.batches.order import LOOSE_SHARE, order
from gateway.batches.values import Line, Order
from gateway.domain import Credit, LoadReport, Model, Site, SiteIdentity, SiteState
from gateway.routing.prefixes import Prefix, prefix_of
from tests.support.line_sizes import sizes_of


def line(number: int, prompt: int, response: float, group: int | None = None, shared: int = 0) -> Line:
    group = number if group is None else group
    return Line(number, 0, str(number), 0, 10, prompt, response, group=group, shared_tokens=shared)


def turns_of(lines: list[Line], how: Order = Order.BLEND, at_once: int = 1) -> list[int]:
    return order(sizes_of(lines), how, at_once).tolist()


@st.composite
def batches(draw: st.DrawFn) -> list[Line]:
    lines: list[Line] = []
    for first in range(draw(st.integers(1, 8))):
        shared = draw(st.sampled_from([0, 10, 1000]))
        for _ in range(draw(st.integers(1, 6))):
            own, response = draw(st.integers(1, 400)), draw(st.sampled_from([0.0, 2.0, 80.0, 900.0, 8000.0]))
            lines.append(line(len(lines) + 1, shared + own, response, 1000 + first, shared))
    return draw(st.permutations(lines))


@given(lines=batches(), how=st.sampled_from(Order), at_once=st.integers(1, 400))
def test_every_order_names_every_line_once_and_the_same_again(
    lines: list[Line], how: Order, at_once: int
) -> None:
    turns = turns_of(lines, how, at_once)
    assert sorted(turns) == list(range(len(lines)))
    assert turns == turns_of(lines, how, at_once)


@given(lines=batches())
def test_groups_with_long_prefixes_are_never_torn(lines: list[Line]) -> None:
    for how in (Order.BLEND, Order.PREFIX):
        ran = [lines[index] for index in turns_of(lines, how)]
        for group in {each.group for each in lines}:
            its = [each for each in lines if each.group == group]
            shared = its[0].shared_tokens
            own = sum(each.prompt_tokens - shared + each.response_tokens for each in its)
            if how is Order.BLEND and shared <= LOOSE_SHARE * own:
                continue
            at = [index for index, each in enumerate(ran) if each.group == group]
            assert at == list(range(at[0], at[0] + len(at)))


def test_blended_groups_stay_together_and_the_longest_line_starts_first() -> None:
    lines = [
        line(1, 3000, 4, group=7, shared=2900),
        line(2, 50, 2000),
        line(3, 3000, 60, group=7, shared=2900),
        line(4, 50, 6000),
        line(5, 2000, 9),
        line(6, 2000, 30),
    ]
    assert [lines[index].number for index in turns_of(lines)] == [4, 3, 1, 2, 5, 6]


def test_long_lines_are_spread_and_only_short_ones_are_left_at_the_end() -> None:
    """All long lines at first would leave rows of a site empty, and all short ones at last its memory."""
    rnd = random.Random(1)
    lengths = [min(1000.0, 250 * rnd.lognormvariate(0, 0.8)) for _ in range(2000)]
    ran = [lengths[at] for at in turns_of([line(at, 160, each) for at, each in enumerate(lengths)])]
    tenths = [ran[at : at + 200] for at in range(0, 2000, 200)]
    means = [statistics.fmean(tenth) for tenth in tenths]
    assert max(means[1:5]) < 1.6 * min(means[1:5])
    assert ran[0] == max(lengths)
    assert max(tenths[-1]) < 0.3 * max(lengths)


@given(lengths=st.lists(st.integers(1, 8000), max_size=60))
def test_the_longest_come_first_where_the_longest_takes_as_long_as_all_others(lengths: list[int]) -> None:
    """No other may start late, or it would end after the longest."""
    lines = [line(at, 5, length) for at, length in enumerate([*lengths, 8000])]
    ran = [lines[index].response_tokens for index in turns_of(lines, at_once=len(lines))]
    assert ran == sorted(ran, reverse=True)


def test_the_long_lines_of_a_large_group_do_not_wait_for_it() -> None:
    """A prefix of 100 tokens is nothing beside 100 lines of 200: computed twice, it costs half a percent."""
    lines = [line(at, 300, 100 if at % 10 else 5000, group=1, shared=100) for at in range(100)]
    lines.append(line(100, 10, 900))
    lengths = [lines[index].response_tokens for index in turns_of(lines)]
    assert lengths[:10] == [5000] * 10
    assert sorted(lengths[10:]) == [100] * 90 + [900]


def test_an_empty_batch_has_an_order() -> None:
    assert [turns_of([], how) for how in Order] == [[]] * 4


def groups_of(prompts: list[str], tenant: str = "t") -> list[tuple[int, float]]:
    found = PrefixGroups()
    for prompt in prompts:
        found.add(prefix_of(prompt, tenant, "m"))
    groups = found.find()
    return list(zip(groups.first.tolist(), groups.share.round(2).tolist(), strict=True))


def test_lines_about_one_document_are_a_group_whatever_instructions_all_begin_with() -> None:
    rnd = random.Random(1)
    every, one, other = (
        "".join(rnd.choices("abcdefgh ", k=length)) for length in (200, 4000, 4000)
    )  # instructions of all lines, then a document
    prompts = [every + one + " who?", every + other + " who?", every + one + " when?", every + "alone" * 9]
    prompts.append("nothing of it")
    prompts.append(every + other + " when?")
    firsts = [first for first, _ in groups_of(prompts)]
    assert firsts[:3] == [0, 1, 0]
    assert firsts[4:] == [4, 1]
    shares = [share for _, share in groups_of(prompts)]
    assert min(shares[at] for at in (0, 1, 2, 5)) > 0.75
    assert shares[4] == 0.0


def test_lines_without_any_prompt_are_each_their_own_group() -> None:
    found = PrefixGroups()
    found.add(Prefix((), 0))
    found.add(Prefix((), 0))
    assert found.find().first.tolist() == [0, 1]
    assert PrefixGroups().find().first.tolist() == []


@pytest.mark.parametrize("tenants", [("a", "a"), ("a", "b")])
def test_groups_are_of_one_tenant(tenants: tuple[str, str]) -> None:
    found = PrefixGroups()
    for tenant in tenants:
        found.add(prefix_of("the same words again and again" * 20, tenant, "m"))
    assert len(set(found.find().first.tolist())) == len(set(tenants))


def table_of(lines: int) -> LineTable:
    """Return lines of which each four begin alike, as they are before they are put in order."""
    table = LineTable()
    for number in range(lines):
        hashes = tuple(
            (number // 4 * 64 + at if at < 30 else number * 64 + at + (1 << 40)).to_bytes(8, "little")
            for at in range(40)
        )
        table.add(line(number, 5000, number % 300), Prefix(hashes, 20_000))
    return table


def test_the_lines_of_a_batch_take_little_memory_until_they_are_written() -> None:
    """50,000 take thirty times that of these, eight batches eight times that. What is read meanwhile is no
    concern of the garbage collector, which holds every stream while it looks at it.
    """
    gc.collect()
    before = len(gc.get_objects())
    tracemalloc.start()
    table = table_of(1600)
    assert len(gc.get_objects()) - before < 100
    ordered = table.in_order(Order.BLEND, 1)
    # threads that other tests have left allocate memory as well
    of_batches = tracemalloc.Filter(inclusive=True, filename_pattern="*/gateway/batches/*")
    held = tracemalloc.take_snapshot().filter_traces([of_batches])
    tracemalloc.stop()
    assert len(ordered) == 1600
    assert 1e5 < sum(trace.size for trace in held.traces) < 1e6


@pytest.mark.parametrize("how", Order)
def test_to_put_more_lines_in_order_takes_no_more_instructions(how: Order) -> None:
    """A thread that runs Python holds the event loop for five milliseconds at each of its turns; that of one
    instruction is NumPy's, which sorts without the interpreter's lock.
    """
    table_of(10).in_order(how, 1)  # NumPy has loaded what it needs
    few, many = (instructions(partial(table_of(lines).in_order, how, 1)) for lines in (100, 1000))
    assert 0 < many <= few


def instructions(work: Callable[[], object]) -> int:
    """Return how many instructions of Python `work` takes."""
    counted = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        nonlocal counted
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counted += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()  # whose callbacks are Python, too
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return counted


def test_lines_are_written_in_the_order_of_running_as_they_were_read() -> None:
    table, read = LineTable(), [line(7, 900, 4.0), line(8, 50, 9.5), line(12, 900, 6.0)]
    for each, text in zip(read, ("to be " * 200 + "?", "no", "to be " * 200 + "!"), strict=True):
        table.add(each, prefix_of(text, "t", "m"))
    ordered = list(table.in_order(Order.BLEND, 1))
    assert [each.place for each in ordered] == [0, 1, 2]
    assert [(each.number, each.group) for each in ordered] == [(8, 8), (12, 7), (7, 7)]
    assert [each.shared_tokens > 800 for each in ordered] == [False, True, True]
    undone = [replace(each, place=0, group=each.number, shared_tokens=0) for each in ordered]
    assert sorted(undone, key=lambda each: each.number) == read


def site(name: str) -> Site:
    identity = SiteIdentity(name, "boot", "aws", "here", {"m": Model("m", "r", 1024, 0, "mico")}, 8, 10_000)
    return Site(identity, SiteState.READY, LoadReport(1, 0.0), Credit())


def sites_of_groups(lines: list[Line], slots: dict[str, int], seed: int) -> dict[int, set[str]]:
    """Run lines at sites that end them in a random order; return where each group has run."""
    rnd, homes, queue = random.Random(seed), Homes(), deque(lines)
    running: list[str] = []
    ran: dict[int, set[str]] = {}
    while queue:
        room = {name: most - running.count(name) for name, most in slots.items()}
        free = [SiteCapacity(site(name), lines) for name, lines in room.items() if lines > 0]
        most = sum(lines for _, lines in free)
        homes.begin(free, slots)
        taken = [homes.take(queue) for _ in range(min(most, len(queue)))]
        started = [each for each in taken if each is not None]
        for each, name in zip(started, homes.assign(started, free), strict=True):
            assert running.count(name) < slots[name]
            running.append(name)
            ran.setdefault(each.group, set()).add(name)
        for _ in range(rnd.randint(1, 3)):
            if running:
                running.pop(rnd.randrange(len(running)))
    return ran


@pytest.mark.parametrize("seed", range(5))
def test_small_groups_stay_at_one_site_of_four(seed: int) -> None:
    lines = [line(number, 3100, 90, number // 4, 3000) for number in range(400)]
    ran = sites_of_groups(lines, {"a": 8, "b": 8, "c": 4, "d": 2}, seed)
    assert len(ran) == 100
    assert sum(len(each) == 1 for each in ran.values()) >= 90


def test_a_large_group_runs_at_every_site() -> None:
    lines = [line(number, 900, 2, 7, 800) for number in range(300)]
    assert sites_of_groups(lines, {"a": 8, "b": 8}, 1) == {7: {"a", "b"}}


def test_a_group_whose_beginning_is_short_runs_at_every_site_beside_others() -> None:
    """All stories begin with a system prompt of 30 tokens; one site would run them all, and end last."""
    stories = [line(number, 100, 4000, 0, 30) for number in range(60)]
    documents = [line(number, 3100, 90, number // 4, 3000) for number in range(100, 400)]
    lines = [each for at in range(60) for each in (stories[at], *documents[5 * at : 5 * at + 5])]
    ran = sites_of_groups(lines, dict.fromkeys("abcd", 40), 0)
    assert ran[0] == set("abcd")


def test_groups_of_a_site_that_is_gone_go_on_together_at_another() -> None:
    """The site had most of 20 groups in its own queue; what is left of each begins at one other site."""
    homes, lines = Homes(), [line(number, 3100, 90, number // 4, 3000) for number in range(160)]
    first = deque(line for line in lines if not line.number % 4)
    homes.begin([SiteCapacity(site("gone"), 40)], ["gone", "a", "b"])
    while homes.take(first):
        pass
    queue, ran = deque(line for line in lines if line.number % 4), dict[int, set[str]]()
    for turn in range(120):
        room = SiteCapacity(site("ab"[turn % 2]), 1)
        homes.begin([room], ["a", "b"])
        taken = homes.take(queue)
        assert taken is not None
        ran.setdefault(taken.group, set()).update(homes.assign([taken], [room]))
    assert not queue
    assert sum(len(sites) == 1 for sites in ran.values()) >= 36


@given(groups=st.lists(st.integers(0, 5), max_size=120), sites=st.sets(st.sampled_from("ab")))
def test_every_line_is_taken_once_whatever_site_has_room(groups: list[int], sites: set[str]) -> None:
    lines = [line(number, 100, 5, group, 50) for number, group in enumerate(groups)]
    homes, queue = Homes(), deque(lines)
    taken = []
    homes.begin([SiteCapacity(site(name), 9) for name in sites], sites)
    while (each := homes.take(queue)) is not None:
        taken.append(each.number)
    assert sorted(taken) == list(range(len(lines)))
    assert all(number - place <= LOOK_AHEAD for place, number in enumerate(taken))
