"""Load figures of a site in front of a server: they never make it look idler than it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from site_engine.core.remaining_curve import RemainingCurve, RemainingPoint
from site_engine.core.request import Lane, Request, Sampling
from site_engine.remote.dialects import DIALECTS
from site_engine.remote.engine import SILENT_AFTER_S, RemoteEngine, ServerProfile
from site_engine.remote.load import Throughput, load_figures
from site_engine.remote.prometheus import ServerLoad
from site_engine.remote.queue import RemoteQueue, RemoteRequest
from site_engine.remote.request import HttpRequest
from tests.support.site_fakes import FakeClock

CURVE = RemainingCurve((RemainingPoint(0, 30.0, 50),))
CAPACITY = 10_000


def request(name: str, now: float = 0.0, **of_choice: object) -> RemoteRequest:
    choice = Request(name, (), Sampling(max_tokens=40), CURVE, **of_choice)
    return RemoteRequest((choice,), HttpRequest("/", {}), 10, now, lambda _: None)


def queue_of(pending: int, sent: int) -> RemoteQueue:
    queue = RemoteQueue()
    for number in range(pending + sent):
        queue.add(request(str(number), float(number)))
    for _ in range(sent):
        queue.pop(0.0)
    return queue


@given(
    st.integers(0, 20),
    st.integers(0, 20),
    st.none()
    | st.builds(
        ServerLoad, st.integers(0, 40), st.none() | st.integers(0, 40), st.none() | st.floats(0, 1), st.none()
    ),
)
def test_what_is_here_counts_even_if_the_page_does_not_show_it(
    pending: int, sent: int, server: ServerLoad | None
) -> None:
    found = load_figures(queue_of(pending, sent), server, Throughput(0.0), CAPACITY)
    assert found.running + found.pending >= pending + sent
    assert found.pending >= pending
    assert (found.token_load > 0) == (found.running + found.pending > 0)
    assert len(found.running_remaining) * found.running_weight >= found.running
    assert 0 <= found.kv_free_tokens <= CAPACITY
    assert found.token_load >= pending * (10 + 30)


def test_prompts_that_were_sent_are_unread_until_their_first_token() -> None:
    queue = queue_of(2, 3)
    assert load_figures(queue, None, Throughput(0.0), CAPACITY).unread_tokens == 3 * 10
    next(iter(queue.sent)).first_s = 1.0
    assert load_figures(queue, None, Throughput(0.0), CAPACITY).unread_tokens == 2 * 10 + 1


def test_at_rest_everything_is_zero() -> None:
    found = load_figures(RemoteQueue(), ServerLoad(0, 0, 0.0), Throughput(0.0), CAPACITY)
    assert (found.running, found.pending, found.token_load, found.kv_reserved_tokens) == (0, 0, 0.0, 0)
    assert found.unread_tokens == 0
    assert found.kv_free_tokens == CAPACITY


def test_chats_go_before_batches_and_a_lower_priority_before_a_higher() -> None:
    queue = RemoteQueue()
    for name, lane, priority in (("late", Lane.BATCH, 0), ("b", Lane.CHAT, 1), ("a", Lane.CHAT, 0)):
        queue.add(request(name, lane=lane, priority=priority))
    assert [queue.pop(0.0).first.id for _ in range(3)] == ["a", "b", "late"]


def test_speed_is_measured_while_it_works_and_survives_a_restart_of_the_server() -> None:
    throughput = Throughput(0.0)
    throughput.sample(1.0, 1000, working=True)  # what it did before is not ours to time
    throughput.sample(2.0, 1100, working=True)
    assert 49 < throughput.tokens_per_s <= 100
    before = throughput.tokens_per_s
    throughput.sample(60.0, 1100, working=False)
    throughput.sample(61.0, 5, working=True)  # its counter began again
    assert throughput.tokens_per_s == before
    throughput.tokens_total = 50
    throughput.sample(62.0, None, working=True)  # its page is gone: the own count takes over, from here on
    assert throughput.tokens_per_s <= before


def test_the_pace_of_a_stream_is_learned_from_answers() -> None:
    throughput = Throughput(0.0)
    for _ in range(50):
        throughput.observe_decode(rows=4, kv_tokens=400, tokens=11, seconds=0.2)
        throughput.observe_prefill(rows=4, prompt_tokens=100, kv_tokens=400, seconds=0.06)
    throughput.observe_decode(rows=4, kv_tokens=400, tokens=1, seconds=9.0)  # one token has no gaps
    assert abs(throughput.seconds_per_token - 0.02) < 1e-9
    cost = throughput.fit.cost()
    assert 0.01 < cost.seconds(4, 4, 400) < 0.03
    assert cost.seconds(4, 104, 400) > cost.seconds(4, 4, 400)


class Silence:
    """A remote engine whose server holds the given requests, the first so many of them begun."""

    def __init__(self, *, sent: int, begun: int, prompt_tokens: int = 10) -> None:
        self.clock = FakeClock(0.0)
        profile = ServerProfile({"m": "m"}, DIALECTS[0], 1000, CAPACITY, slots=8, max_pending=8)
        self.engine = RemoteEngine(object(), profile, self.clock)  # type: ignore[arg-type] - nothing is sent
        self.engine._received_s = 0.0
        for number in range(sent):
            self.engine.queue.add(request(str(number)))
            taken = self.engine.queue.pop(0.0)
            taken.prompt_tokens, taken.first_s = prompt_tokens, 0.0 if number < begun else None

    def until_stalled(self, within_s: float) -> float | None:
        """Return when the silence counts as a stall."""
        while self.clock.now < within_s:
            self.clock.now += 0.25
            if self.engine.stalled_s():
                return self.clock.now
        return None


def test_a_server_that_falls_silent_in_all_that_it_has_begun_has_stalled() -> None:
    assert Silence(sent=2, begun=2).until_stalled(60.0) == SILENT_AFTER_S + 0.25


def test_a_server_that_has_begun_nothing_may_think() -> None:
    assert Silence(sent=3, begun=0).until_stalled(300.0) is None


def test_a_server_that_reads_a_long_prompt_has_the_time_that_it_takes() -> None:
    busy = Silence(sent=3, begun=2, prompt_tokens=1_000)
    for _ in range(50):
        busy.engine._throughput.observe_prefill(rows=1, prompt_tokens=1_000, kv_tokens=0, seconds=10.0)
    stalled_s = busy.until_stalled(120.0)
    assert stalled_s
    assert stalled_s > SILENT_AFTER_S + 15.0
