"""A site that does not read what is sent to it costs bounded memory, and loses its link."""

from __future__ import annotations

import asyncio

import pytest

from gateway.decision import Decision
from gateway.domain import Caller, LoadReport, Model, Query, Sampling, SiteIdentity
from gateway.failure import FailureCause
from gateway.federation.attempt import LiveAttempt
from gateway.federation.directory import Directory
from gateway.federation.link import READ_WITHIN_S, Link
from gateway.federation.offloading import Offloading
from gateway.federation.outbox import Outbox
from gateway.federation.pings import MAX_UNANSWERED_PINGS
from gateway.federation.progress import CHECK_EVERY_S, AwakeClock
from gateway.routing.demand import Demand
from predictor.forecast import Forecast
from tests.support.site_fakes import FakeClock
from wire import federation_pb2 as pb

IDENTITY = SiteIdentity(
    "a", "boot", "aws", "here", {"m": Model("m", "1", 100, 0, "mico")}, slots=4, kv_capacity_tokens=100
)
FLAT = Forecast((0, 100), (1.0,), "flat")
MIB = 2**20


class Scene:
    def __init__(self) -> None:
        self.clock, self.directory = FakeClock(0.0), Directory()
        self.directory.join(IDENTITY, 0.0)
        self.awake = AwakeClock(self.clock)
        offloading = Offloading({}, self.directory, self.clock)
        self.link = Link(
            IDENTITY, self.directory, offloading, self.clock, reads_bunches=True, awake=self.awake
        )
        self.directory.report("a", LoadReport(1, 0.0), self.directory.sites[0].credit)
        self.assigned = 0

    def assign(self, prompt_bytes: int = 10) -> LiveAttempt:
        self.assigned += 1
        query = Query("q", "m", "x" * prompt_bytes, Sampling(), Caller("k", "t"), 0.0, 600.0)
        attempt_id = f"attempt-{self.assigned}"
        decision = Decision("q", attempt_id, "a", "mico", "why", (), {}, 0.0)
        return self.link.assign(query, decision, Demand.of("m", 1, FLAT, query.sampling), FLAT)

    def let_pass(self, seconds: float) -> None:
        for _ in range(round(seconds / CHECK_EVERY_S)):
            self.clock.now += CHECK_EVERY_S
            self.awake.tick()
            self.link.check_progress()


async def kinds_sent(link: Link) -> list[str | None]:
    messages = []
    while link.outbox.bytes:
        message = pb.GatewayMessage.FromString(await link.next_message())
        messages += list(message.bunch.messages) or [message]
    return [each.WhichOneof("body") for each in messages]


def test_an_assignment_that_was_not_sent_goes_with_its_attempt() -> None:
    async def scenario() -> None:
        here = Scene()
        given_up, kept = here.assign(3 * MIB), here.assign()
        given_up.cancel()
        assert given_up.ended.is_set()
        assert given_up.failure
        assert given_up.failure.cause is FailureCause.CANCELLED
        assert here.link.outbox.bytes < 1000
        assert await kinds_sent(here.link) == ["assign"]
        kept.cancel()
        assert await kinds_sent(here.link) == ["cancel"], "this one the site has seen"
        assert here.link.live == 1

    asyncio.run(scenario())


def test_a_short_prompt_waits_for_one_long_one_at_most_and_a_long_one_for_one_bunch() -> None:
    async def scenario() -> None:
        here = Scene()
        large = [here.assign(2 * MIB) for _ in range(4)]
        sent: list[list[str]] = []
        small: list[str] = []
        while here.link.outbox.bytes:
            small += [here.assign().id for _ in range(2)] if len(sent) < 6 else []
            message = pb.GatewayMessage.FromString(await here.link.next_message())
            sent.append([each.assign.attempt_id for each in message.bunch.messages or [message]])
        ids = [each.id for each in large]
        assert sent[:6] == [small[:2], ids[:1], small[2:6], ids[1:2], small[6:10], ids[2:3]]
        assert sorted(attempt_id for each in sent for attempt_id in each) == sorted(ids + small)

    asyncio.run(scenario())


def test_a_large_message_is_written_once_and_not_kept_twice() -> None:
    """To write four megabytes takes five milliseconds of the event loop."""

    async def scenario() -> None:
        outbox = Outbox()
        message = pb.GatewayMessage(assign=pb.Assign(attempt_id="a", text="x" * MIB))
        outbox.put(message, "a")
        whole = message.SerializeToString()
        message.Clear()
        assert await outbox.next(in_bunches=True) == whole
        assert outbox.bytes == 0

    asyncio.run(scenario())


def test_queries_that_come_and_go_fill_no_memory() -> None:
    here = Scene()
    for _ in range(300):
        here.assign(MIB).cancel()
    assert here.link.outbox.bytes == 0
    assert here.link.live == 0


def test_a_site_with_too_much_to_read_is_full() -> None:
    here = Scene()
    attempts = [here.assign(8 * MIB) for _ in range(20)]
    taken = [each for each in attempts if each.failure is None]
    assert len(taken) == 8
    assert here.link.outbox.bytes < 65 * MIB
    refusal = attempts[-1].failure
    assert refusal
    assert refusal.cause is FailureCause.FULL
    assert "reads too slowly: 64 MiB wait for it" in refusal.message


def test_a_message_that_is_never_read_ends_the_link() -> None:
    async def scenario() -> None:
        here = Scene()
        attempt = here.assign()
        await here.link.next_message()  # its write does not end
        here.link.receive(pb.SiteMessage(load=pb.Load(seq=2)))
        here.let_pass(READ_WITHIN_S)
        assert here.link.closing is None
        here.let_pass(2 * CHECK_EVERY_S)
        assert here.link.closing == "it has read nothing for 10 s"
        assert attempt.failure
        assert attempt.failure.cause is FailureCause.LOST

    asyncio.run(scenario())


def test_a_large_message_has_the_time_that_a_slow_line_takes() -> None:
    async def scenario() -> None:
        here = Scene()
        here.assign(4 * MIB)
        await here.link.next_message()
        here.let_pass(30.0)  # 128 KiB a second, and ten seconds
        assert here.link.closing is None
        here.let_pass(14.0)
        assert here.link.closing

    asyncio.run(scenario())


@pytest.mark.parametrize("answers", [True, False])
def test_a_site_that_reports_and_answers_no_ping_does_not_read(answers: bool) -> None:
    async def scenario() -> None:
        here = Scene()
        reasons = []
        for number in range(1, 3 * MAX_UNANSWERED_PINGS):
            reasons.append(here.link.pings.send())
            await kinds_sent(here.link)
            here.link.receive(pb.SiteMessage(load=pb.Load(seq=number + 1)))
            if answers:
                here.link.receive(pb.SiteMessage(pong=pb.Pong(nonce=number)))
        if answers:
            assert not any(reasons)
        else:
            assert reasons.index("it has answered none of 8 pings") == MAX_UNANSWERED_PINGS

    asyncio.run(scenario())


def test_pings_do_not_pile_up_before_a_site_that_reads_slowly() -> None:
    here = Scene()
    for _ in range(100):
        assert here.link.pings.send() is None
    assert here.link.outbox.bytes < 20
