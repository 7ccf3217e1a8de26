"""The times at which messages are due; merging deltas changes no word."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from site_engine import messages as m
from site_engine.core.request import Finish
from site_engine.errors import Reason
from site_engine.federation.outbox import LOAD_INTERVAL_S, MAX_ANSWERS, STEP_INTERVAL_S, Outbox
from tests.support.site_fakes import FakeEngine

FIGURES = FakeEngine().load()


def delta(attempt_id: str, text: str, count: int, finish: Finish | None = None) -> m.Delta:
    return m.Delta(attempt_id, 0, text, tuple(map(ord, text)), count, finish)


def test_nothing_owed_is_never_due() -> None:
    outbox = Outbox()
    assert outbox.due_s() is None
    assert outbox.take(1.0) == []


def test_first_tokens_go_at_once_and_the_next_wait() -> None:
    outbox = Outbox()
    outbox.delta(delta("a", "x", 1), urgent=True)
    assert [type(each) for each in outbox.take(10.0)] == [m.Step]
    outbox.delta(delta("a", "y", 2), urgent=False)
    assert outbox.take(10.0) == []
    assert outbox.due_s() == 10.0 + STEP_INTERVAL_S
    outbox.delta(delta("a", "z", 3), urgent=False)
    assert outbox.take(10.0 + STEP_INTERVAL_S) == [m.Step((delta("a", "yz", 3),))]
    assert outbox.due_s() is None


def test_answers_come_before_deltas_and_deltas_before_load() -> None:
    outbox = Outbox()
    outbox.load(m.Load(1, 0.0, FIGURES))
    outbox.bid(m.Bid("b", 1, 2, 3.0))
    outbox.delta(delta("a", "x", 1, Finish.STOP), urgent=True)
    outbox.put(m.Accepted("a", 1, 0, 1))
    kinds = [type(each) for each in outbox.take(0.0)]
    assert kinds == [m.Accepted, m.Step, m.Load, m.Bid]


def test_only_the_latest_load_is_sent_and_not_too_often() -> None:
    outbox = Outbox()
    outbox.load(m.Load(1, 0.0, FIGURES))
    assert [each.seq for each in outbox.take(5.0)] == [1]
    outbox.load(m.Load(2, 0.0, FIGURES))
    outbox.load(m.Load(3, 0.0, FIGURES))
    assert outbox.take(5.0 + LOAD_INTERVAL_S / 2) == []
    assert outbox.due_s() == 5.0 + LOAD_INTERVAL_S
    assert [each.seq for each in outbox.take(5.0 + LOAD_INTERVAL_S)] == [3]


def test_a_new_stream_hears_of_attempts_and_not_of_the_old_stream() -> None:
    outbox = Outbox()
    kept = [m.Accepted("a", 1, 0, 1), m.Rejected("b", Reason.FULL, "full"), m.Released("r", ("c",))]
    for message in (m.Pong(1, 0.0, 0.0), *kept, m.Draining("why", 1.0)):
        outbox.put(message)
    outbox.load(m.Load(1, 0.0, FIGURES))
    outbox.bid(m.Bid("b", 1, 2, 3.0))
    outbox.stream_lost()
    assert outbox.take(0.0) == kept


def test_it_says_when_nobody_reads() -> None:
    outbox = Outbox()
    for nonce in range(MAX_ANSWERS):
        assert not outbox.full
        outbox.put(m.Pong(nonce, 0.0, 0.0))
    assert outbox.full
    outbox.take(0.0)
    assert not outbox.full


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.text("xyz", max_size=3), st.booleans()), max_size=300),
    st.floats(0.001, 0.1),
)
def test_pieces_joined_equal_the_whole(parts: list[tuple[str, str, bool]], step_s: float) -> None:
    outbox, now, got = Outbox(), 0.0, dict.fromkeys("abc", "")
    sent: list[m.Delta] = []
    for attempt_id, text, reads in parts:
        outbox.delta(delta(attempt_id, text, 0), urgent=False)
        now += step_s
        if reads:
            sent += [each for message in outbox.take(now) for each in message.deltas]
    sent += [each for message in outbox.take(float("inf")) for each in message.deltas]
    for each in sent:
        got[each.attempt_id] += each.text
        assert "".join(map(chr, each.token_ids)) == each.text
    assert got == {name: "".join(text for to, text, _ in parts if to == name) for name in "abc"}
