"""A request that goes on in another engine answers as one that is left alone, whatever it asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch

from site_engine.core.inbox import InboxPlace
from site_engine.core.request import Finish, Moved, Output, Request, RequestRejected
from site_engine.engine.build import overlapped_engine
from site_engine.engine.engine import SiteEngine
from site_engine.engine.engine_thread import EngineThread
from site_engine.engine.settings import EngineSettings
from site_engine.engine_client import Listener
from site_engine.model import kv_inbox
from site_engine.model.page_copies import PageCopies
from site_engine.text.grammar import Grammars
from tests.support.engine_models import (
    SHAPES,
    Collected,
    Ticks,
    assert_idle,
    drain,
    engine_for,
    family,
    gather,
    greedy,
    tokenizer,
)
from tests.support.moved_requests import Pair, again, alone, assert_same, random_request

COUNT = 40


def begun(
    engine: SiteEngine, request: Request, got: dict[str, Collected], to: InboxPlace | None = None
) -> Moved:
    """Take a request out of an engine after ten iterations."""
    engine.submit(request)
    for _ in range(10):
        gather(engine.step(), got)
    outputs, moved = engine.export(request.id, to)
    gather(outputs, got)
    assert moved is not None
    return moved


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_moved_requests_have_the_tokens_and_log_probabilities_of_requests_left_alone(shape: int) -> None:
    grammars = Grammars(tokenizer(), family("llama").served.vocab_size, ())

    def requests() -> list[Request]:
        draw = Random(shape)
        return [random_request(at, draw, grammars) for at in range(COUNT)]

    expected = alone(requests())
    pair = Pair(shape, lambda: engine_for(family("llama").served, **SHAPES[shape]))
    got = pair.run(requests())
    for name, one in expected.items():
        assert_same(got[name], one)
    assert pair.moves > 40
    assert pair.with_memory > 20
    assert pair.ahead > 20
    pair.close()


class Side:
    """An engine on its thread's operations, one turn at a time."""

    def __init__(self, engine: SiteEngine) -> None:
        self.engine = engine
        self.tokens: dict[str, int] = {}
        self.thread = EngineThread(engine, lambda call: call(), Ticks())
        self.thread.listener = Listener(self._heard, ignore, ignore)

    def _heard(self, outputs: Sequence[Output]) -> None:
        for each in outputs:
            self.tokens[each.request_id] = self.tokens.get(each.request_id, 0) + len(each.token_ids)


def ignore(_: object) -> None:
    """Stand in for who wants to know."""


def packed(**settings: Any) -> SiteEngine:
    return engine_for(family("llama").served, **settings)


def overlapped(**settings: Any) -> SiteEngine:
    chosen = {"slots": 8, "token_budget": 64, "page_size": 4, "kv_tokens": 512} | settings
    return overlapped_engine(family("llama").served, EngineSettings(**chosen), Ticks())


