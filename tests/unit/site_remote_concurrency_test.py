"""The number of requests in a server: bounded, never starving, within a provider's limits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from site_engine.remote.concurrency import MIN_LIMIT, ConcurrencyLimit, RateLimit

EVENTS = st.one_of(
    st.tuples(st.just("figures"), st.integers(0, 300), st.integers(0, 300)),
    st.tuples(st.just("first"), st.floats(0, 60), st.sampled_from([None, True, False])),
    st.tuples(st.just("refused")),
)


@given(st.integers(1, 300), st.lists(EVENTS, max_size=60))
def test_whatever_happens_the_window_is_bounded_and_never_shut(most: int, events: list[tuple]) -> None:
    limit = ConcurrencyLimit(most)
    for kind, *what in events:
        if kind == "figures":
            limit.observe_queue(sent=min(what[0], most), waiting=what[1])
        elif kind == "first":
            limit.observe_first_token(what[0], sent=limit.limit, queues=what[1])
        else:
            limit.observe_overload()
        assert min(MIN_LIMIT, most) <= limit.limit <= most


@given(st.integers(1, 256))
def test_a_server_with_room_is_filled_within_a_few_looks(capacity: int) -> None:
    """A server of `capacity` rows whose queue is seen: it ends neither starved nor with a long queue."""
    limit = ConcurrencyLimit(512)
    for _ in range(12):
        sent = limit.limit
        limit.observe_queue(sent=sent, waiting=max(0, sent - capacity))
    for _ in range(600):
        sent = limit.limit
        limit.observe_queue(sent=sent, waiting=max(0, sent - capacity))
    assert min(capacity, MIN_LIMIT) <= limit.limit <= max(MIN_LIMIT, capacity) + 2
    assert limit.limit >= capacity


def test_without_figures_slow_first_tokens_say_that_the_server_queues() -> None:
    limit = ConcurrencyLimit(64)
    for _ in range(200):
        sent = limit.limit
        limit.observe_first_token(0.1 if sent <= 20 else 2.0, sent=sent, queues=None)
    assert 12 <= limit.limit <= 24


def test_a_server_that_is_not_full_keeps_what_it_has() -> None:
    limit = ConcurrencyLimit(64)
    size = limit.limit
    limit.observe_queue(sent=1, waiting=0)
    limit.observe_first_token(0.1, sent=1, queues=None)
    assert limit.limit == size


@given(
    st.integers(1, 50),
    st.integers(10, 500),
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 600)), max_size=80),
)
def test_no_minute_has_more_than_is_allowed(requests: int, tokens: int, wishes: list[tuple]) -> None:
    now, taken = 0.0, []
    allowance = RateLimit(requests, tokens, now)
    for pause_s, wish in wishes:
        now += pause_s
        wait_s = allowance.wait_s(wish, now)
        if wait_s > 0:
            now += wait_s + 1e-6
            assert allowance.wait_s(wish, now) <= 1e-6
        allowance.take(wish, now)
        taken.append((now, wish))
    for begin, _ in taken:
        within = [wish for at, wish in taken if begin <= at < begin + 60.0]
        assert len(within) <= 2 * requests + 1  # a full bucket, and what flows in meanwhile
        assert sum(within) <= 2 * tokens + max(within)


def test_no_limit_never_waits() -> None:
    allowance = RateLimit(None, None, 0.0)
    allowance.take(10**9, 0.0)
    assert allowance.wait_s(10**9, 0.0) == 0.0
