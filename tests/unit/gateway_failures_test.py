"""How often an address may fail to say who it is; the memory of it is bounded, and others pay nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.security.login_limiter import ADDRESSES_MOST, MOST, PER_S, Failures


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def test_after_so_many_failures_an_address_waits_and_others_do_not() -> None:
    failures = Failures(clock := Clock())
    for _ in range(int(MOST)):
        assert failures.wait_s("a") == 0
        failures.note("a")
    assert failures.wait_s("a") == 1 / PER_S
    assert failures.wait_s("b") == 0
    clock.now_s += 1 / PER_S
    assert failures.wait_s("a") == 0


@given(steps=st.lists(st.floats(0, 5), max_size=300))
def test_in_the_long_run_no_more_than_the_rate_gets_through(steps: list[float]) -> None:
    failures = Failures(clock := Clock())
    heard = 0
    for rest_s in steps:
        clock.now_s += rest_s
        if not failures.wait_s("a"):
            failures.note("a")
            heard += 1
    assert heard <= MOST + sum(steps) * PER_S + 1


def test_addresses_are_forgotten_oldest_first() -> None:
    failures = Failures(Clock())
    for number in range(ADDRESSES_MOST + 1):
        for _ in range(int(MOST) if number < 2 else 1):
            failures.note(str(number))
    assert failures.wait_s("0") == 0
    assert failures.wait_s("1") > 0
    assert len(failures._seen) == ADDRESSES_MOST
