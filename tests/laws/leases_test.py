"""Engines never hold more of a device's memory together than those that sleep have free."""

from __future__ import annotations

import random
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from site_engine.core.leases import Lease, divide

SIZE = 1000


class Engine:
    """Reads what it is told late, several lines at once, and answers the last one, late again."""

    def __init__(self) -> None:
        self.lease = Lease()
        self.told: deque[int] = deque()
        self.answers: deque[int] = deque()
        self.holds = 0

    def read(self) -> None:
        if self.told:
            self.holds = self.told[-1]
            self.told.clear()
            self.answers.append(self.holds)


class Device:
    """One engine that sleeps, and those awake."""

    def __init__(self, rnd: random.Random) -> None:
        self.rnd = rnd
        self.engines: list[Engine] = []
        self.lent = SIZE

    def divide(self) -> None:
        changed = divide(self.lent, [each.lease for each in self.engines])
        for each in self.engines:
            if each.lease in changed:
                each.told.append(each.lease.allowed_bytes)

    def come(self) -> None:
        self.engines.append(Engine())
        self.divide()

    def go(self) -> None:
        if self.engines:
            self.engines.remove(self.rnd.choice(self.engines))
            self.divide()

    def lend(self) -> None:
        self.lent = self.rnd.choice([0, SIZE])
        self.divide()

    def read(self) -> None:
        for each in self.engines[:1] and [self.rnd.choice(self.engines)]:
            each.read()

    def hear(self) -> None:
        for each in self.engines[:1] and [self.rnd.choice(self.engines)]:
            self.answered(each)

    def answered(self, engine: Engine) -> None:
        if engine.answers:
            engine.lease.confirm(engine.answers.popleft())
            self.divide()

    def settle(self) -> None:
        while any(each.told or each.answers for each in self.engines):
            for each in self.engines:
                each.read()
                self.answered(each)


@given(seed=st.integers(0, 100_000))
def test_together_they_never_hold_more_and_all_of_it_is_used_or_given_back(seed: int) -> None:
    device = Device(random.Random(seed))
    acts = [device.come, device.go, device.lend, *[device.read, device.hear] * 3]
    for _ in range(80):
        device.rnd.choice(acts)()
        assert sum(each.holds for each in device.engines) <= SIZE
        assert all(each.holds <= each.lease.max_bytes for each in device.engines)
    device.lend()
    device.settle()
    part = device.lent // max(1, len(device.engines))
    assert all(each.holds == part == each.lease.max_bytes for each in device.engines)
