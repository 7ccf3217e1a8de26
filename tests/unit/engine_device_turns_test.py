"""Engines that share a device: one iteration at a time, least device time first."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from site_engine.engine.device_turns import DeviceTurns, SharedDevice
from tests.support.site_fakes import FakeClock, FakeEngine

WITHIN_S = 60.0


class Device:
    """Members that take turns on threads; the device's clock moves by what each turn takes."""

    def __init__(self, clock: FakeClock, turns: DeviceTurns) -> None:
        self.clock, self.turns = clock, turns
        self.order: list[int] = []
        self.inside = 0

    def take(self, member: int, seconds: float) -> None:
        with self.turns.turn(member):
            self.inside += 1
            assert self.inside == 1, "two at once"
            self.order.append(member)
            self.clock.now += seconds
            self.inside -= 1

    def all_at_once(self, wanted: Sequence[tuple[int, float]]) -> list[int]:
        """Let each of these wait while another holds the device; return the order in which they got it."""
        holder = self.turns.join()
        with self.turns.turn(holder):
            threads = [threading.Thread(target=self.take, args=each, daemon=True) for each in wanted]
            for each in threads:
                each.start()
            while len(self.turns._waiting) < len(wanted):
                threads[0].join(0.001)
        for each in threads:
            each.join(WITHIN_S)
            assert not each.is_alive()
        return self.order[-len(wanted) :]


@given(st.lists(st.integers(1, 50), min_size=2, max_size=5, unique=True))
def test_of_those_that_wait_the_one_that_has_used_least_is_next(used: list[int]) -> None:
    clock = FakeClock()
    device = Device(clock, DeviceTurns(clock))
    members = [device.turns.join() for _ in used]
    for member, seconds in zip(members, used, strict=True):
        device.turns._used_s[member] = float(seconds)
    order = device.all_at_once([(member, 0.0) for member in members])
    assert order == sorted(members, key=lambda member: used[member])


def test_time_without_wishes_gives_no_credit() -> None:
    clock = FakeClock()
    device = Device(clock, DeviceTurns(clock))
    busy, idle = device.turns.join(), device.turns.join()
    for _ in range(100):
        device.take(busy, 1.0)
    device.take(idle, 1.0)
    device.take(idle, 1.0)
    assert device.all_at_once([(busy, 1.0), (idle, 1.0)]) == [busy, idle]


def test_a_shared_engine_does_what_its_engine_does_and_allows_for_the_others_iterations() -> None:
    device = SharedDevice(FakeClock())
    engines = [FakeEngine(), FakeEngine()]
    shared = [device.engine(each) for each in engines]
    for engine, longest_s in zip(engines, (0.5, 2.0), strict=True):
        figures = engine.load()._replace(longest_iteration_s=longest_s)
        engine.load = lambda figures=figures: figures  # type: ignore[method-assign]
    assert shared[0].load().longest_iteration_s == 0.5
    assert shared[1].load().longest_iteration_s == 2.5
    assert shared[0].load().longest_iteration_s == 2.5
    assert not shared[0].has_work
    assert shared[0].step() == []
