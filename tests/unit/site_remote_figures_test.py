"""Load figures of a site in front of a server: they never make it look idler than it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from site_engine.core.request import Lane, RemainingCurve, RemainingPoint, Request, Sampling
from site_engine.remote.load import Pace, figures
from site_engine.remote.prometheus import Busy
from site_engine.remote.queue import Held, Holding
from site_engine.remote.request import Asking

CURVE = RemainingCurve((RemainingPoint(0, 30.0, 50),))
CAPACITY = 10_000


def held(name: str, now: float = 0.0, **of_request: object) -> Held:
    request = Request(name, (), Sampling(max_tokens=40), CURVE, **of_request)
    return Held((request,), Asking("/", {}), 10, now, lambda _: None)


def holding(pending: int, sent: int) -> Holding:
    these = Holding()
    for number in range(pending + sent):
        these.add(held(str(number), float(number)))
    for _ in range(sent):
        these.begin(0.0)
    return these


@given(
    st.integers(0, 20),
    st.integers(0, 20),
    st.none()
    | st.builds(
        Busy, st.integers(0, 40), st.none() | st.integers(0, 40), st.none() | st.floats(0, 1), st.none()
    ),
)
def test_what_is_here_counts_even_if_the_page_does_not_show_it(
    pending: int, sent: int, busy: Busy | None
) -> None:
    found = figures(holding(pending, sent), busy, Pace(0.0), CAPACITY)
    assert found.running + found.pending >= pending + sent
    assert found.pending >= pending
    assert (found.token_load > 0) == (found.running + found.pending > 0)
    assert len(found.running_remaining) * found.running_weight >= found.running
    assert 0 <= found.kv_free_tokens <= CAPACITY
    assert found.token_load >= pending * (10 + 30)


def test_prompts_that_were_sent_are_unread_until_their_first_token() -> None:
    these = holding(2, 3)
    assert figures(these, None, Pace(0.0), CAPACITY).unread_tokens == 3 * 10
    next(iter(these.sent)).first_s = 1.0
    assert figures(these, None, Pace(0.0), CAPACITY).unread_tokens == 2 * 10 + 1


def test_at_rest_everything_is_zero() -> None:
    found = figures(Holding(), Busy(0, 0, 0.0), Pace(0.0), CAPACITY)
    assert (found.running, found.pending, found.token_load, found.kv_reserved_tokens) == (0, 0, 0.0, 0)
    assert found.unread_tokens == 0
    assert found.kv_free_tokens == CAPACITY


def test_chats_go_before_batches_and_a_lower_priority_before_a_higher() -> None:
    these = Holding()
    for name, lane, priority in (("late", Lane.BATCH, 0), ("b", Lane.CHAT, 1), ("a", Lane.CHAT, 0)):
        these.add(held(name, lane=lane, priority=priority))
    assert [these.begin(0.0).request.id for _ in range(3)] == ["a", "b", "late"]


def test_speed_is_measured_while_it_works_and_survives_a_restart_of_the_server() -> None:
    pace = Pace(0.0)
    pace.look(1.0, 1000, working=True)  # what it did before is not ours to time
    pace.look(2.0, 1100, working=True)
    assert 49 < pace.tokens_per_s <= 100
    before = pace.tokens_per_s
    pace.look(60.0, 1100, working=False)
    pace.look(61.0, 5, working=True)  # its counter began again
    assert pace.tokens_per_s == before
    pace.tokens_total = 50
    pace.look(62.0, None, working=True)  # its page is gone: the own count takes over, from here on
    assert pace.tokens_per_s <= before


def test_the_pace_of_a_stream_is_learned_from_answers() -> None:
    pace = Pace(0.0)
    for _ in range(50):
        pace.ended(rows=4, kv_tokens=400, tokens=11, seconds=0.2)
        pace.began(rows=4, prompt_tokens=100, kv_tokens=400, seconds=0.06)
    pace.ended(rows=4, kv_tokens=400, tokens=1, seconds=9.0)  # one token has no gaps
    assert abs(pace.seconds_per_token - 0.02) < 1e-9
    cost = pace.fit.cost()
    assert 0.01 < cost.seconds(4, 4, 400) < 0.03
    assert cost.seconds(4, 104, 400) > cost.seconds(4, 4, 400)
