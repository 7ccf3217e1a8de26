"""The garbage collector pauses while a package is imported for the first time, and never longer."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from site_engine.first_import import first_import


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    """Leave the collector as it is for other tests."""
    yield
    gc.unfreeze()
    gc.enable()


def test_the_collector_pauses_for_a_first_import_and_does_not_scan_what_it_leaves() -> None:
    with first_import("a_package_that_is_not_imported"):
        assert not gc.isenabled()
        kept: list[list[object]] = [[]]
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    assert not any(each is kept for each in gc.get_objects())


def test_the_collector_goes_on_after_an_import_that_fails() -> None:
    with pytest.raises(ImportError), first_import("a_package_that_is_not_imported"):
        raise ImportError("no such package")
    assert gc.isenabled()


def test_a_package_that_is_imported_already_changes_nothing() -> None:
    gc.unfreeze()
    with first_import("gc"):
        assert gc.isenabled()
    assert gc.get_freeze_count() == 0
