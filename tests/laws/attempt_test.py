"""Laws of one live attempt and of a link's bookkeeping, under any interleaving."""

from __future__ import annotations

import asyncio
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from gateway.decision import Decision
from gateway.domain import Caller, Delta, Finish, Model, Query, Sampling, SiteIdentity
from gateway.failure import AttemptFailure, FailureCause
from gateway.federation.answer_limits import AnswerLimits
from gateway.federation.attempt import AttemptFailed, LiveAttempt
from gateway.federation.directory import Directory
from gateway.federation.link import Link
from gateway.federation.offloading import ROUND_TIMEOUT_S, Offloading
from gateway.federation.stream_pace import StreamPace
from gateway.routing.demand import Demand
from predictor.forecast import Forecast
from wire import federation_pb2 as pb

WAIT_S = 30.0
IDENTITY = SiteIdentity("s", "b", "c", "r", {}, slots=4, kv_capacity_tokens=100)
FORECAST = Forecast((0, 10), (1.0,), "test")
DEMAND = Demand("m", 5, 5.0, 10)


def decision(attempt_id: str) -> Decision:
    return Decision("q", attempt_id, "s", "mico", "test", (), {}, 0.0)


def live(choices: int, pace: StreamPace | None = None) -> LiveAttempt:
    return LiveAttempt(
        decision=decision("a"),
        demand=DEMAND,
        site=IDENTITY,
        choices=choices,
        moves=0,
        on_cancel=lambda _: None,
        limits=AnswerLimits(10, 10, 1000),
        pace=pace or StreamPace(),
    )


texts = st.lists(st.text(max_size=3), min_size=1, max_size=12)


@given(st.lists(texts, min_size=1, max_size=3), st.data())
def test_pieces_joined_equal_the_whole_however_slow_the_reader(
    choices: list[list[str]], data: st.DataObject
) -> None:
    async def scenario() -> None:
        attempt = live(len(choices))
        left = {index: list(enumerate(parts, 1)) for index, parts in enumerate(choices)}
        got = dict.fromkeys(left, "")
        finished: list[int] = []
        while any(left.values()):
            index = data.draw(st.sampled_from([i for i, parts in left.items() if parts]))
            number, text = left[index].pop(0)
            finish = None if left[index] else Finish.STOP
            attempt.feed(Delta(index, text, number, (number,), finish))
            if data.draw(st.booleans()):
                _take(await attempt.next(), got, finished)
        while deltas := await attempt.next():
            _take(deltas, got, finished)
        assert got == {index: "".join(parts) for index, parts in enumerate(choices)}
        assert sorted(finished) == list(range(len(choices)))
        assert attempt.completion_tokens == sum(map(len, choices))

    asyncio.run(scenario())


class CountedText(str):
    """Counts the characters that are copied where texts are joined."""

    copied = 0

    def __add__(self, other: str) -> CountedText:
        joined = CountedText(str.__add__(self, other))
        CountedText.copied += len(joined)
        return joined


def test_what_is_not_read_is_merged_in_time_that_its_length_bounds() -> None:
    """A reader that stands still would cost the square of its answer, were it copied for each delta."""

    async def scenario() -> None:
        attempt, count, CountedText.copied = live(1), 4_096, 0
        for number in range(1, count + 1):
            attempt.feed(Delta(0, CountedText("x"), number, (number,)))
        (delta,) = await attempt.next()
        assert (delta.text, len(delta.token_ids)) == (count * "x", count)
        assert CountedText.copied <= count * (count.bit_length() + 1)

    asyncio.run(scenario())


def _take(deltas: list[Delta], got: dict[int, str], finished: list[int]) -> None:
    for delta in deltas:
        got[delta.index] += delta.text
        if delta.finish is not None:
            finished.append(delta.index)


