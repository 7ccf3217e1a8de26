"""A request that waits for an adapter's slot holds up nobody at first, and then only one adapter's requests.

Those that waited for an adapter when it was placed start with it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from site_engine.core.adapter_slots import PATIENCE_S, AdapterSlots
from site_engine.core.page_pool import PagePool
from site_engine.core.request import Lane, Request, Sampling
from site_engine.core.request_queue import AdmissionQueue
from site_engine.core.scheduler import Scheduler


class Named(NamedTuple):
    """A variant that is served, by its contents; an adapter if it has a rank."""

    fingerprint: str
    rank: int = 8
    eos_token_ids: tuple[int, ...] = ()


ONE, OTHER, THIRD, FINE_TUNED = Named("one"), Named("other"), Named("third"), Named("tuned", rank=0)
LARGE = Named("large", rank=64)  # whose slots are no others' to wait for
LONG_S = 2 * PATIENCE_S


def scheduler(slots: int = 8, adapters: int = 1) -> Scheduler:
    """Return a scheduler with memory for all, and few slots for adapters."""
    pool = PagePool(1000, 4)
    return Scheduler(pool, AdmissionQueue(), slots=slots, token_budget=64, adapters=AdapterSlots(adapters))


def push(site: Scheduler, name: str, variant: Named | None = None, lane: Lane = Lane.CHAT) -> Request:
    request: Any = Request(name, [1, 2, 3], Sampling(), lane=lane)
    request.variant = variant
    site.queue.push(request)
    return request


def iterate(site: Scheduler, times: int = 1, now: float = 0.0) -> set[str]:
    """Return who runs after some iterations; all came at 0."""
    for _ in range(times):
        plan = site.plan(now)
        site.advance(plan)
        for chunk in plan.chunks:
            if chunk.samples:
                chunk.request.tokens.append(1)
    return {each.id for each in site.running}


def test_requests_without_an_adapter_start_beside_one_that_waits_for_a_slot() -> None:
    site = scheduler()
    holder = push(site, "holder", ONE)
    assert iterate(site) == {"holder"}
    push(site, "waits", OTHER)
    push(site, "base")
    push(site, "tuned", FINE_TUNED)
    push(site, "batch", lane=Lane.BATCH)
    assert iterate(site, 2) == {"holder", "base", "tuned", "batch"}
    site.release(holder)
    assert iterate(site) == {"waits", "base", "tuned", "batch"}


def test_chats_of_an_adapter_that_has_the_slot_start_beside_one_that_waits_for_it() -> None:
    site = scheduler()
    push(site, "holder", ONE)
    iterate(site)
    push(site, "waits", OTHER)
    push(site, "same", ONE)
    push(site, "line", ONE, lane=Lane.BATCH)
    assert iterate(site, 3) == {"holder", "same"}


def test_requests_of_an_adapter_that_has_the_slot_do_not_keep_it_for_ever() -> None:
    site = scheduler()
    holder = push(site, "holder", ONE)
    iterate(site)
    push(site, "waits", OTHER)
    push(site, "same", ONE)
    assert iterate(site, 3, LONG_S) == {"holder"}
    site.release(holder)
    assert iterate(site, 1, LONG_S) == {"waits"}


def test_only_the_adapter_that_fewest_run_with_takes_no_more_for_one_that_has_waited_for_long() -> None:
    site = scheduler(adapters=2)
    ones = [push(site, name, ONE) for name in ("1", "2")]
    other = push(site, "other", OTHER)
    assert iterate(site) == {"1", "2", "other"}
    push(site, "waits", THIRD)
    one_more = push(site, "one more", ONE)
    push(site, "another", OTHER)
    assert iterate(site, 3, LONG_S) == {"1", "2", "other", "one more"}
    site.release(other)
    assert iterate(site, 1, LONG_S) == {"1", "2", "waits", "one more"}
    for each in ones:
        site.release(each)
    assert iterate(site, 3, LONG_S) == {"waits", "one more"}
    site.release(one_more)
    assert iterate(site, 1, LONG_S) == {"waits", "another"}


def test_a_chat_that_waits_for_a_slot_of_chats_preempts_no_batch() -> None:
    site = scheduler(slots=3)
    push(site, "holder", ONE)
    batch = push(site, "batch", lane=Lane.BATCH)
    same = push(site, "same", ONE, lane=Lane.BATCH)
    assert iterate(site) == {"holder", "batch", "same"}
    push(site, "waits", OTHER)
    assert iterate(site, 3) == {"holder", "batch", "same"}
    assert batch.preemptions == same.preemptions == 0


def test_requests_of_another_rank_class_do_not_wait_for_a_slot_of_the_first() -> None:
    site = scheduler()
    push(site, "holder", ONE)
    iterate(site)
    push(site, "waits", OTHER)
    push(site, "large", LARGE)
    push(site, "line", LARGE, lane=Lane.BATCH)
    assert iterate(site, 3) == {"holder", "large", "line"}


def test_a_chat_that_waits_for_a_slot_preempts_no_line_that_holds_a_slot_of_another_rank_class() -> None:
    site = scheduler()
    push(site, "holder", ONE)
    line = push(site, "line", LARGE, lane=Lane.BATCH)
    iterate(site)
    push(site, "waits", OTHER)
    assert iterate(site, 3) == {"holder", "line"}
    assert line.preemptions == 0


def test_a_chat_preempts_the_lines_of_a_batch_that_hold_its_slot() -> None:
    site = scheduler()
    line = push(site, "line", ONE, lane=Lane.BATCH)
    push(site, "batch", lane=Lane.BATCH)
    iterate(site)
    push(site, "chat", OTHER)
    assert iterate(site, 2) == {"chat", "batch"}
    assert line.preemptions == 1


def test_chats_of_the_base_take_the_row_of_a_batch_while_another_waits_for_a_slot() -> None:
    site = scheduler(slots=2)
    push(site, "holder", ONE)
    push(site, "batch", lane=Lane.BATCH)
    iterate(site)
    push(site, "waits", OTHER)
    push(site, "base")
    assert iterate(site, 2) == {"holder", "base"}


def test_requests_that_waited_for_an_adapter_when_it_was_placed_start_with_it() -> None:
    site = scheduler()
    ones = [push(site, "1", ONE)]
    waits = push(site, "waits", OTHER)
    ones += [push(site, "2", ONE), push(site, "3", ONE)]
    assert iterate(site, 1, LONG_S) == {"1", "2", "3"}
    push(site, "late", ONE)
    assert iterate(site, 3, LONG_S) == {"1", "2", "3"}
    for each in ones:
        site.release(each)
    assert iterate(site, 3, LONG_S) == {"waits"}
    site.release(waits)
    assert iterate(site) == {"late"}


def test_no_more_start_with_an_adapter_than_there_are_rows_beside_the_first() -> None:
    site = scheduler(slots=2)
    ones = [push(site, "0", ONE)]
    push(site, "waits", OTHER)
    ones += [push(site, f"{number}", ONE) for number in (1, 2, 3)]
    assert iterate(site, 1, LONG_S) == {"0", "1"}
    site.release(ones[0])
    assert iterate(site, 2, LONG_S) == {"1", "2"}
    site.release(ones[1])
    site.release(ones[2])
    assert iterate(site, 2, LONG_S) == {"waits"}


def test_lines_of_batches_do_not_start_with_an_adapter_for_which_a_chat_waits() -> None:
    site = scheduler()
    push(site, "holder", ONE)
    push(site, "line", ONE, lane=Lane.BATCH)
    push(site, "waits", OTHER)
    assert iterate(site, 3) == {"holder"}


def test_an_adapter_that_lost_its_slot_is_placed_for_those_that_wait_then() -> None:
    site = scheduler()
    one, other = push(site, "one", ONE), push(site, "other", OTHER)
    gone = push(site, "gone", ONE)
    site.queue.remove(gone.id)
    assert iterate(site) == {"one"}
    site.release(one)
    assert iterate(site) == {"other"}
    push(site, "first", ONE)
    push(site, "same", OTHER)
    assert iterate(site, 2, LONG_S) == {"other"}
    site.release(other)
    assert iterate(site, 1, LONG_S) == {"first"}
