"""A request that goes on in another engine answers as one that is left alone, whatever it asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch

from site_engine.core.inbox import PLACES, InboxPlace
from site_engine.core.request import Finish, Lane, Moved, Output, Request, RequestRejected, Sampling
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
    TOO_SHORT,
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

COUNT = 40
GRAMMARS = ("start: /[a-z]{4,20}/", "start: /(.|\\n){1,30}/")


def random_request(at: int, draw: Random, grammars: Grammars) -> Request:
    """A request of any kind: stop strings, penalties, seeds, log probabilities, grammars, resumed ones."""

    def some(chance: float) -> bool:
        return draw.random() < chance

    logprobs = draw.randrange(3) if some(0.2) else None
    resumed = tuple(draw.randrange(256) for _ in range(draw.randrange(1, 6))) if some(0.2) else ()
    return Request(
        str(at),
        [draw.randrange(256) for _ in range(draw.randrange(1, 40))],
        Sampling(
            max_tokens=draw.randrange(6, 40),
            temperature=draw.choice((0.0, 0.9)),
            top_p=draw.choice((1.0, 0.8)),
            seed=draw.randrange(1000) if some(0.5) else None,
            stop=tuple(draw.sample(("a", "e", "th", " "), 2)) if some(0.2) else (),
            min_tokens=draw.randrange(6) if some(0.2) else 0,
            presence_penalty=0.7 if some(0.2) else 0.0,
            repetition_penalty=1.2 if some(0.2) else 1.0,
            logprobs=logprobs,
            prompt_logprobs=logprobs is not None and some(0.5),
        ),
        TOO_SHORT,
        lane=draw.choice((Lane.CHAT, Lane.BATCH)),
        tenant=f"tenant {at % 3}",
        grammar=grammars.compile(draw.choice(GRAMMARS), "") if some(0.2) and not resumed else None,
        resumed=resumed,
    )


def again(request: Request, generated: list[int]) -> Request:
    """Return the request as another engine gets it, with all tokens so far."""
    sampling = request.sampling
    if generated:
        sampling = Sampling(
            **{name: getattr(sampling, name) for name in sampling.__slots__} | {"prompt_logprobs": False}
        )
    return Request(
        request.id,
        request.prompt,
        sampling,
        TOO_SHORT,
        request.lane,
        request.priority,
        request.tenant,
        request.deadline_s,
        request.choice,
        (*request.resumed, *generated),
        grammar=request.grammar,
    )


class Pair:
    """Two engines, between which requests go back and forth while they run."""

    def __init__(self, seed: int, **settings: Any) -> None:
        self.draw = Random(seed)
        self.engines = [engine_for(family("llama").served, **settings) for _ in range(2)]
        self.inboxes = [each.inbox.open() for each in self.engines]
        self.known: dict[str, Request] = {}
        self.got: dict[str, Collected] = {}
        self.leaving: dict[str, tuple[SiteEngine, InboxPlace]] = {}
        self.moves = self.with_memory = self.ahead = 0

    def run(self, requests: list[Request]) -> dict[str, Collected]:
        waiting = list(requests)
        while waiting or any(each.has_work for each in self.engines):
            if waiting:
                request = waiting.pop()
                self.known[request.id] = request
                self.draw.choice(self.engines).submit(request)
            for engine in self.engines:
                self.heard(engine.step())
                self.begin(engine)
            for name in list(self.leaving):
                self.go_on(name)
        for name in list(self.leaving):
            self.go_on(name)
        return self.got

    def heard(self, outputs: list[Output]) -> None:
        gather(outputs, self.got)
        for output in outputs:
            if output.finish is not None:
                del self.known[output.request_id]

    def begin(self, engine: SiteEngine) -> None:
        """Ask for a request that may be there."""
        to = 1 - self.engines.index(engine)
        places = [InboxPlace(self.inboxes[to], number) for number in range(PLACES)]
        free = [each for each in places if each not in {place for _, place in self.leaving.values()}]
        names = [name for name in self.known if name not in self.leaving]
        if names and free:
            self.leaving[self.draw.choice(names)] = engine, self.draw.choice(free)
            if self.draw.random() < 0.1:
                self.engines[to].expect()

    def go_on(self, name: str) -> None:
        """Send pages ahead, or move the request; sometimes without what was computed, as after a loss."""
        engine, place = self.leaving[name]
        if self.draw.random() < 0.9 and engine.send_ahead(name, place):
            self.ahead += 1
            return
        del self.leaving[name]
        outputs, moved = engine.export(name, place)
        self.heard(outputs)
        if moved is None:
            return
        request, to = self.known[name], self.inboxes.index(place.inbox)
        if self.draw.random() < 0.3:
            moved = moved._replace(computed=0, place=None)
        generated = self.got[request.id].token_ids if request.id in self.got else []
        other = self.engines[to]
        other.submit(again(request, generated), moved)
        self.moves += 1
        self.with_memory += moved.computed > 0

    def close(self) -> None:
        for engine in self.engines:
            assert_idle(engine)
            assert engine._scheduler.kv_cache_manager.swap.used_tokens == 0
            engine._scheduler.kv_cache_manager.prefixes.clear()
            assert engine._pool.used == 0
            engine.inbox.close()


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


def alone(requests: list[Request]) -> dict[str, Collected]:
    engine, got = engine_for(family("llama").served), {}
    for request in requests:
        engine.submit(request)
        while engine.has_work:
            gather(engine.step(), got)
    return got


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_moved_requests_have_the_tokens_and_log_probabilities_of_requests_left_alone(shape: int) -> None:
    grammars = Grammars(tokenizer(), family("llama").served.vocab_size, ())

    def requests() -> list[Request]:
        draw = Random(shape)
        return [random_request(at, draw, grammars) for at in range(COUNT)]

    expected, pair = alone(requests()), Pair(shape, **SHAPES[shape])
    got = pair.run(requests())
    for name, one in expected.items():
        other = got[name]
        assert other.last is not None
        assert one.last is not None
        assert other.token_ids == one.token_ids, name
        # the text of an engine that goes on begins there: whoever moves a request keeps its text
        if one.last.finish is not Finish.STOP or not one.last.stop_sequence:
            assert other.last.finish is one.last.finish, name
        ours, theirs = ([each for output in its.outputs for each in output.logprobs] for its in (one, other))
        assert [each.token for each in ours] == [each.token for each in theirs]
        assert [each.logprob for each in theirs] == pytest.approx([each.logprob for each in ours], abs=1e-4)
        prompts = [sum(len(each.prompt_logprobs) for each in its.outputs) for its in (one, other)]
        assert prompts[0] == prompts[1], name
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
    assert engines[1]._scheduler.kv_cache_manager.swap.used_tokens == 0
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
        kept = first._kv_cache.copy_out(request.pages[: first._pool.pages_for(request.computed)])
        place = InboxPlace(other.inbox.open(), 3)
        _, moved = first.export("r", place)
        assert moved is not None and moved.place == place
        received = other.inbox.receive(moved)
        assert received is not None
        assert torch.equal(kept, received)
        other.inbox.close()
    assert len(first.inbox._others) == 2  # with its own
    first.inbox.close()


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
