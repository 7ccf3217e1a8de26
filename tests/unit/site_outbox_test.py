"""The times at which messages are due; merging deltas changes no word."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from site_engine import messages as m
from site_engine.core.request import Finish
from site_engine.errors import Reason
from site_engine.federation.codec import encode
from site_engine.federation.outbox import (
    LOAD_INTERVAL_S,
    MAX_ANSWERS,
    MAX_PREFIXES,
    PREFIXES_INTERVAL_S,
    STREAM_INTERVAL_S,
    Outbox,
)
from tests.support.site_fakes import FakeEngine
from wire.send_pace import LOOP_SHARE

FIGURES = FakeEngine().load()


def delta(attempt_id: str, text: str, count: int, finish: Finish | None = None) -> m.Delta:
    return m.Delta(attempt_id, 0, text, tuple(map(ord, text)), count, finish)


def test_nothing_owed_is_never_due() -> None:
    outbox = Outbox()
    assert outbox.due_s() is None
    assert outbox.take(1.0) == []


def steps(messages: list[m.FromSite]) -> list[list[str]]:
    """The attempts in each Step."""
    return [
        [each.attempt_id for each in message.deltas] for message in messages if isinstance(message, m.Step)
    ]


def test_an_idle_loop_sends_every_iteration() -> None:
    outbox, now, busy_s = Outbox(), 10.0, 3.0
    for count in range(100):
        now, busy_s = now + 0.005, busy_s + 0.002
        outbox.delta(delta("a", "x", count), urgent=False)
        assert steps(outbox.take(now, busy_s)) == [["a"]]
        assert outbox.due_s() is None


def test_a_burst_is_made_up_for_by_the_time_around_it() -> None:
    """A loop that computes for half of the time in all, by turns for a sixth and for five sixths of it."""
    outbox, now, busy_s = Outbox(), 10.0, 3.0
    for count in range(100):
        now, busy_s = now + 0.006, busy_s + (0.005 if count % 2 else 0.001)
        outbox.delta(delta("a", "x", count), urgent=False)
        assert steps(outbox.take(now, busy_s)) == [["a"]]


def test_a_busy_loop_sends_several_iterations_together_and_none_too_late() -> None:
    outbox, now, busy_s, sent = Outbox(), 10.0, 3.0, []
    for count in range(400):
        now, busy_s = now + 0.005, busy_s + 0.005
        outbox.delta(delta("a", "x", count), urgent=False)
        if taken := outbox.take(now, busy_s):
            sent.append((now, len(taken[0].deltas[0].text)))
    waits = [later - before for (before, _), (later, _) in pairwise(sent)]
    assert max(waits) <= STREAM_INTERVAL_S + 0.005
    assert sum(count for _, count in sent[2:]) / len(sent[2:]) > 2


@given(st.floats(0.001, 0.03), st.floats(0.0, 0.01), st.floats(0.0, 0.01), st.floats(0.0, 0.05))
def test_the_loop_keeps_its_share_or_deltas_wait_as_long_as_they_may(
    iteration_s: float, per_iteration_s: float, per_send_s: float, longest_s: float
) -> None:
    """Of a loop that computes so long for every iteration and for every send."""
    outbox, now, busy_s = Outbox(longest_s), 10.0, 0.0
    sends, began = 0, (now, busy_s)
    waits, sent_s = [], now
    for count in range(300):
        now, busy_s = now + iteration_s, busy_s + per_iteration_s
        outbox.delta(delta("a", "x", count), urgent=False)
        due_s = outbox.due_s()
        assert due_s is not None
        assert due_s <= sent_s + longest_s or sent_s == 10.0
        if outbox.take(now, busy_s):
            waits.append(now - sent_s)
            sent_s, busy_s, sends = now, busy_s + per_send_s, sends + 1
    share = (busy_s - began[1]) / (now - began[0])
    if (per_iteration_s + per_send_s) / iteration_s < 0.99 * LOOP_SHARE:
        assert sends == 300, "a loop that has time sends every iteration"
    if share > 1.1 * LOOP_SHARE:
        assert max(waits) >= longest_s * 0.9


def test_a_pause_of_the_loop_is_no_load() -> None:
    outbox = Outbox()
    outbox.delta(delta("a", "x", 1), urgent=False)
    outbox.take(10.0, 5.0)
    outbox.delta(delta("a", "y", 2), urgent=False)
    outbox.take(20.0, 5.1)  # a hundredth of the pause
    outbox.delta(delta("a", "z", 3), urgent=False)
    assert outbox.take(20.005, 5.1)


def test_first_tokens_and_ends_go_at_once_and_alone() -> None:
    outbox = Outbox()
    outbox.delta(delta("a", "w", 0), urgent=False)
    outbox.take(9.95, 0.95)
    outbox.delta(delta("a", "x", 1), urgent=True)
    outbox.take(10.0, 1.0)  # the loop has been busy since, so the next deltas wait
    outbox.delta(delta("a", "y", 2), urgent=False)
    assert outbox.take(10.0, 1.0) == []
    assert outbox.due_s() == 10.0 + STREAM_INTERVAL_S
    outbox.delta(delta("b", "v", 1), urgent=True)
    assert outbox.due_s() == float("-inf")
    assert steps(outbox.take(10.001, 1.0)) == [["b"]]
    outbox.delta(delta("a", "z", 3), urgent=False)
    outbox.delta(delta("b", "w", 2), urgent=False)
    assert outbox.due_s() == 10.0 + STREAM_INTERVAL_S
    outbox.delta(delta("b", "", 2, Finish.STOP), urgent=True)
    assert outbox.take(10.002, 1.0) == [m.Step((delta("b", "w", 2, Finish.STOP),))]
    assert outbox.take(10.0 + STREAM_INTERVAL_S, 1.0) == [m.Step((delta("a", "yz", 3),))]
    assert outbox.due_s() is None


def test_answers_come_before_deltas_and_deltas_before_load() -> None:
    outbox = Outbox()
    outbox.load(m.Load(1, FIGURES))
    outbox.bid(m.Bid())
    outbox.delta(delta("a", "x", 1, Finish.STOP), urgent=True)
    outbox.put(m.Accepted("a", 1))
    kinds = [type(each) for each in outbox.take(0.0)]
    assert kinds == [m.Accepted, m.Step, m.Load, m.Bid]


def test_only_the_latest_load_is_sent_and_not_too_often() -> None:
    outbox = Outbox()
    outbox.load(m.Load(1, FIGURES))
    assert [each.seq for each in outbox.take(5.0)] == [1]
    outbox.load(m.Load(2, FIGURES))
    outbox.load(m.Load(3, FIGURES))
    assert outbox.take(5.0 + LOAD_INTERVAL_S / 2) == []
    assert outbox.due_s() == 5.0 + LOAD_INTERVAL_S
    assert [each.seq for each in outbox.take(5.0 + LOAD_INTERVAL_S)] == [3]


def test_a_new_stream_hears_of_attempts_and_not_of_the_old_stream() -> None:
    outbox = Outbox()
    kept = [m.Accepted("a", 1), m.Rejected("b", Reason.FULL, "full"), m.Released("r", ("c",))]
    for message in (m.Pong(1, 0.0), *kept, m.Draining("why")):
        outbox.put(message)
    outbox.load(m.Load(1, FIGURES))
    outbox.bid(m.Bid())
    outbox.stream_lost()
    assert outbox.take(0.0) == kept


def test_it_says_when_nobody_reads() -> None:
    outbox = Outbox()
    for nonce in range(MAX_ANSWERS):
        assert not outbox.full
        outbox.put(m.Pong(nonce, 0.0))
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


def test_prompts_of_other_gateways_are_told_once_a_second_and_only_when_there_are_some() -> None:
    outbox = Outbox()
    hashes = [number.to_bytes(16) for number in range(3 * MAX_PREFIXES)]
    outbox.prefixes(hashes[:1])
    assert outbox.take(10.0) == [m.Prefixes(hashes[0])]
    assert outbox.due_s() is None
    outbox.prefixes(hashes)
    outbox.prefixes(hashes[-2:-1])
    assert outbox.take(10.5) == []
    assert outbox.due_s() == 10.0 + PREFIXES_INTERVAL_S
    (told,) = outbox.take(10.0 + PREFIXES_INTERVAL_S)
    newest = [*hashes[-MAX_PREFIXES:-2], hashes[-1], hashes[-2]]
    assert told == m.Prefixes(b"".join(newest)), "the newest, each once"
    (sent,) = encode(told)
    assert sent.ByteSize() <= 1024
    assert outbox.take(100.0) == []
    outbox.prefixes(hashes[:1])
    outbox.stream_lost()
    assert outbox.take(200.0) == []


def test_the_models_leave_before_the_answer_to_the_order_that_changed_them() -> None:
    """Else the next order, for the model that was added, is refused by the gateway."""
    outbox = Outbox()
    first, second, third = (m.Models(()) for _ in range(3))
    outbox.models(first)
    assert outbox.take(1.0) == [first]
    outbox.models(second)
    assert outbox.take(1.1) == []
    outbox.models(third)
    outbox.put(m.Ordered("a"))
    assert outbox.take(1.2) == [third, m.Ordered("a")]
    assert outbox.due_s() is None
