"""Requests start in bunches while more wait than can start, and at once otherwise."""

from __future__ import annotations

from site_engine.cuda.starts import HELD_STEPS, MOST_NEW, Starts


def test_a_few_free_slots_are_held_for_a_bunch_and_not_for_long() -> None:
    starts = Starts(256)
    assert [starts.most(waiting=100, free_slots=3) for _ in range(HELD_STEPS)] == [0] * HELD_STEPS
    assert starts.most(waiting=100, free_slots=3) == MOST_NEW
    assert starts.most(waiting=100, free_slots=3) == 0
    assert starts.most(waiting=100, free_slots=16) == MOST_NEW


def test_who_finds_a_free_slot_starts_at_once() -> None:
    starts = Starts(256)
    assert starts.most(waiting=3, free_slots=3) == MOST_NEW
    assert starts.most(waiting=1, free_slots=200) == MOST_NEW
    assert Starts(8).most(waiting=50, free_slots=1) == MOST_NEW
