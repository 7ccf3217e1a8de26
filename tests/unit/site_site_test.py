"""A site between gateways and engine: its bids for work, its load reports, its refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from site_engine import messages as m
from site_engine.core.request import Finish, Output, Sampling
from site_engine.engine_client import LoadSeen, Prepared
from site_engine.errors import Reason
from site_engine.federation.connection import MAX_GRACE_S, Connection
from site_engine.federation.load_reports import BID_INTERVAL_S, STUCK_AFTER_S
from site_engine.federation.report_pace import REPORT_EVERY_S
from site_engine.federation.site import Site
from tests.support.site_fakes import HELLO, FakeClock, FakeEngine


class QuietEngine:
    """Notes what it is asked and never answers."""

    def __init__(self) -> None:
        self.tenants: list[str] = []  # of the prompts that wait
        self.counts: list[tuple[Callable[[object], None], Callable[[], bool]]] = []
        self.loads_asked = 0
        self.cancelled: list[str] = []
        self.still_s = 0.0

    @property
    def waiting(self) -> int:
        return len(self.tenants)

    def waiting_of(self, tenant: str) -> int:
        return self.tenants.count(tenant)

    def prepare(
        self, assign: m.Assign, reply: Callable[[object], None], is_wanted: Callable[[], bool]
    ) -> None:
        self.tenants.append(assign.tenant)

    def count(self, assign: m.Assign, reply: Callable[[object], None], is_wanted: Callable[[], bool]) -> None:
        self.counts.append((reply, is_wanted))

    def submit(self, prepared: object, group: Sequence[object], reply: Callable[[object], None]) -> None: ...
    def release(self, groups: Sequence[object], reply: Callable[[list[bool]], None]) -> None: ...
    def cancel(self, request_ids: Sequence[str]) -> None:
        self.cancelled += request_ids

    def request_load(self) -> None:
        self.loads_asked += 1

    def stalled_s(self) -> float:
        return self.still_s


class Scene:
    def __init__(self, max_preparing: int = 1) -> None:
        self.clock, self.engine = FakeClock(), QuietEngine()
        self.stuck: list[str] = []
        self.site = Site(HELLO, self.engine, self.clock, max_preparing, on_stuck=self.stuck.append)

    def link(self, gateway: str = "east", grace_s: float = 1.0, protocol: int = 2, reads_models: bool = True):
        hello = self.site.hello()
        welcome = m.Welcome(gateway, (), 1.0, grace_s, (), protocol=protocol, reads_models=reads_models)
        return self.site.welcomed(hello, welcome, lambda: None)

    def load(self, *, running: int = 0, pending: int = 0) -> None:
        figures = FakeEngine().load()._replace(running=running, pending=pending)
        self.site.load(LoadSeen(figures, self.clock.now))


def bids(connection) -> list[m.Bid]:
    return [each for each in connection.attempts.outbox.take(float("inf")) if isinstance(each, m.Bid)]


def assign(attempt_id: str, tenant: str = "") -> m.Assign:
    return m.Assign(
        attempt_id, "q", "letters", m.TextPrompt("a"), Sampling(), 1, False, None, 0, 0, None, tenant
    )


def test_a_bid_is_made_once_each_time_that_room_appears() -> None:
    scene = Scene()
    connection = scene.link()
    scene.load()
    assert len(bids(connection)) == 1
    scene.clock.now += BID_INTERVAL_S
    scene.load(running=1)
    assert bids(connection) == []  # there was room before
    scene.load(running=2)
    scene.load(running=1)
    assert len(bids(connection)) == 1
    scene.load(running=2)
    scene.load(running=1)
    assert bids(connection) == []  # too soon
    scene.clock.now += BID_INTERVAL_S
    scene.load(running=1)
    assert len(bids(connection)) == 1


@pytest.mark.parametrize("figures", [{"pending": 1}, {"running": HELLO.slots}])
def test_who_has_no_room_does_not_bid(figures: dict[str, int]) -> None:
    scene = Scene()
    connection = scene.link()
    scene.load()
    scene.load(**figures)  # takes back the bid that was not sent
    assert bids(connection) == []


def test_who_drains_does_not_bid() -> None:
    scene = Scene()
    connection = scene.link()
    scene.site.drain("why")
    scene.load()
    assert bids(connection) == []


def test_a_load_is_asked_for_when_none_came_for_a_second() -> None:
    scene = Scene()
    scene.link()
    scene.load()
    scene.site.tick()
    assert scene.engine.loads_asked == 1, "when linked"
    scene.clock.now += REPORT_EVERY_S
    scene.site.tick()
    assert scene.engine.loads_asked == 2


def loads(connection) -> list[m.Load]:
    return [each for each in connection.attempts.outbox.take(float("inf")) if isinstance(each, m.Load)]


def test_a_site_says_that_it_is_there_while_its_engine_says_nothing() -> None:
    """To gateways that may ping it rarely, and not as an answer to any ping."""
    scene = Scene()
    older, newer = scene.link("older", protocol=2), scene.link("newer", protocol=3)
    scene.load(running=1)
    loads(older), loads(newer)
    said = []
    for _ in range(16):
        scene.clock.now += 0.25
        scene.site.tick()
        said += [(each, scene.clock.now) for each in newer.attempts.outbox.take(float("inf"))]
    assert [(type(each), each.nonce, at_s) for each, at_s in said] == [
        (m.Pong, 0, 101.5),
        (m.Pong, 0, 103.0),
    ]
    assert older.attempts.outbox.take(float("inf")) == []


def test_to_a_gateway_with_many_sites_a_site_says_less_until_there_is_work_of_that_gateway() -> None:
    scene = Scene(max_preparing=2)
    idle, waits = scene.link("idle", protocol=3), scene.link("waits", protocol=3)
    for each in (idle, waits):
        each.paced(m.ReportPace(every_s=4))
    scene.load(running=1)
    scene.site.receive(waits, assign("a"))
    loads(idle), loads(waits)
    said: dict[str, list[float]] = {"idle": [], "waits": []}
    for _ in range(20):
        scene.clock.now += 0.25
        scene.site.tick()
        for each in (idle, waits):
            said[each.gateway] += [scene.clock.now - 100.0 for _ in each.attempts.outbox.take(float("inf"))]
    assert said == {"idle": [4.5], "waits": [1.5, 3.0, 4.5]}
    assert scene.engine.loads_asked == 7, "two when linked, and from the fourth second on"


def test_each_gateway_gets_reports_as_seldom_as_it_asks_for() -> None:
    scene = Scene()
    small, large = scene.link("small"), scene.link("large")

    def reports_after(seconds: float) -> bool:
        scene.load()
        loads(large)
        scene.clock.now += seconds
        scene.load()
        return bool(loads(large))

    large.paced(m.ReportPace(1, 10**9))
    assert not reports_after(15.0)
    assert loads(small), "it has asked for nothing, and gets one each second"
    assert reports_after(16.0), "no gateway can ask for next to none"
    large.paced(m.ReportPace(0, 0))
    assert reports_after(1.0)


@pytest.mark.parametrize(
    "event", [Connection.admitted, lambda connection: connection.ended(1), Connection.drop_report]
)
def test_a_report_that_waits_while_what_it_counts_changes_is_not_sent(
    event: Callable[[Connection], None],
) -> None:
    """It would be read after Accepted, or after the end, as one that knows of it. The next one is sent."""
    scene = Scene()
    connection = scene.link()
    scene.load(running=1)
    event(connection)
    assert loads(connection) == []
    scene.load(running=1)
    assert [each.figures.running for each in loads(connection)] == [1]
    scene.load(running=1)
    assert loads(connection) == []


def test_an_engine_that_stalls_is_reported_every_second_until_it_moves() -> None:
    scene = Scene()
    connection = scene.link()
    scene.load(running=1)
    assert [each.stalled_s for each in loads(connection)] == [0.0]
    scene.engine.still_s = 2.5
    scene.site.tick()
    (report,) = loads(connection)
    assert (report.stalled_s, report.figures.running) == (2.5, 1)
    scene.site.tick()
    assert loads(connection) == []
    scene.clock.now += REPORT_EVERY_S
    scene.engine.still_s = 3.5
    scene.site.tick()
    assert [each.stalled_s for each in loads(connection)] == [3.5]
    scene.engine.still_s = 0.0
    scene.load(running=1)
    scene.site.tick()
    assert [each.stalled_s for each in loads(connection)] == [0.0]
    assert scene.stuck == []


def test_a_gateway_that_does_not_know_stalls_gets_no_report_that_looks_fresh() -> None:
    scene = Scene()
    older = scene.link(protocol=1)
    scene.load(running=1)
    loads(older)
    scene.engine.still_s = 2.5
    scene.site.tick()
    assert loads(older) == []


def test_a_site_whose_engine_does_not_come_back_is_to_be_started_again() -> None:
    scene = Scene()
    scene.load(running=1)
    scene.engine.still_s = STUCK_AFTER_S - 1
    scene.site.tick()
    assert scene.stuck == []
    scene.engine.still_s = STUCK_AFTER_S
    scene.site.tick()
    assert scene.stuck == ["it has not moved for 120 s"]


def test_reports_rise_over_all_gateways() -> None:
    scene = Scene()
    east, west = scene.link("east"), scene.link("west")
    scene.load()
    scene.load(running=1)
    seqs = [
        each.seq
        for connection in (east, west)
        for each in connection.attempts.outbox.take(float("inf"))
        if isinstance(each, m.Load)
    ]
    assert seqs == [2, 2]


def test_a_second_stream_to_a_replica_takes_the_place_of_the_first() -> None:
    scene = Scene()
    first = scene.link("east")
    scene.site.receive(first, assign("a"))
    second = scene.link("east")
    assert first.displaced
    assert scene.site.live == 0  # the gateway has given it up with the first stream
    scene.site.lost(first)
    assert scene.site.linked == {"east"}
    scene.site.lost(second)
    assert scene.site.linked == set()


def test_what_a_gateway_was_not_told_of_is_not_kept_for_it() -> None:
    scene = Scene()
    first = scene.link("east", grace_s=50.0)
    scene.site.receive(first, assign("a"))
    hello = scene.site.hello()  # of a stream that is opened while the first is up
    scene.site.lost(first)
    second = scene.site.welcomed(hello, m.Welcome("east", (), 1.0, 50.0, ()), lambda: None)
    assert scene.site.live == 0
    (step,) = second.attempts.outbox.take(0.0)
    assert [each.finish for each in step.deltas] == [Finish.CANCELLED]


def test_the_tokenizers_queue_is_bounded() -> None:
    scene = Scene(max_preparing=2)
    connection = scene.link()
    for name in ("a", "b", "c"):
        scene.site.receive(connection, assign(name))
    (rejected,) = connection.attempts.outbox.take(0.0)
    assert (rejected.attempt_id, rejected.reason.name) == ("c", "FULL")
    scene.site.receive(connection, m.Cancel("a"))  # its text still waits there
    scene.site.receive(connection, assign("d"))
    assert scene.site.live == 1
    scene.engine.tenants.pop()
    scene.site.receive(connection, assign("e"))
    assert scene.site.live == 2


def test_a_tenant_leaves_others_places_with_the_tokenizer() -> None:
    scene = Scene(max_preparing=10)
    connection = scene.link()
    for number in range(20):
        scene.site.receive(connection, assign(f"flood-{number}"))
    assert scene.engine.waiting_of("") == 9
    scene.site.receive(connection, assign("other", tenant="other"))
    assert scene.engine.waiting_of("other") == 1
    assert len([each for each in connection.attempts.outbox.take(0.0) if isinstance(each, m.Rejected)]) == 11


def test_a_lost_replica_is_forgotten_after_a_bounded_grace() -> None:
    scene = Scene()
    connection = scene.link("east", grace_s=1e9)
    scene.site.receive(connection, assign("a"))
    scene.site.lost(connection)
    assert scene.site.hello().attempts == ("a",)
    scene.clock.now += MAX_GRACE_S
    scene.site.tick()
    assert scene.site.hello().attempts == ()
    assert scene.site.live == 0


def test_a_drain_is_told_to_those_who_listen_and_to_those_who_come() -> None:
    scene = Scene()
    gone = scene.link("gone")
    scene.site.lost(gone)
    scene.site.drain("an update")
    back = scene.link("gone")
    assert back.attempts.outbox.take(0.0) == [m.Draining("an update")]


def test_a_second_assign_of_one_attempt_changes_nothing() -> None:
    scene = Scene(max_preparing=5)
    connection = scene.link()
    scene.site.receive(connection, assign("a"))
    scene.site.receive(connection, assign("a"))
    assert scene.site.live == 1
    assert connection.attempts.preparing == 1


def test_a_count_that_nobody_waits_for_is_dropped_without_an_answer() -> None:
    for end in ("cancel", "lost", "nothing"):
        scene = Scene()
        connection = scene.link()
        scene.site.receive(connection, m.Count(assign("c")))
        ((reply, is_wanted),) = scene.engine.counts
        assert is_wanted()
        if end == "cancel":
            scene.site.receive(connection, m.Cancel("c"))
        elif end == "lost":
            scene.site.lost(connection)
        assert is_wanted() is (end == "nothing")
        reply(7)
        answers = connection.attempts.outbox.take(0.0)
        assert answers == ([m.Counted("c", 7)] if end == "nothing" else [])
        reply(7)  # once only
        assert connection.attempts.outbox.take(0.0) == []


def test_counts_have_places_for_prompts_as_attempts_have() -> None:
    scene = Scene(max_preparing=1)
    connection = scene.link()
    scene.site.receive(connection, assign("a", "tenant"))
    scene.site.receive(connection, m.Count(assign("c", "tenant")))
    (rejected,) = connection.attempts.outbox.take(0.0)
    assert (rejected.attempt_id, rejected.reason) == ("c", Reason.FULL)
    scene.site.drain("an update")
    connection.attempts.outbox.take(0.0)
    scene.site.receive(connection, m.Count(assign("d")))
    assert connection.attempts.outbox.take(0.0)[0].reason is Reason.DRAINING
    assert scene.engine.counts == []


VARIANT = replace(HELLO.models[0], id="letters-v", parent="letters")


def model_lists(connection) -> list[m.Models]:
    return [each for each in connection.attempts.outbox.take(float("inf")) if isinstance(each, m.Models)]


def test_models_that_change_are_told_once_the_latest_only_and_served() -> None:
    scene = Scene()
    connection = scene.link()
    assert model_lists(connection) == []
    scene.site.set_models((*HELLO.models, VARIANT))
    scene.site.set_models((VARIANT,))
    assert model_lists(connection) == [m.Models((VARIANT,))]
    assert model_lists(connection) == []
    scene.site.receive(connection, assign("gone"))
    (refusal,) = [e for e in connection.attempts.outbox.take(float("inf")) if isinstance(e, m.Rejected)]
    assert (refusal.reason, refusal.message) == (
        Reason.MODEL_UNKNOWN,
        "letters is not served here",
    )
    assert scene.site.hello().models == (VARIANT,)


def test_models_that_change_while_a_stream_opens_are_told() -> None:
    scene = Scene()
    hello = scene.site.hello()
    scene.site.set_models((VARIANT,))
    welcome = m.Welcome("east", (), 1.0, 1.0, (), reads_models=True)
    assert model_lists(scene.site.welcomed(hello, welcome, lambda: None)) == [m.Models((VARIANT,))]


def test_an_older_gateway_is_told_by_hello_and_no_message_that_it_does_not_know() -> None:
    scene = Scene()
    connection = scene.link(reads_models=False)
    scene.site.set_models((VARIANT,))
    assert model_lists(connection) == [] and connection.hello_is_old
    scene.site.lost(connection)
    assert not scene.link(reads_models=False).hello_is_old


def test_a_refusal_names_no_other_models() -> None:
    """They may be of other tenants, and clients read refusals."""
    scene = Scene()
    connection = scene.link()
    scene.site.set_models((VARIANT, replace(VARIANT, id="theirs", tenant="other")))
    scene.site.receive(connection, assign("a"))
    (refusal,) = [e for e in connection.attempts.outbox.take(float("inf")) if isinstance(e, m.Rejected)]
    assert refusal.message == "letters is not served here"


def test_a_fault_in_the_end_of_one_answer_lets_others_go_on() -> None:
    scene = Scene()
    scene.site = Site(HELLO, scene.engine, scene.clock, 2, on_finish=lambda *_: 1 // 0)
    connection = scene.link()
    for name in ("faulty", "other"):
        scene.site.receive(connection, replace(assign(name), choices=2))
        connection.attempts.prepared(name, Prepared((1,), ""))
    end = Output("1/0/faulty", "x", (2,), completion_tokens=1, finish=Finish.STOP)
    scene.site.outputs([end, Output("1/0/other", "y", (3,), completion_tokens=1)])
    assert scene.engine.cancelled == ["1/1/faulty"]
    assert ("faulty" in connection.attempts, "other" in connection.attempts) == (False, True)
