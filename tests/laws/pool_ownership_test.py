"""Every order of messages, losses, moves and cancels of one request of a pool: no token is lost or taken
twice, no engine keeps the request, it ends, and the place of its keys and values is free then.

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
    """`epoch`: under which it runs the request, 0: it has none. `ahead`: a step is launched and not read.
    `sends`: the epoch under which its pages are on their way, 0: they are not.
    """

    alive: bool = True
    epoch: int = 0
    tokens: int = 0
    ahead: bool = False
    sends: int = 0


class World(NamedTuple):
    """`to` and `of`: the pipes to each engine and from it. `taken`: tokens that the client has. `sender`: the
    engine that was asked to write to the place that the pool has given the request.
    """

    owned: Owned | None
    engines: tuple[Engine, Engine]
    to: tuple[tuple[Any, ...], tuple[Any, ...]]
    of: tuple[tuple[Any, ...], tuple[Any, ...]]
    unheard: frozenset[int] = frozenset()  # lost engines of which the pool does not know
    taken: int = 0
    sender: int | None = None
    end: str = ""
    moves: int = 2
    losses: int = 1
    cancels: int = 1


class Broken(Exception):
    """A law does not hold."""


def at(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


class Model:
    def __init__(self, *, fence: bool = True, keep: bool = True, reply: bool = True) -> None:
        self.fence = fence  # whether rows of an earlier epoch are dropped
        self.replies = reply  # whether the pool hears of an export whose request has ended
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
                if world.sender is not None or any(each.sends for each in world.engines):
                    raise Broken("two write to one place")
                moved = world._replace(owned=changed, moves=world.moves - 1, sender=owned.engine)
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
        if engine.sends:
            yield self.sent(world, place)
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
                return self.put(world, place, engine._replace(sends=epoch))
            case ("export", epoch):
                return self.reply(world, place, ("stays", epoch))
            case ("cancel", epoch) if engine.epoch == epoch:
                world = self.put(world, place, Engine(sends=engine.sends))
                return self.reply(world, place, ("row", epoch, engine.tokens, "cancelled"))
        return world

    def sent(self, world: World, place: int) -> World:
        """Give up the request, whose pages have gone ahead, unless it has ended meanwhile."""
        epoch = world.engines[place].sends
        world = self.landed(world, place)
        has_it = world.engines[place].epoch
        world = self.put(world, place, Engine())
        return self.reply(world, place, ("exported" if has_it else "stays", epoch))

    def landed(self, world: World, place: int) -> World:
        """Read the launched step: one more token, which may be the last."""
        engine = world.engines[place]
        if not engine.ahead:
            return world
        tokens = engine.tokens + 1
        last = tokens == TOKENS
        left = Engine(sends=engine.sends) if last else engine._replace(tokens=tokens, ahead=False)
        world = self.put(world, place, left)
        return self.reply(world, place, ("row", engine.epoch, tokens, "stop" if last else ""))

    # ---- the pool

    def read(self, world: World, place: int) -> Iterator[World]:
        if not world.of[place]:
            return
        message, world = world.of[place][0], world._replace(of=at(world.of, place, world.of[place][1:]))
        owned = world.owned
        if owned is None and message[0] in {"exported", "stays"} and place == world.sender and self.replies:
            world = world._replace(sender=None)
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
                yield world._replace(owned=ownership.accepted(owned), sender=None)
            case ("stays", _):
                yield world._replace(owned=ownership.stayed(owned), sender=None)
            case ("exported", _):
                to = owned.to if owned.to is not None and self.live(world, owned.to) else self.any(world)
                yield self.go_on(world, *ownership.exported(owned, to))

    def hear(self, world: World, place: int) -> Iterator[World]:
        """Hear of a loss, before or after what its pipe holds is read."""
        if place not in world.unheard:
            return
        world = world._replace(unheard=world.unheard - {place})
        owned = world.owned
        if owned is None and world.sender == place:
            yield world._replace(sender=None)
        elif owned is None or owned.engine != place:
            yield world
        elif not self.keep and owned.epoch > 1 and owned.phase is Phase.PLACED:
            yield world._replace(owned=None, end="forgotten")
        else:
            world = world._replace(sender=None)
            yield self.go_on(world, *ownership.lost(owned, self.any(world)))

    def go_on(self, world: World, owned: Owned, act: Act) -> World:
        if act is not Act.PLACE:
            return world._replace(owned=None, end=act.value, sender=None)
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
    if world.sender is not None or any(each.sends for each in world.engines):
        raise Broken(f"its place is not free: {world}")


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


def test_the_search_finds_a_place_that_is_never_free_again() -> None:
    with pytest.raises(Broken, match="its place is not free"):
        search(Model(reply=False), begin())


def test_the_search_finds_a_request_that_is_dropped_before_its_new_engine_has_answered() -> None:
    with pytest.raises(Broken, match="forgotten though an engine was left"):
        search(Model(keep=False), begin())


def test_a_request_that_loses_engine_after_engine_fails_before_it_takes_them_all() -> None:
    one, acts = Owned(0), []
    for _ in range(MAX_LOSSES):
        one, act = ownership.lost(one, 1 - one.engine)
        acts.append(act)
    assert acts == [Act.PLACE] * (MAX_LOSSES - 1) + [Act.FAILED]
