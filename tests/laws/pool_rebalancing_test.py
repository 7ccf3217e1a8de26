"""Requests move between the engines of a pool only where all of them together finish sooner for it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from site_engine.core.load import IterationCost
from site_engine.pool.rebalancing import (
    LOOK_EVERY_S,
    MAX_MOVES,
    WORTH,
    Move,
    Placed,
    Rebalancer,
    Room,
    plan_moves,
)

COST = IterationCost(0.004, 0.0002, 0.0, 2e-8)
SLOTS, KV_TOKENS = 16, 40_000


def rooms_of(placed: Sequence[Placed], engines: int = 3) -> dict[int, Room]:
    here = [[each for each in placed if each.engine == engine] for engine in range(engines)]
    return {
        engine: Room(
            SLOTS - len(its), KV_TOKENS - sum(each.context_tokens + each.remaining_tokens for each in its)
        )
        for engine, its in enumerate(here)
    }


def total_s(placed: Sequence[Placed], cost: IterationCost = COST) -> float:
    """Return the sum of the seconds in which the requests finish, iteration by iteration. None waits."""
    total = 0.0
    for engine in {each.engine for each in placed}:
        running = [(each.remaining_tokens, each.context_tokens) for each in placed if each.engine == engine]
        iteration = 0
        while running := [each for each in running if each[0] > iteration]:
            total += len(running) * cost.seconds(len(running), len(running), sum(kv for _, kv in running))
            iteration += 1
    return total


def after(placed: Sequence[Placed], move: Move) -> list[Placed]:
    return [
        each._replace(engine=move.to, waits=False) if each.id == move.request_id else each for each in placed
    ]


placements = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 2_000), st.integers(1, 300)), min_size=1, max_size=SLOTS
).map(lambda found: [Placed(str(at), *each) for at, each in enumerate(found)])


@given(placements, st.floats(0.0, 1e-6))
def test_each_move_lets_all_finish_sooner_by_more_than_it_costs(placed: list[Placed], copy_s: float) -> None:
    moves = plan_moves(placed, rooms_of(placed), COST, copy_s)
    assert len({move.request_id for move in moves}) == len(moves) <= MAX_MOVES
    for move in moves:
        moved = after(placed, move)
        assert total_s(placed) - total_s(moved) == pytest.approx(move.gain_s)
        assert move.gain_s > WORTH * move.cost_s
        placed = moved


@given(st.integers(0, 5), st.integers(1, 2_000), st.integers(1, 300), st.integers(0, 1))
def test_an_even_pool_moves_nothing(each: int, context: int, remaining: int, more: int) -> None:
    counts = [each + (more if engine == 1 else 0) for engine in range(3)]
    placed = [
        Placed(f"{engine}.{at}", engine, context, remaining)
        for engine, count in enumerate(counts)
        for at in range(count)
    ]
    assert plan_moves(placed, rooms_of(placed), COST, 0.0) == []


@given(placements)
def test_no_engine_gets_more_than_it_has_room_for(placed: list[Placed]) -> None:
    rooms = {engine: Room(min(2, room.slots), 2_500) for engine, room in rooms_of(placed).items()}
    waiting = [each._replace(waits=each.engine == 0 and at % 2 == 0) for at, each in enumerate(placed)]
    for some in (placed, waiting):
        moves = plan_moves(some, rooms, COST, 0.0)
        for engine in rooms:
            come = [each for move in moves for each in some if move[:2] == (each.id, engine)]
            left = sum(each.engine == engine for move in moves for each in some if each.id == move.request_id)
            assert len(come) <= 2 + left
            assert left or sum(each.context_tokens + each.remaining_tokens for each in come) <= 2_500


def live(placed: list[Placed], *, moves: bool) -> tuple[float, list[Move], list[list[int]]]:
    """Compute until all have ended; return the sum of their ends, the moves, and the rows at each look."""
    rebalancer, now_s, ends_s, made, rows = Rebalancer(), 1.0, 0.0, list[Move](), list[list[int]]()
    next_s = [now_s] * 3  # when the engines have computed another iteration
    while placed:
        engine = min((each.engine for each in placed), key=next_s.__getitem__)
        now_s = next_s[engine]
        here = [each for each in placed if each.engine == engine]
        now_s = next_s[engine] = now_s + COST.seconds(
            len(here), len(here), sum(each.context_tokens for each in here)
        )
        placed = [
            each._replace(context_tokens=each.context_tokens + 1, remaining_tokens=each.remaining_tokens - 1)
            if each.engine == engine
            else each
            for each in placed
        ]
        ends_s += now_s * sum(each.remaining_tokens <= 0 for each in placed)
        placed = [each for each in placed if each.remaining_tokens > 0]
        if moves and rebalancer.is_due(now_s):
            rows.append([sum(each.engine == one for each in placed) for one in range(3)])
            for move in rebalancer.moves(placed, rooms_of(placed), COST, now_s):
                made.append(move)
                placed = after(placed, move)
                next_s[move.to] = max(next_s[move.to], now_s)
                rebalancer.came_over(move.request_id, now_s + 0.03)
    return ends_s, made, rows


def test_a_skewed_pool_evens_out_and_every_request_moves_once_at_most() -> None:
    placed = [Placed(str(at), 0, 800, 2_000 + 5 * at) for at in range(SLOTS)]
    unmoved_s, _, _ = live(placed, moves=False)
    moved_s, made, rows = live(placed, moves=True)
    assert rows[0] == [16, 0, 0]
    assert max(rows[3]) - min(rows[3]) <= 1
    assert len({move.request_id for move in made}) == len(made) <= 11
    assert moved_s < unmoved_s


def test_what_waits_goes_where_there_is_room_before_anything_that_runs() -> None:
    full = [Placed(f"runs {at}", 0, 500, 400) for at in range(SLOTS)]
    waiting = [Placed(f"waits {at}", 0, 100, 200, waits=True) for at in range(2)]
    rooms = {0: Room(-2, 10_000), 1: Room(1, 400)}
    (move,) = plan_moves([*full, *waiting], rooms, COST, 1.0)
    assert (move.request_id, move.to) == ("waits 1", 1)
    assert move.gain_s == pytest.approx(400 * COST.seconds(SLOTS, SLOTS, SLOTS * 500))
    assert plan_moves([*full, *waiting], {0: Room(-2, 10_000), 1: Room(1, 299)}, COST, 1.0) == []
    elsewhere = Placed("waits there", 1, 100, 200, waits=True)
    assert plan_moves([*full, *waiting, elsewhere], rooms, COST, 1.0) == []


@pytest.mark.parametrize("room", [Room(-9, 0.0), Room(9, 1.0)])
def test_a_look_takes_no_longer_than_a_few_walks_over_all_that_waits(room: Room) -> None:
    """Thousands may wait, and the event loop waits for the look."""
    looked = 0

    class Engine(int):
        def __hash__(self) -> int:
            nonlocal looked
            looked += 1
            return int(self)

    waiting = [Placed(f"waits {at}", Engine(at % 2), 100, 200, waits=True) for at in range(1_000)]
    running = [Placed(f"runs {at}", Engine(at % 3), 100, 200) for at in range(6)]
    rooms = {0: Room(-9, 0.0), 1: Room(-9, 0.0), 2: room}
    assert plan_moves([*running, *waiting], rooms, COST, 0.0) == []
    assert looked <= 10 * len(waiting)


def test_a_move_that_takes_longer_than_it_saves_is_not_made() -> None:
    placed = [Placed(str(at), 0, 1_000, 100) for at in range(8)]
    assert plan_moves(placed, rooms_of(placed), COST, 0.0)
    assert plan_moves(placed, rooms_of(placed), COST, 0.001) == []


def test_a_look_follows_the_last_and_its_moves_by_a_while() -> None:
    rebalancer = Rebalancer()
    placed = [Placed(str(at), 0, 10, 2_000) for at in range(SLOTS)]
    assert rebalancer.is_due(100.0)
    assert not rebalancer.is_due(100.0 + LOOK_EVERY_S / 2)
    first = rebalancer.moves(placed, rooms_of(placed), COST, 100.0)
    assert len(first) == MAX_MOVES
    assert rebalancer.moves(placed, rooms_of(placed), COST, 101.0) == []  # they are under way
    for move in first[:-1]:
        rebalancer.came_over(move.request_id, 100.05)
    rebalancer.stayed(first[-1].request_id)
    second = rebalancer.moves(placed, rooms_of(placed), COST, 101.0)
    resting = {move.request_id for move in first[:-1]}
    assert second
    assert not resting & {move.request_id for move in second}
    rebalancer = Rebalancer()
    rebalancer.moves(placed, rooms_of(placed), COST, 100.0)
    left = [each for each in placed if each.id not in {move.request_id for move in first}]
    assert rebalancer.moves(left, rooms_of(left), COST, 101.0)  # what has ended is under way no more


def test_without_a_known_cost_nothing_moves() -> None:
    placed = [Placed(str(at), 0, 10, 2_000) for at in range(SLOTS)]
    assert Rebalancer().moves(placed, rooms_of(placed), IterationCost(0.0, 0.0, 0.0, 0.0), 100.0) == []
