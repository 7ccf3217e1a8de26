"""Decide which requests move between the engines of a pool, so that requests finish sooner.

While two requests run in one engine, each iteration of either also takes the row of the other: together they
finish later by the seconds of both rows for each token that both still generate. A request that moves loses
that with its old neighbours and gains it with the new ones; it pays for its way. A request that waits moves
to an engine with room for it.

Pure values: `Rebalancer` is told the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from site_engine.core.load import IterationCost

LOOK_EVERY_S = 1.0
MOVE_S = 0.02
"""The part of a move's time that does not depend on length: messages, and the iterations under way."""
REST_S = 10.0
"""A request that has moved stays for so long: first the speed of its new neighbours has to be measured."""
MAX_MOVES = 4
"""Moves at a time: for each, two engines wait for the iteration under way."""
WORTH = 2.0
"""The seconds that a move must save, as a multiple of its cost: forecasts and fits err by as much."""
MIN_SHARE = 0.05
"""The share of its remaining seconds that a move must save: less is noise."""

Floats: TypeAlias = NDArray[np.float64]


class Placed(NamedTuple):
    """A request in an engine. `context_tokens`: of its prompt and its answer so far."""

    id: str
    engine: int
    context_tokens: int
    remaining_tokens: float
    waits: bool = False


class Room(NamedTuple):
    """The slots and the KV tokens that an engine has left once its own requests have all they need."""

    slots: int
    tokens: float


class Move(NamedTuple):
    """A move of a request to engine `to`. `gain_s`: how much sooner all requests together end; `cost_s`: how
    much later by the move itself.
    """

    request_id: str
    to: int
    gain_s: float
    cost_s: float


def plan_moves(
    placed: Sequence[Placed],
    rooms: Mapping[int, Room],
    cost: IterationCost,
    move_s_per_token: float,
    resting: Iterable[str] = (),
) -> list[Move]:
    """Return the moves that are worth their cost, at most MAX_MOVES, the best first.

    `move_s_per_token`: of the context, beside MOVE_S. What waits goes before what runs.
    """
    left, rooms, stays = list(placed), dict(rooms), set(resting)
    moves: list[Move] = []
    while len(moves) < MAX_MOVES:
        best = _best_waiting(left, rooms, cost, stays) or _best_running(
            left, rooms, cost, move_s_per_token, stays
        )
        if best is None:
            break
        moves.append(best)
        stays.add(best.request_id)
        at = next(at for at, each in enumerate(left) if each.id == best.request_id)
        here, needs = left[at], left[at].context_tokens + left[at].remaining_tokens
        left[at] = here._replace(engine=best.to, waits=False)
        if not here.waits:
            rooms[here.engine] = Room(rooms[here.engine].slots + 1, rooms[here.engine].tokens + needs)
        rooms[best.to] = Room(rooms[best.to].slots - 1, rooms[best.to].tokens - needs)
    return moves


def _best_waiting(
    placed: Sequence[Placed], rooms: Mapping[int, Room], cost: IterationCost, stays: set[str]
) -> Move | None:
    """Return the move of the request that waits longest, to the engine with room and the fewest rows.

    It waits until as many have ended as wait with it. Its engine may have the prompt's beginning computed,
    which another computes again.
    """
    moves: list[Move] = []
    rows = _rows_where_none_waits(placed, rooms)
    for engine in {each.engine for each in placed if each.waits} & rooms.keys() if rows else ():
        waiting = [each for each in placed if each.engine == engine and each.waits]
        ends = sorted(each.remaining_tokens for each in placed if each.engine == engine and not each.waits)
        if not waiting or not ends:
            continue
        iteration_s = _iteration_s(placed, engine, cost)
        wait_s = ends[min(len(waiting), len(ends)) - 1] * iteration_s
        for each in reversed(waiting):
            needs = each.context_tokens + each.remaining_tokens
            able = [to for to in rows if rooms[to].tokens >= needs]
            cost_s = MOVE_S + each.context_tokens * cost.per_token_s
            if able and each.id not in stays and wait_s > WORTH * cost_s:
                moves.append(Move(each.id, min(able, key=rows.__getitem__), wait_s, cost_s))
                break
    return max(moves, key=lambda move: move.gain_s - move.cost_s, default=None)


def _rows_where_none_waits(placed: Sequence[Placed], rooms: Mapping[int, Room]) -> dict[int, int]:
    """Return the requests of each engine that has a slot left and where none waits."""
    held = {engine: 0 for engine, room in rooms.items() if room.slots > 0}
    for each in placed:
        if each.waits:
            held.pop(each.engine, None)
        elif each.engine in held:
            held[each.engine] += 1
    return held


def _iteration_s(placed: Sequence[Placed], engine: int, cost: IterationCost) -> float:
    running = [each.context_tokens for each in placed if each.engine == engine and not each.waits]
    return cost.seconds(len(running), len(running), sum(running))