@pytest.mark.parametrize("make", [packed, overlapped])
def test_a_request_that_moves_misses_one_step_of_its_neighbours_at_most(
    make: Callable[..., SiteEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = Side(make()), Side(make())
    inbox = target.engine.inbox.open()
    assert source.engine.inbox.open() is not None
    assert inbox is not None
    source.engine.inbox.meet([inbox])
    request, near = greedy("r", list(range(1, 31)), 60), greedy("near", [5], 90)
    for side, one in ((source, request), (source, near), (target, greedy("far", [7], 90))):
        side.thread.submit([one], ignore)
    while source.tokens.get("r", 0) < 8 or target.tokens.get("far", 0) < 8:
        source.thread.turn()
        target.thread.turn()
    copied: list[int] = []
    pack = PageCopies.pack
    monkeypatch.setattr(
        PageCopies, "pack", lambda self, pages, to: (copied.append(len(pages)), pack(self, pages, to))[1]
    )
    target.thread.expect()
    moved: list[Moved | None] = []
    leads: list[int] = []

    def gone(found: Moved | None) -> None:
        moved.append(found)
        leads.append(near.generated - source.tokens["r"])

    source.thread.export("r", InboxPlace(inbox, 0), gone)
    asked = last = source.tokens["r"]
    lead, far = near.generated - asked, target.tokens["far"]
    while True:
        source.thread.turn()
        if source.tokens["r"] > last:
            last, far = source.tokens["r"], target.tokens["far"]
        if moved:
            break
        target.thread.turn()
    assert leads == [lead]  # the answer comes before another iteration
    assert moved[0] is not None
    assert moved[0].computed == 30 + last - 1
    assert last > asked  # it went on while its pages were sent
    assert copied[0] >= 9
    assert copied[1] <= 1
    while target.tokens["far"] == far:  # it comes while the engine waits for a step
        target.thread.turn()
    target.thread.submit([again(request, list(range(last)))], ignore, moved[0])
    while not target.tokens.get("r"):
        target.thread.turn()
    assert target.tokens["far"] - far <= 2
    for side in (source, target):
        side.engine.inbox.close()


def test_each_tenant_is_charged_once_for_each_token_wherever_it_was_made() -> None:
    engines = [engine_for(family("llama").served, prefix_cache=False) for _ in range(2)]
    request = greedy("r", [1, 2, 3, 4, 5], 30)
    request.tenant = "acme"
    got: dict[str, Collected] = {}
    _, inbox = (each.inbox.open() for each in engines)
    moved = begun(engines[0], request, got, InboxPlace(inbox, 0))
    first = engines[0]._scheduler.queue._clock("acme")
    other = again(request, got["r"].token_ids)
    other.sampling, other.tenant = request.sampling, "acme"
    engines[1].submit(other, moved)
    while engines[1].has_work:
        gather(engines[1].step(), got)
    second = engines[1]._scheduler.queue._clock("acme")
    assert len(got["r"].token_ids) == 30
    assert first + second == pytest.approx(30 + 5 * 0.02)
    for engine in engines:
        engine.inbox.close()


@pytest.mark.parametrize("why", ["too much", "to an engine that was here before", "no place"])
def test_keys_and_values_that_do_not_come_are_computed_again(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "too much":
        monkeypatch.setattr(kv_inbox, "MAX_BYTES", 1)
    engines = [engine_for(family("llama").served) for _ in range(3)]
    addresses = [each.inbox.open() for each in engines]
    request = greedy("r", [1, 2, 3, 4, 5], 20)
    expected = alone([greedy("r", [1, 2, 3, 4, 5], 20)])["r"].token_ids
    got: dict[str, Collected] = {}
    moved = begun(engines[0], request, got, None if why == "no place" else InboxPlace(addresses[2], 0))
    assert (moved.place is not None) == (why == "to an engine that was here before")
    engines[1].submit(again(request, got["r"].token_ids), moved)
    assert not engines[1]._received._kept
    while engines[1].has_work:
        gather(engines[1].step(), got)
    assert got["r"].token_ids == expected
    for engine in engines:
        assert_idle(engine)
        engine.inbox.close()


def test_pages_arrive_as_they_were_also_where_an_engine_has_come_in_the_place_of_another() -> None:
    first, second, third = (engine_for(family("llama").served) for _ in range(3))
    got: dict[str, Collected] = {}
    first.inbox.open()
    for other in (second, third):
        request = greedy("r", [1, 2, 3, 4, 5], 20)
        first.submit(request)
        for _ in range(10):
            gather(first.step(), got)
        pages = request.pages[: first._pool.pages_for(request.computed)]
        kept = torch.empty(len(pages), first._kv_cache.copies.page_bytes, dtype=torch.uint8)
        first._kv_cache.copies.pack(first._kv_cache.index(pages), kept)
        place = InboxPlace(other.inbox.open(), 3)
        _, moved = first.export("r", place)
        assert moved is not None and moved.place == place
        received = other.inbox.receive(moved)
        assert received is not None
        assert torch.equal(kept, received)
        other.inbox.close()
    assert len(first.inbox._others) == 2  # with its own
    first.inbox.close()


def test_what_came_with_a_request_that_is_cancelled_before_it_starts_is_dropped() -> None:
    engines = [engine_for(family("llama").served) for _ in range(2)]
    _, inbox = (each.inbox.open() for each in engines)
    request = greedy("r", [1, 2, 3, 4, 5], 20)
    got: dict[str, Collected] = {}
    moved = begun(engines[0], request, got, InboxPlace(inbox, 0))
    engines[1].submit(again(request, got["r"].token_ids), moved)
    assert engines[1]._received._kept
    engines[1].cancel("r")
    engines[1].step()
    assert not engines[1]._received._kept
    assert_idle(engines[1])
    for engine in engines:
        engine.inbox.close()


def test_a_deadline_and_the_times_of_the_begin_go_with_a_request() -> None:
    engines = [engine_for(family("llama").served) for _ in range(2)]
    request = greedy("r", [1, 2, 3], 50)
    request.deadline_s = 100.0
    got: dict[str, Collected] = {}
    engines[0].submit(request)
    for _ in range(4):
        gather(engines[0].step(), got)
    outputs, moved = engines[0].export("r")
    gather(outputs, got)
    assert moved is not None
    other = again(request, got["r"].token_ids)
    other.sampling, other.deadline_s = request.sampling, 100.0
    engines[1].submit(other, moved)
    assert (other.arrived_s, other.started_s, other.first_token_s) == (
        request.arrived_s,
        request.started_s,
        request.first_token_s,
    )
    gather(engines[1].step(), got)
    engines[1]._clock.now_s = 100.0
    while engines[1].has_work:
        gather(engines[1].step(), got)
    last = got["r"].last
    assert last is not None
    assert (last.finish, last.error) == (Finish.FAILED, "its deadline passed before it was done")


def test_an_engine_with_another_variant_of_the_name_refuses() -> None:
    engine = engine_for(family("llama").served)
    request = greedy("r", [1, 2, 3], 5)
    request.chain = "acme"
    with pytest.raises(RequestRejected, match="not served here"):
        engine.submit(request, Moved(0.0, fingerprint="of another"))
    assert_idle(engine)


def test_what_has_ended_or_never_came_is_not_exported() -> None:
    engine = engine_for(family("llama").served)
    assert engine.export("unknown") == ([], None)
    engine.submit(greedy("r", [1, 2, 3], 1))
    while engine.has_work:
        engine.step()
    assert engine.export("r") == ([], None)


def test_what_comes_with_a_request_does_not_replace_more_that_is_cached_where_it_comes() -> None:
    prompt = [1 + at for at in range(40)]
    engines = [engine_for(family("llama").served, token_budget=8) for _ in range(2)]
    _, inbox = (each.inbox.open() for each in engines)
    assert inbox is not None
    engines[1].submit(greedy("before", prompt, 1))
    drain(engines[1])
    engines[0].submit(greedy("r", prompt, 4))
    engines[0].step()
    outputs, moved = engines[0].export("r", InboxPlace(inbox, 0))
    assert moved is not None
    assert (outputs, moved.computed) == ([], 8)
    request = greedy("r", prompt, 4)
    engines[1].submit(request, moved)
    engines[1].step()
    assert request.computed == 40, "36 tokens were cached"
    last = drain(engines[1])["r"].last
    assert last is not None and last.timings is not None
    assert last.timings.cached_prompt_tokens == 36
    assert_idle(engines[1])
    for each in engines:
        each.inbox.close()