def test_what_came_before_a_break_is_handed_out_before_the_break() -> None:
    async def scenario() -> None:
        attempt = live(1)
        attempt.feed(Delta(0, "half", 2))
        attempt.fail(AttemptFailure("s", FailureCause.LOST, "gone"))
        attempt.feed(Delta(0, " too late", 4))
        assert [delta.text for delta in await attempt.next()] == ["half"]
        try:
            await attempt.next()
        except AttemptFailed as exc:
            assert exc.failure.cause is FailureCause.LOST
        else:
            raise AssertionError("the break was swallowed")

    asyncio.run(scenario())


class Paced:
    """A pace with clocks that the test moves, and the attempts that it wakes."""

    def __init__(self, longest_s: float = 0.02) -> None:
        self.now = self.busy_s = 0.0
        self.pace = StreamPace(longest_s, lambda: self.now, lambda: self.busy_s)
        self.woken: list[str] = []
        self.readers = {name: partial(self._woken, name) for name in "ab"}
        self.changed = asyncio.Event()

    def _woken(self, name: str) -> None:
        self.woken.append(name)
        self.changed.set()

    def step(self, elapsed_s: float, computed_s: float, names: str = "ab") -> list[str]:
        self.now, self.busy_s = self.now + elapsed_s, self.busy_s + computed_s
        self.woken.clear()
        self.pace.begin()
        for name in names:
            self.pace.wake(self.readers[name])
        return list(self.woken)


def test_readers_are_woken_by_every_message_while_the_loop_has_time() -> None:
    paced = Paced()
    assert all(paced.step(0.005, 0.0024) == ["a", "b"] for _ in range(50))


def test_readers_wait_for_one_another_while_the_loop_is_busy() -> None:
    async def scenario() -> None:
        paced = Paced()
        assert paced.step(0.005, 0.0) == ["a", "b"]
        assert paced.step(0.02, 0.02) == ["a", "b"], "it was idle until now"
        assert paced.pace.is_busy
        assert paced.step(0.005, 0.005) == []
        assert paced.step(0.003, 0.003, "b") == []
        paced.now += 0.02
        assert not paced.pace.is_busy, "text that comes now waits no longer"
        paced.changed.clear()
        await asyncio.wait_for(paced.changed.wait(), WAIT_S)
        assert paced.woken == ["a", "b"], "each once"

    asyncio.run(scenario())


def test_first_text_and_ends_wake_their_reader_at_once() -> None:
    async def scenario() -> None:
        paced = Paced(longest_s=100.0)
        paced.step(200.0, 0.0)
        paced.step(100.0, 100.0)  # from now on text waits
        paced.step(1.0, 1.0)
        attempt = live(1, paced.pace)
        attempt.feed(Delta(0, "first", 1))
        assert [each.text for each in await asyncio.wait_for(attempt.next(), WAIT_S)] == ["first"]
        reading = asyncio.create_task(attempt.next())
        await asyncio.sleep(0)
        attempt.feed(Delta(0, "then", 2))
        await asyncio.sleep(0)
        assert not reading.done()
        attempt.feed(Delta(0, ", last", 3, finish=Finish.STOP))
        assert [each.text for each in await asyncio.wait_for(reading, WAIT_S)] == ["then, last"]

    asyncio.run(scenario())


class Bookkeeping:
    """A link driven message by message, beside the simplest model of what its credit must be."""

    def __init__(self) -> None:
        self.directory = Directory()
        self.directory.join(IDENTITY, 0.0)
        self.link = Link(IDENTITY, self.directory, Offloading({}, self.directory, lambda: 0.0), lambda: 0.0)
        self.assigned: set[str] = set()
        self.accepted: set[str] = set()
        self.seq = 0

    def assign(self, name: str) -> None:
        query = Query(name, "m", "hi", Sampling(), Caller("k", "t"), 0.0, 100.0)
        self.link.assign(query, decision(name), DEMAND, FORECAST)
        self.assigned.add(name)

    def accept(self, name: str) -> None:
        self.link.receive(pb.SiteMessage(accepted=pb.Accepted(attempt_id=name, prompt_tokens=5)))
        self.accepted.add(name)

    def end(self, name: str) -> None:
        delta = pb.Delta(attempt_id=name, finish=pb.Delta.STOP, completion_tokens=1)
        self.link.receive(pb.SiteMessage(step=pb.Step(deltas=[delta])))
        self.assigned.discard(name)

    def reject(self, name: str) -> None:
        self.link.receive(pb.SiteMessage(rejected=pb.Rejected(attempt_id=name, reason=pb.Rejected.FULL)))
        self.assigned.discard(name)

    def report(self, _: str) -> None:
        self.seq += 1
        self.link.receive(pb.SiteMessage(load=pb.Load(seq=self.seq)))
        self.assigned -= self.accepted

    @property
    def credit(self) -> int:
        return self.directory.sites[0].credit.requests


