"""What a site sets in its processes, and what it leaves to whoever starts them."""

from __future__ import annotations

import gc
import os
import sys

import pytest

from site_engine.process_settings import PINNED_MEMORY, SWITCH_S, set_up_collector, set_up_process

ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    for name in ALLOCATORS:
        monkeypatch.setenv(name, "")  # restored afterwards, also where the code under test sets it
        monkeypatch.delenv(name)


def test_threads_take_turns_soon_and_pinning_does_not_lock_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[float] = []
    monkeypatch.setattr(sys, "setswitchinterval", found.append)
    set_up_process()
    assert found == [SWITCH_S]
    assert os.environ["PYTORCH_ALLOC_CONF"] == PINNED_MEMORY


@pytest.mark.parametrize("name", ALLOCATORS)
def test_an_environment_that_configures_the_allocators_is_left_as_it_is(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "expandable_segments:True")
    set_up_process()
    assert [os.environ.get(each) for each in ALLOCATORS if each in os.environ] == ["expandable_segments:True"]


def test_no_full_collection_comes_with_the_requests_of_minutes() -> None:
    before, full = gc.get_threshold(), gc.get_stats()[2]["collections"]
    try:
        set_up_collector()
        loaded = gc.get_stats()[2]["collections"]
        requests = [{"id": str(number), "tokens": [number], "pages": [[]]} for number in range(200_000)]
        assert gc.get_freeze_count() > 0
        assert gc.get_stats()[2]["collections"] == loaded == full + 1
        assert len(requests) == 200_000
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
