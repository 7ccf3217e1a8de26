"""Every order of messages, losses, moves and cancels of one request of a pool: no token is lost or taken
twice, no engine keeps the request, and it ends.

The decisions are those of `site_engine/pool/ownership.py`. Around them stands a model of what carries them
out: engines that compute a token ahead, pipes that keep order, and a pool that hears of a loss before or
after it has read what the pipe still holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from site_engine.pool import ownership
from site_engine.pool.ownership import MAX_LOSSES, Act, Owned, Phase

TOKENS = 3


class Engine(NamedTuple):
    """`epoch`: under which it runs the request, 0: it has none. `ahead`: a step is launched and not read."""

    alive: bool = True
    epoch: int = 0
    tokens: int = 0
    ahead: bool = False


class World(NamedTuple):
    """`to` and `of`: the pipes to each engine and from it. `taken`: tokens that the client has."""

    owned: Owned | None
    engines: tuple[Engine, Engine]
    to: tuple[tuple[Any, ...], tuple[Any, ...]]
    of: tuple[tuple[Any, ...], tuple[Any, ...]]
    unheard: frozenset[int] = frozenset()  # lost engines of which the pool does not know
    taken: int = 0
    end: str = ""
    moves: int = 2
    losses: int = 1
    cancels: int = 1


class Broken(Exception):
    """A law does not hold."""


def at(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


class Model:
    def __init__(self, *, fence: bool = True, keep: bool = True) -> None:
        self.fence = fence  # whether rows of an earlier epoch are dropped
        self.keep = keep  # whether the pool keeps a moved request until its engine has answered

    # ---- what may happen next

    def after(self, world: World) -> Iterator[World]:
        for place in (0, 1):
            yield from self.engine(world, place)
            yield from self.read(world, place)
            yield from self.hear(world, place)
            engine = world.engines[place]
            if world.losses and engine.alive:
                lost = world._replace(
                    engines=at(world.engines, place, Engine(alive=False)),
                    to=at(world.to, place, ()),
                    unheard=world.unheard | {place},
                    losses=world.losses - 1,
                )
                yield lost
                yield lost._replace(of=at(lost.of, place, ()))
        owned = world.owned
        if owned is not None and world.moves and self.live(world, 1 - owned.engine):
            changed, act = ownership.move(owned, 1 - owned.engine)
            if act is Act.EXPORT:
                moved = world._replace(owned=changed, moves=world.moves - 1)
                yield self.send(moved, owned.engine, ("export", owned.epoch))
        if owned is not None and world.cancels:
            left = world._replace(owned=ownership.cancel(owned), cancels=0)
            yield self.send(left, owned.engine, ("cancel", owned.epoch))

    def engine(self, world: World, place: int) -> Iterator[World]:
        engine = world.engines[place]
        if engine.epoch and not engine.ahead:
            yield self.put(world, place, engine._replace(ahead=True))
        if engine.epoch and engine.ahead:
            yield self.landed(world, place)
        if world.to[place] and engine.alive:
            message, world = world.to[place][0], world._replace(to=at(world.to, place, world.to[place][1:]))
            yield self.received(world, place, message)

    def received(self, world: World, place: int, message: Any) -> World:
        engine = world.engines[place]
        match message:
            case ("place", epoch, tokens):
                world = self.put(world, place, Engine(True, epoch, tokens))
                return self.reply(world, place, ("admitted", epoch))
            case ("export", epoch) if engine.epoch == epoch:
                world = self.landed(world, place)
                if not world.engines[place].epoch:
                    return self.reply(world, place, ("stays", epoch))
                world = self.put(world, place, Engine())
                return self.reply(world, place, ("exported", epoch))
            case ("export", epoch):
                return self.reply(world, place, ("stays", epoch))
            case ("cancel", epoch) if engine.epoch == epoch:
                world = self.put(world, place, Engine())
                return self.reply(world, place, ("row", epoch, engine.tokens, "cancelled"))
        return world

    def landed(self, world: World, place: int) -> World:
        """Read the launched step: one more token, which may be the last."""
        engine = world.engines[place]
        if not engine.ahead:
            return world
        tokens = engine.tokens + 1
        last = tokens == TOKENS
        world = self.put(world, place, Engine() if last else Engine(True, engine.epoch, tokens))
        return self.reply(world, place, ("row", engine.epoch, tokens, "stop" if last else ""))

    # ---- the pool

    def read(self, world: World, place: int) -> Iterator[World]:
        if not world.of[place]:
            return
        message, world = world.of[place][0], world._replace(of=at(world.of, place, world.of[place][1:]))
        owned = world.owned
        current = owned is not None and (owned.engine, owned.epoch) == (place, message[1])
        if owned is None or not (current or (message[0] == "row" and not self.fence)):
            yield world
            return
        match message:
            case ("row", _, tokens, finish):
                if tokens != world.taken + (finish != "cancelled"):
                    raise Broken(f"token {tokens} after {world.taken}")
                world = world._replace(taken=tokens)
                yield world._replace(owned=None, end=finish) if finish else world
            case ("admitted", _):
                yield world._replace(owned=ownership.accepted(owned))
            case ("stays", _):
                yield world._replace(owned=ownership.stayed(owned))
            case ("exported", _):
                to = owned.to if owned.to is not None and self.live(world, owned.to) else self.any(world)
                yield self.go_on(world, *ownership.exported(owned, to))

    def hear(self, world: World, place: int) -> Iterator[World]:
        """Hear of a loss, before or after what its pipe holds is read."""
        if place not in world.unheard:
            return
        world = world._replace(unheard=world.unheard - {place})
        owned = world.owned
        if owned is None or owned.engine != place:
            yield world
        elif not self.keep and owned.epoch > 1 and owned.phase is Phase.PLACED:
            yield world._replace(owned=None, end="forgotten")
        else:
            yield self.go_on(world, *ownership.lost(owned, self.any(world)))

    def go_on(self, world: World, owned: Owned, act: Act) -> World:
        if act is not Act.PLACE:
            return world._replace(owned=None, end=act.value)
        world = world._replace(owned=owned)
        return self.send(world, owned.engine, ("place", owned.epoch, world.taken))

    def live(self, world: World, place: int) -> bool:
        return world.engines[place].alive or place in world.unheard

    def any(self, world: World) -> int | None:
        return next((place for place in (0, 1) if self.live(world, place)), None)

    def put(self, world: World, place: int, engine: Engine) -> World:
        return world._replace(engines=at(world.engines, place, engine))

    def send(self, world: World, place: int, message: Any) -> World:
        if not world.engines[place].alive:
            return world
        return world._replace(to=at(world.to, place, (*world.to[place], message)))

    def reply(self, world: World, place: int, message: Any) -> World:
        return world._replace(of=at(world.of, place, (*world.of[place], message)))


def search(model: Model, start: World) -> tuple[int, set[tuple[str, int]]]:
    """Return the number of states and how requests ended, with their tokens. Raises Broken."""
    seen, queue, ends = {start}, deque([start]), set()
    while queue:
        world = queue.popleft()
        nexts = list(model.after(world))
        for each in nexts:
            if each not in seen:
                seen.add(each)
                queue.append(each)
        if not nexts:
            check_end(world, start)
            ends.add((world.end, world.taken))
    return len(seen), ends


def check_end(world: World, start: World) -> None:
    if not world.end:
        raise Broken(f"stuck: {world}")
    if world.end == "stop" and world.taken != TOKENS:
        raise Broken(f"ended with {world.taken} tokens")
    lost = start.losses - world.losses
    if world.end in {"failed", "forgotten"} and lost < min(2, MAX_LOSSES):
        raise Broken(f"{world.end} though an engine was left")
    if any(each.epoch for each in world.engines):
        raise Broken(f"an engine keeps the request: {world}")


def begin(**budget: int) -> World:
    first = World(Owned(0), (Engine(), Engine()), ((("place", 1, 0),), ()), ((), ()))
    return first._replace(**budget)


@pytest.mark.parametrize("budget", [{}, {"losses": 2}, {"moves": 3, "losses": 0}])
def test_in_every_order_no_token_is_lost_or_taken_twice_and_no_engine_keeps_the_request(
    budget: dict[str, int],
) -> None:
    states, ends = search(Model(), begin(**budget))
    assert states > 400
    assert {"stop", "cancelled"} <= {end for end, _ in ends}
    assert {taken for end, taken in ends if end == "cancelled"} >= {0, 1, 2}
    assert ("failed" in {end for end, _ in ends}) == (budget.get("losses", 1) == 2)


def test_the_search_finds_rows_of_an_earlier_epoch_that_are_taken() -> None:
    with pytest.raises(Broken, match="token 1 after 1"):
        search(Model(fence=False), begin())


def test_the_search_finds_a_request_that_is_dropped_before_its_new_engine_has_answered() -> None:
    with pytest.raises(Broken, match="forgotten though an engine was left"):
        search(Model(keep=False), begin())


def test_a_request_that_loses_engine_after_engine_fails_before_it_takes_them_all() -> None:
    one, acts = Owned(0), []
    for _ in range(MAX_LOSSES):
        one, act = ownership.lost(one, 1 - one.engine)
        acts.append(act)
    assert acts == [Act.PLACE] * (MAX_LOSSES - 1) + [Act.FAILED]
