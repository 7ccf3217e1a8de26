"""Whatever happens in whatever order, every attempt ends exactly once, and nothing is left behind.

The real site, attempts, outbox and engine turns, driven step by step on one thread with a model-less engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from site_engine import messages as m
from site_engine.core.load import LoadFigures
from site_engine.core.remaining_curve import RemainingCurve
from site_engine.core.request import Finish, Lane, Sampling
from site_engine.engine.engine_thread import EngineThread
from site_engine.engine_client import Listener, Prepared
from site_engine.errors import NotServed
from site_engine.federation.connection import Connection
from site_engine.federation.site import Site
from site_engine.native import NativeEngine
from site_engine.text.tokenize import PromptTokenizer
from tests.support.site_fakes import HELLO, VOCABULARY, FakeClock, FakeEngine, FakeTokenizer

GATEWAYS = ("east", "west")
GRACE_S = 5.0
ROUNDS_MAX = 400


class SlowTokenizer(PromptTokenizer):
    """The tokenizer's thread, let go by hand."""

    def __init__(self) -> None:
        super().__init__(FakeTokenizer(), VOCABULARY, lambda call: None)
        self.asked: deque[Callable[[], None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self.asked)

    def waiting_of(self, tenant: str) -> int:
        return len(self.asked)  # of one tenant, all

    def prepare(
        self,
        assign: m.Assign,
        reply: Callable[[Prepared | NotServed], None],
        is_wanted: Callable[[], bool],
    ) -> None:
        def answer() -> None:
            try:
                reply(self.prepare_now(assign))
            except NotServed as refusal:
                reply(refusal)

        self.asked.append(answer)


class CountingEngine(FakeEngine):
    """Numbers its load figures (`tokens_total`), and keeps which requests each of them counts."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots=slots, max_pending=5)
        self.counted: list[set[str]] = []

    def load(self) -> LoadFigures:
        self.counted.append({*self.running, *self.pending})
        return super().load()._replace(tokens_total=len(self.counted) - 1)


@dataclass
class Seen:
    """The messages that a gateway received about one attempt."""

    assign: m.Assign
    gateway: str
    abandoned: bool = False  # its link was lost for longer than the grace
    asked: bool = False  # a cancel or a release was sent
    accepted: int = 0
    rejected: int = 0
    released: int = 0
    texts: list[str] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    finishes: list[list[Finish]] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return bool(self.rejected or self.released or all(self.finishes))


class Interleavings(RuleBasedStateMachine):
    @initialize(slots=st.integers(1, 2))
    def begin(self, slots: int) -> None:
        self.clock = FakeClock()
        self.calls: deque[Callable[[], None]] = deque()
        self.engine = CountingEngine(slots)
        self.engine_thread = EngineThread(self.engine, self.calls.append, self.clock)
        self.prompts = SlowTokenizer()
        engine = NativeEngine(self.prompts, self.engine_thread)
        self.site = Site(HELLO, engine, self.clock, max_preparing=6)
        self.engine_thread.listener = Listener(self.site.outputs, self.site.load, lambda reason: None)
        self.links: dict[str, Connection | None] = {}
        self.seen: dict[str, Seen] = {}
        self.release_count = 0
        self.releases: dict[str, tuple[str, ...]] = {}
        for gateway in GATEWAYS:
            self.link(gateway, ())

    def link(self, gateway: str, cancel: tuple[str, ...]) -> None:
        welcome = m.Welcome(gateway, (), 1.0, GRACE_S, cancel)
        self.links[gateway] = self.site.welcomed(self.site.hello(), welcome, lambda: None)

    @rule(
        gateway=st.sampled_from(GATEWAYS),
        choices=st.integers(1, 3),
        prompt=st.text("abcdefgh", min_size=1, max_size=70),
        max_tokens=st.integers(1, 12),
        echo=st.booleans(),
    )
    def assign(self, gateway: str, choices: int, prompt: str, max_tokens: int, echo: bool) -> None:
        connection = self.links[gateway]
        if connection is None:
            return
        attempt_id = f"a{len(self.seen)}"
        assign = m.Assign(
            attempt_id=attempt_id,
            query_id="q",
            model="numbers" if len(prompt) == 7 else "letters",
            prompt=m.TextPrompt(prompt),
            sampling=Sampling(max_tokens=max_tokens),
            choices=choices,
            echo=echo,
            remaining=RemainingCurve(),
            lane=Lane.CHAT,
            priority=0,
            deadline_s=None,
            tenant="",
        )
        blank = [[] for _ in range(choices)], [[] for _ in range(choices)]
        self.seen[attempt_id] = Seen(
            assign, gateway, texts=[""] * choices, tokens=blank[0], finishes=blank[1]
        )
        self.site.receive(connection, assign)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        seen = self.one_of_mine(data)
        if seen is not None:
            seen.asked = True
            self.site.receive(self.linked(seen), m.Cancel(seen.assign.attempt_id))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        first = self.one_of_mine(data)
        if first is None:
            return
        mine = [each.assign.attempt_id for each in self.seen.values() if each.gateway == first.gateway]
        wanted = tuple(data.draw(st.lists(st.sampled_from(mine), unique=True, max_size=4)))
        for attempt_id in wanted:
            self.seen[attempt_id].asked = True
        self.release_count += 1
        release_id = f"r{self.release_count}"
        self.releases[release_id] = wanted
        self.site.receive(self.linked(first), m.Release(release_id, (*wanted, "unheard-of")))

    @rule()
    def a_prompt_is_ready(self) -> None:
        if self.prompts.waiting:
            self.prompts.asked.popleft()()

    @rule()
    def the_engine_turns(self) -> None:
        self.engine_thread.turn()

    @rule()
    def the_loop_hears_of_it(self) -> None:
        if self.calls:
            self.calls.popleft()()

    @rule(turns=st.integers(1, 4))
    def the_site_goes_on(self, turns: int) -> None:
        for _ in range(turns):
            self.a_prompt_is_ready()
            self.engine_thread.turn()
            while self.calls:
                self.the_loop_hears_of_it()

    @rule(gateway=st.sampled_from(GATEWAYS), later_s=st.sampled_from([0.0, 0.01, 0.03, 0.1]))
    def a_gateway_reads(self, gateway: str, later_s: float) -> None:
        self.clock.now += later_s
        connection = self.links[gateway]
        if connection is not None:
            self.read(gateway, connection, self.clock.now)

    @precondition(lambda self: any(self.links.values()))
    @rule(data=st.data())
    def a_link_breaks(self, data: st.DataObject) -> None:
        gateway = data.draw(st.sampled_from([name for name, each in self.links.items() if each]))
        connection = self.links[gateway]
        assert connection is not None
        self.links[gateway] = None
        self.site.lost(connection)

    @rule(gateway=st.sampled_from(GATEWAYS), data=st.data())
    def a_link_is_back(self, gateway: str, data: st.DataObject) -> None:
        if self.links[gateway] is None:
            kept = self.site.hello().attempts
            mine = [each for each in kept if self.seen[each].gateway == gateway]
            cancel = data.draw(st.lists(st.sampled_from(mine), unique=True)) if mine else []
            for attempt_id in cancel:
                self.seen[attempt_id].asked = True
            self.link(gateway, tuple(cancel))

    @rule()
    def grace_runs_out(self) -> None:
        self.clock.now += GRACE_S + 1.0
        self.site.tick()
        for seen in self.seen.values():
            seen.abandoned = seen.abandoned or self.links[seen.gateway] is None

    @invariant()
    def the_count_of_live_attempts_is_bounded_by_what_has_not_ended(self) -> None:
        assert self.site.live <= len([each for each in self.seen.values() if not each.ended])

    def teardown(self) -> None:
        if not hasattr(self, "site"):
            return
        for gateway in GATEWAYS:
            if self.links[gateway] is None:
                self.link(gateway, ())
        for _ in range(ROUNDS_MAX):
            self.a_prompt_is_ready()
            self.engine_thread.turn()
            self.the_loop_hears_of_it()
        assert not self.engine.has_work
        assert self.site.live == 0
        self.clock.now += 1.0
        for gateway, connection in self.links.items():
            assert connection is not None
            self.read(gateway, connection, self.clock.now)
            assert connection.attempts.attempt_ids() == ()
            assert connection.attempts.preparing == 0
        assert self.engine.load().running == self.engine.load().pending == 0
        for seen in self.seen.values():
            if not seen.abandoned:
                self.ended_once(seen)

    def ended_once(self, seen: Seen) -> None:
        ways = [seen.rejected == 1, seen.released == 1, all(len(each) == 1 for each in seen.finishes)]
        assert ways.count(True) == 1, seen
        assert seen.rejected + seen.released <= 1, seen
        if seen.rejected or seen.released:
            assert not any(seen.texts), seen
            assert not any(seen.finishes), seen
        if seen.rejected:
            assert not seen.accepted, seen
        if seen.released or [Finish.CANCELLED] in seen.finishes:
            assert seen.asked, seen

    def read(self, gateway: str, connection: Connection, now: float) -> None:
        for message in connection.attempts.outbox.take(now):
            match message:
                case m.Accepted():
                    seen = self.mine(gateway, message.attempt_id)
                    seen.accepted += 1
                    assert seen.accepted == 1
                    assert not any(seen.tokens)
                case m.Rejected():
                    self.mine(gateway, message.attempt_id).rejected += 1
                case m.Released():
                    assert set(message.attempt_ids) <= set(self.releases.pop(message.release_id))
                    for attempt_id in message.attempt_ids:
                        self.mine(gateway, attempt_id).released += 1
                case m.Step():
                    for delta in message.deltas:
                        self.take(self.mine(gateway, delta.attempt_id), delta)
                case m.Load():
                    self.counts_what_the_gateway_waits_for(gateway, message.figures)

    def counts_what_the_gateway_waits_for(self, gateway: str, figures: LoadFigures) -> None:
        """A gateway adds what it has assigned to a report until Accepted, and takes out what it sees end."""
        counted = {tuple(each.split("/")[1:]) for each in self.engine.counted[figures.tokens_total]}
        for attempt_id, seen in self.seen.items():
            if seen.gateway == gateway and not seen.abandoned:
                for choice, finishes in enumerate(seen.finishes):
                    waits = bool(seen.accepted and not (finishes or seen.released))
                    assert ((str(choice), attempt_id) in counted) == waits, (seen, choice)

    def mine(self, gateway: str, attempt_id: str) -> Seen:
        seen = self.seen[attempt_id]
        assert seen.gateway == gateway, "told to the wrong gateway"
        assert not seen.abandoned, "told after the grace"
        return seen

    def take(self, seen: Seen, delta: m.Delta) -> None:
        assert not seen.finishes[delta.choice], "output after the finish"
        assert not seen.released, "output after a release"
        seen.texts[delta.choice] += delta.text
        seen.tokens[delta.choice] += delta.token_ids
        assert delta.completion_tokens == len(seen.tokens[delta.choice])
        prompt = seen.assign.prompt.text
        spoken = "".join(map(chr, seen.tokens[delta.choice]))
        assert spoken == (prompt * (len(spoken) + 1))[: len(spoken)]
        assert seen.texts[delta.choice] == (prompt if seen.assign.echo and spoken else "") + spoken
        if delta.finish is not None:
            seen.finishes[delta.choice].append(delta.finish)
            if delta.finish is Finish.LENGTH:
                room = min(seen.assign.sampling.max_tokens, 64 - len(prompt))
                assert len(spoken) == room, "a token is missing or doubled"

    def linked(self, seen: Seen) -> Connection:
        connection = self.links[seen.gateway]
        assert connection is not None
        return connection

    def one_of_mine(self, data: st.DataObject) -> Seen | None:
        known = [name for name, each in self.seen.items() if self.links[each.gateway] is not None]
        return self.seen[data.draw(st.sampled_from(known))] if known else None


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
