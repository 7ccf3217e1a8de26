"""An address may fail to authenticate only so often; memory is bounded, and other addresses are not
delayed.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.security.login_limiter import FAILURES_PER_S, MAX_ADDRESSES, MAX_FAILURES, LoginLimiter


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def test_after_so_many_failures_an_address_waits_and_others_do_not() -> None:
    limiter = LoginLimiter(clock := Clock())
    for _ in range(int(MAX_FAILURES)):
        assert limiter.wait_s("a") == 0
        limiter.record_failure("a")
    assert limiter.wait_s("a") == 1 / FAILURES_PER_S
    assert limiter.wait_s("b") == 0
    clock.now_s += 1 / FAILURES_PER_S
    assert limiter.wait_s("a") == 0


@given(steps=st.lists(st.floats(0, 5), max_size=300))
def test_in_the_long_run_no_more_than_the_rate_gets_through(steps: list[float]) -> None:
    limiter = LoginLimiter(clock := Clock())
    heard = 0
    for rest_s in steps:
        clock.now_s += rest_s
        if not limiter.wait_s("a"):
            limiter.record_failure("a")
            heard += 1
    assert heard <= MAX_FAILURES + sum(steps) * FAILURES_PER_S + 1


def test_addresses_are_forgotten_oldest_first() -> None:
    limiter = LoginLimiter(Clock())
    for number in range(MAX_ADDRESSES + 1):
        for _ in range(int(MAX_FAILURES) if number < 2 else 1):
            limiter.record_failure(str(number))
    assert limiter.wait_s("0") == 0
    assert limiter.wait_s("1") > 0
    assert len(limiter._seen) == MAX_ADDRESSES
