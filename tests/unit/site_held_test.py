"""Attempts that wait for their model to wake: bounded, and each begun or refused exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from site_engine import messages as m
from site_engine.core.request import Sampling
from site_engine.core.request_queue import TENANT_PARTS
from site_engine.engine_client import Prepared
from site_engine.errors import NotServed, Reason
from site_engine.federation.held import HeldCall, HeldCalls
from site_engine.federation.site import Site
from site_engine.messages import ModelState
from tests.support.site_fakes import HELLO, FakeClock

MODELS = tuple(replace(HELLO.models[0], id=name) for name in "ab")


class Scene:
    def __init__(self, most: int) -> None:
        self.held = HeldCalls(most)
        self.begun: list[int] = []
        self.refused: dict[int, NotServed] = {}
        self.cancelled: set[int] = set()
        self.woken: list[str] = []
        self.held.wake = self.woken.append
        self.set_states(a=ModelState.SLEEPING, b=ModelState.SLEEPING)

    def set_states(self, **states: ModelState) -> None:
        self.held.set_models([replace(each, state=states[each.id]) for each in MODELS if each.id in states])

    def hold(self, number: int, model: str = "a", tenant: str = "shop") -> None:
        def refuse(refusal: NotServed) -> None:
            assert number not in self.refused
            self.refused[number] = refusal

        wanted = lambda: number not in self.cancelled  # noqa: E731
        self.held.hold(HeldCall(model, tenant, wanted, lambda: self.begun.append(number), refuse))


def test_no_tenant_takes_all_places_and_what_is_cancelled_takes_none() -> None:
    scene = Scene(10)
    for number in range(12):
        scene.hold(number)
    limit = next(n for n in range(10) if n > TENANT_PARTS * (10 - n))
    assert set(scene.refused) == set(range(limit, 12))
    assert {each.reason for each in scene.refused.values()} == {Reason.FULL}
    assert scene.woken == ["a"] * limit
    scene.hold(20, tenant="another")
    scene.cancelled.add(0)
    scene.cancelled.add(1)
    scene.hold(21)
    assert not {20, 21} & set(scene.refused)


def test_calls_of_a_model_that_is_removed_are_refused() -> None:
    scene = Scene(10)
    scene.hold(1, "a")
    scene.hold(2, "b")
    scene.set_states(b=ModelState.WAKING)
    assert scene.refused[1].reason is Reason.MODEL_UNKNOWN
    scene.set_states(b=ModelState.READY)
    assert scene.begun == [2]


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("hold"), st.sampled_from("ab"), st.sampled_from(("shop", "bank"))),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.sampled_from(("wake", "fail", "sleep", "remove")), st.sampled_from("ab")),
    ),
    max_size=60,
)


@given(EVENTS, st.integers(1, 6))
def test_each_call_ends_once_and_none_is_forgotten(events: list[tuple[str, ...]], most: int) -> None:
    scene, number = Scene(most), 0
    states = dict.fromkeys("ab", ModelState.SLEEPING)
    for kind, *what in events:
        if kind == "hold":
            if states.get(what[0], ModelState.READY) is not ModelState.READY:
                scene.hold(number, *what)
                number += 1
        elif kind == "cancel":
            if what[0] not in scene.begun and what[0] not in scene.refused:
                scene.cancelled.add(what[0])
        elif kind == "fail":
            scene.held.refuse(what[0], "no memory")
        elif kind == "remove":
            states.pop(what[0], None)
            scene.set_states(**states)
        else:
            states[what[0]] = ModelState.READY if kind == "wake" else ModelState.SLEEPING
            scene.set_states(**states)
        waiting = set(range(number)) - set(scene.begun) - set(scene.refused) - scene.cancelled
        assert len(waiting) <= most
    scene.set_states(a=ModelState.READY, b=ModelState.READY)
    counts = Counter([*scene.begun, *scene.refused])
    assert all(count == 1 for count in counts.values())
    assert set(range(number)) - scene.cancelled <= set(counts)


class AskedEngine:
    """Prepares prompts at once, and says of a request what the test does."""

    waiting = 0

    def waiting_of(self, tenant: str) -> int:
        return 0

    def prepare(self, assign: m.Assign, reply: Callable[[object], None], is_wanted: object) -> None:
        reply(Prepared((1, 2), ""))

    def submit(self, prepared: object, group: object, reply: Callable[[object], None]) -> None:
        self.reply = reply

    def cancel(self, request_ids: Iterable[str]) -> None: ...
    def request_load(self) -> None: ...


def test_an_attempt_that_was_cancelled_does_not_wait_for_its_model_to_wake() -> None:
    """The engine refuses it, since the model was put to sleep meanwhile."""
    engine, woken = AskedEngine(), list[str]()
    site = Site(HELLO, engine, FakeClock(), 1)
    site.held.wake = woken.append
    welcome = m.Welcome("east", (), 1.0, 1.0, (), reads_held=True)
    connection = site.welcomed(site.hello(), welcome, lambda: None)
    prompt = m.TextPrompt("a")
    site.receive(
        connection, m.Assign("a", "q", "letters", prompt, Sampling(), 1, False, None, 0, 0, None, "")
    )
    site.receive(connection, m.Cancel("a"))
    site.set_models((replace(HELLO.models[0], state=ModelState.SLEEPING),))
    engine.reply(NotServed(Reason.MODEL_UNKNOWN, "letters is not served here any more", "model"))
    sent = connection.attempts.outbox.take(float("inf"))
    assert [type(each) for each in sent if isinstance(each, m.Held | m.Rejected)] == [m.Rejected]
    assert site.live == 0
    assert woken == []
