"""Random requests that go from one engine to another and back, beside the same in one engine alone."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from site_engine.core.inbox import PLACES, InboxPlace
from site_engine.core.request import Finish, Lane, Output, Request, Sampling
from site_engine.engine.engine import SiteEngine
from site_engine.text.grammar import Grammars
from tests.support.engine_models import TOO_SHORT, Collected, assert_idle, engine_for, family, gather

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

    def __init__(self, seed: int, make: Callable[[], SiteEngine]) -> None:
        self.draw = Random(seed)
        self.engines = [make() for _ in range(2)]
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
            assert not engine._received._kept
            engine._scheduler.kv_cache_manager.prefixes.clear()
            assert engine._pool.used == 0
            engine.inbox.close()


def alone(requests: list[Request]) -> dict[str, Collected]:
    engine, got = engine_for(family("llama").served), {}
    for request in requests:
        engine.submit(request)
        while engine.has_work:
            gather(engine.step(), got)
    return got


def assert_same(other: Collected, one: Collected, *, whole: bool = True) -> None:
    """Compare an answer with that of a request left alone; without `whole` it may have ended before."""
    assert other.last is not None
    assert one.last is not None
    count = None if whole else len(other.token_ids)
    assert other.token_ids == one.token_ids[:count], other.last.request_id
    # the text of an engine that goes on begins there: whoever moves a request keeps its text
    if whole and (one.last.finish is not Finish.STOP or not one.last.stop_sequence):
        assert other.last.finish is one.last.finish, other.last.request_id
    ours, theirs = ([each for output in its.outputs for each in output.logprobs] for its in (one, other))
    ours = ours if whole else ours[: len(theirs)]
    assert [each.token for each in ours] == [each.token for each in theirs]
    assert [each.logprob for each in theirs] == pytest.approx([each.logprob for each in ours], abs=1e-4)
    if whole:
        prompts = [sum(len(each.prompt_logprobs) for each in its.outputs) for its in (one, other)]
        assert prompts[0] == prompts[1], other.last.request_id