def _best_running(
    placed: Sequence[Placed],
    rooms: Mapping[int, Room],
    cost: IterationCost,
    move_s_per_token: float,
    stays: set[str],
) -> Move | None:
    """Return the move of a running request that saves most, if it is worth its cost."""
    running = [each for each in placed if not each.waits]
    waits = {each.engine for each in placed if each.waits}
    remaining = np.array([each.remaining_tokens for each in running], dtype=np.float64)
    context = np.array([each.context_tokens for each in running], dtype=np.float64)
    row_s = cost.per_row_s + cost.per_token_s + cost.per_kv_token_s * context  # of one iteration
    engines = np.array([each.engine for each in running], dtype=np.int64)
    movable = np.array([each.id not in stays for each in running], dtype=np.bool_)
    best: Move | None = None
    for source in rooms:
        here = np.flatnonzero((engines == source) & movable)
        if not here.size:
            continue
        own = np.flatnonzero(engines == source)
        before_s = _delay_s(row_s[here], remaining[here], row_s[own], remaining[own])
        before_s -= 2 * row_s[here] * remaining[here]  # each is no neighbour of itself
        least_s = MIN_SHARE * remaining[here] * (cost.base_s + row_s[own].sum())
        for to, room in rooms.items():
            if to == source or room.slots < 1 or to in waits:
                continue
            others = np.flatnonzero(engines == to)
            gain_s = before_s - _delay_s(row_s[here], remaining[here], row_s[others], remaining[others])
            stopped = 1 + (own.size - 1 + others.size) / 2  # the giving engine stops first, then the taking
            cost_s = MOVE_S + move_s_per_token * context[here] * stopped
            worth = (gain_s > WORTH * cost_s) & (gain_s > least_s)
            worth &= context[here] + remaining[here] <= room.tokens
            net_s = np.where(worth, gain_s - cost_s, -np.inf)
            at = int(net_s.argmax())
            if worth[at] and (best is None or net_s[at] > best.gain_s - best.cost_s):
                best = Move(running[here[at]].id, to, float(gain_s[at]), float(cost_s[at]))
    return best


def _delay_s(row_s: Floats, remaining: Floats, other_row_s: Floats, other_remaining: Floats) -> Floats:
    """Return, for each request, by how much it and the others are later for running together: the sum over
    the others of (both rows' seconds) x (the iterations that both take part in).
    """
    order = np.argsort(other_remaining)
    tokens, rows = other_remaining[order], other_row_s[order]
    shorter = np.searchsorted(tokens, remaining)
    sums = [np.concatenate(([0.0], np.cumsum(each))) for each in (tokens, rows, rows * tokens)]
    all_tokens, all_rows, all_products = sums
    longer, longer_rows = len(tokens) - shorter, all_rows[-1] - all_rows[shorter]
    of_shorter = row_s * all_tokens[shorter] + all_products[shorter]
    return np.asarray(of_shorter + remaining * (row_s * longer + longer_rows))


class Rebalancer:
    """When to look, which requests rest, and what moves have taken so far."""

    def __init__(self) -> None:
        self._looked_s = 0.0
        self._rests: dict[str, float] = {}  # until when, by request
        self._under_way: dict[str, tuple[float, int]] = {}  # since when, and the tokens
        self._taken = (0.0, 0.0)  # seconds and tokens of moves, sums that fade

    def is_due(self, now_s: float) -> bool:
        """Return whether to look now, once a second."""
        due = now_s - self._looked_s >= LOOK_EVERY_S
        if due:
            self._looked_s = now_s
        return due

    def moves(
        self, placed: Sequence[Placed], rooms: Mapping[int, Room], cost: IterationCost, now_s: float
    ) -> list[Move]:
        """Return the moves to begin, none while others are under way; `stayed` or `came_over` is to follow.

        `placed` has all requests that there are.
        """
        known = {each.id for each in placed}
        self._rests = {name: till for name, till in self._rests.items() if till > now_s and name in known}
        self._under_way = {name: way for name, way in self._under_way.items() if name in known}
        if self._under_way or not any(cost):
            return []
        seconds, tokens = self._taken
        s_per_token = max(seconds / tokens if tokens else 0.0, cost.per_token_s)  # it may be computed again
        moves = plan_moves(placed, rooms, cost, s_per_token, self._rests)
        chosen = {move.request_id for move in moves}
        self._under_way = {each.id: (now_s, each.context_tokens) for each in placed if each.id in chosen}
        return moves

    def stayed(self, request_id: str) -> None:
        """Note that a request stays where it is."""
        self._under_way.pop(request_id, None)

    def came_over(self, request_id: str, now_s: float) -> None:
        """Note that an engine has taken a request, if it was on its way."""
        began = self._under_way.pop(request_id, None)
        if began is None:
            return
        since_s, tokens = began
        seconds, before = self._taken
        self._taken = 0.9 * seconds + max(0.0, now_s - since_s - MOVE_S), 0.9 * before + tokens
        self._rests[request_id] = now_s + REST_S