steps = st.lists(
    st.tuples(st.sampled_from(["assign", "accept", "end", "reject", "report"]), st.integers(0, 9))
)


@given(steps)
def test_credit_is_what_was_assigned_and_no_report_covers(happened: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        book = Bookkeeping()
        seen: set[str] = set()
        for what, number in happened:
            name = f"q{number}"
            if what == "assign":
                if name in seen:
                    continue
                seen.add(name)
            getattr(book, what)(name)
            if what == "accept" and name not in seen:
                book.accepted.discard(name)
            assert book.credit == len(book.assigned & seen)
        book.link.close("over")
        assert book.credit == 0
        assert book.link.live == 0

    asyncio.run(scenario())


def test_a_link_that_was_closed_changes_nothing_of_the_site_that_joined_again() -> None:
    async def scenario() -> None:
        book = Bookkeeping()
        older = book.link
        older.close("the site joined again")
        book.directory.join(IDENTITY, 1.0)
        book.link = Link(IDENTITY, book.directory, Offloading({}, book.directory, lambda: 1.0), lambda: 1.0)
        book.report("")
        book.assign("new")
        before = book.directory.sites
        older.receive(pb.SiteMessage(load=pb.Load(seq=9, pending=99)))
        older.receive(pb.SiteMessage(bye=pb.Bye(reason="over")))
        assert book.directory.sites == before
        assert book.credit == 1

    asyncio.run(scenario())


def test_what_waited_at_sites_that_left_is_forgotten() -> None:
    """Machines of a pool come and go, each under a name of its own."""

    async def scenario() -> None:
        now_s = 0.0
        directory, links = Directory(), dict[str, Link]()
        offloading = Offloading(links, directory, lambda: now_s)
        asked: list[int] = []

        def joined(name: str, *running: int) -> Link:
            model = Model("m", "r", 1024, 0, "o", frozenset())
            identity = SiteIdentity(name, "b", "c", "r", {"m": model}, slots=1, kv_capacity_tokens=10_000)
            directory.join(identity, now_s)
            links[name] = Link(identity, directory, offloading, lambda: now_s)
            report(name, *running)
            return links[name]

        def report(name: str, *running: int) -> None:
            cost = pb.IterationCost(base_s=0.02)
            load = pb.Load(seq=1, kv_free_tokens=9_000, iteration=cost, running=len(running))
            load.running_remaining.extend(running)
            links[name].receive(pb.SiteMessage(load=load))

        joined("idle")
        for number in range(3):
            query = Query(f"q{number}", "m", "hi", Sampling(), Caller("k", "t"), 0.0, 100.0)
            busy = joined(f"busy-{number}", 200)
            attempt = busy.assign(query, decision(query.id), DEMAND, FORECAST)
            busy.receive(pb.SiteMessage(accepted=pb.Accepted(attempt_id=attempt.id, prompt_tokens=5)))
            now_s += 2 * ROUND_TIMEOUT_S
            directory.join(links["idle"].identity, now_s)
            report("idle")
            asked.append(len(offloading._rounds))
            busy.close("it was no longer needed")
            directory.leave(links.popitem()[0])
        assert asked == [1, 1, 1]
        now_s += 2 * ROUND_TIMEOUT_S
        offloading.bid("idle")
        assert (len(offloading._rounds), len(offloading._offers)) == (0, 0)

    asyncio.run(scenario())
