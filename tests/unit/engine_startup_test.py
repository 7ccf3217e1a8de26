"""The parts of a start are told in order, also those of other threads and those that failed."""

from __future__ import annotations

import pytest

from site_engine.core.startup import Part, StartUp, describe


def test_parts_are_told_in_the_order_of_their_begin_from_the_origin() -> None:
    times = iter([10.0, 10.5, 12.0, 13.25])
    startup = StartUp(lambda: next(times))
    with startup.part("weights"), startup.part("Triton"):
        pass
    assert startup.parts == [Part("Triton", 10.5, 12.0), Part("weights", 10.0, 13.25)]
    assert describe(startup.parts, 9.0) == "weights 1.0-4.2, Triton 1.5-3.0"


def test_a_part_that_fails_is_told_too() -> None:
    times = iter([1.0, 2.0])
    startup = StartUp(lambda: next(times))
    with pytest.raises(OSError), startup.part("weights"):
        raise OSError("gone")
    assert describe(startup.parts, 1.0) == "weights 0.0-1.0"
