"""Laws of offloading: what a bidder wins from the queues of others, and what it does not."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import Credit, IterationCost, Lane, LoadReport, Model, Site, SiteIdentity, SiteState
from gateway.routing.demand import Demand
from gateway.routing.failover import MAX_MOVES
from gateway.routing.fleet import Fleet
from gateway.routing.offload import Bid, Offer, Pending, offer, promising, wins
from gateway.routing.prefixes import NOTHING_CACHED, Cached

NOW = 50.0


def site(
    name: str,
    *,
    running: int = 0,
    pending: int = 0,
    slots: int = 4,
    seconds: float = 0.02,
    per_token_s: float = 0.0,
) -> Site:
    model = Model("m", "r", 1024, 0, "o", frozenset())
    identity = SiteIdentity(name, "b", "c", "r", {"m": model}, slots=slots, kv_capacity_tokens=100_000)
    load = LoadReport(
        seq=1,
        received_s=NOW,
        running=running,
        pending=pending,
        kv_free_tokens=90_000,
        iteration=IterationCost(base_s=seconds, per_token_s=per_token_s),
        running_remaining=(200,) * running,
        pending_prompt_tokens=20 * pending,
        pending_response_tokens=100.0 * pending,
    )
    return Site(identity, SiteState.READY, load)


def pending(
    number: int,
    where: str = "busy",
    *,
    tokens: float = 100.0,
    moves: int = 0,
    lane: Lane = Lane.INTERACTIVE,
    prompt: int = 20,
    cached: Cached = NOTHING_CACHED,
    choices: int = 1,
) -> Pending:
    demand = Demand("m", prompt, tokens, 250, lane, cached=cached, choices=choices)
    return Pending(f"q{number}", where, demand, moves)


counts = st.integers(0, 40)
slots = st.integers(1, 16)


@given(counts, slots, st.integers(0, 16), st.integers(0, 20), st.floats(0.001, 0.5))
def test_a_bidder_wins_no_more_than_it_can_start_at_once(
    waiting: int, room: int, running: int, credit: int, seconds: float
) -> None:
    bidder = site("idle", slots=room, running=min(running, room), seconds=seconds)
    bidder = replace(bidder, credit=Credit(credit, 20.0 * credit, 100.0 * credit))
    busy = site("busy", running=4, pending=waiting)
    won = wins("idle", [pending(n) for n in range(waiting)], Fleet.of([bidder, busy]), NOW)
    assert len(won) <= max(0, room - min(running, room) - credit)
    assert len({each.attempt_id for each in won}) == len(won)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=8), slots)
def test_a_bidder_wins_no_more_choices_than_it_has_slots_free(wanted: list[int], room: int) -> None:
    queue = [pending(number, choices=choices) for number, choices in enumerate(wanted)]
    won = wins("idle", queue, Fleet.of([site("idle", slots=room), site("busy", running=4, pending=40)]), NOW)
    assert won, "one of more choices than there are slots takes all of them"
    assert sum(min(each.demand.choices, room) for each in won) <= room


@given(st.integers(1, 5))
def test_a_site_with_a_free_slot_but_no_kv_for_a_query_wins_nothing(waiting: int) -> None:
    """Soon there will be KV for it, and it would gain, but what waits at the bidder has not gained yet."""
    room = site("idle", running=1)
    full = replace(room, load=replace(room.load, kv_free_tokens=100, running_remaining=(5,)))
    queue = [pending(number) for number in range(waiting)]
    busy = site("busy", running=4, pending=40)
    assert wins("idle", queue, Fleet.of([room, busy]), NOW)
    assert wins("idle", queue, Fleet.of([full, busy]), NOW) == []


@given(st.integers(1, 40))
def test_an_idle_equal_site_takes_work_from_a_queue(waiting: int) -> None:
    bidder, busy = site("idle"), site("busy", running=4, pending=waiting)
    won = wins("idle", [pending(n) for n in range(waiting)], Fleet.of([bidder, busy]), NOW)
    assert len(won) == min(waiting, 4)


@given(st.lists(st.floats(1, 900), min_size=2, max_size=8), st.integers(1, 4))
def test_of_those_that_gain_the_same_seconds_the_shortest_answers_move(
    all_tokens: list[float], room: int
) -> None:
    """Sites that differ in nothing but the wait, which is the same for all: until one request ends."""
    bidder, busy = site("idle", slots=4, running=4 - room), site("busy", running=4)
    waiting = [pending(number, tokens=tokens) for number, tokens in enumerate(all_tokens)]
    won = wins("idle", waiting, Fleet.of([bidder, busy]), NOW)
    shortest = sorted(each.demand.response_tokens for each in waiting)[: len(won)]
    assert len(won) == min(room, len(waiting))
    assert sorted(each.demand.response_tokens for each in won) == shortest


@given(st.lists(st.tuples(st.floats(1, 900), st.booleans()), min_size=2, max_size=8), st.integers(1, 4))
def test_chats_move_before_lines_of_batches(answers: list[tuple[float, bool]], room: int) -> None:
    bidder, busy = site("idle", slots=4, running=4 - room), site("busy", running=4)
    waiting = [
        pending(number, tokens=tokens, lane=Lane.BATCH if line else Lane.INTERACTIVE)
        for number, (tokens, line) in enumerate(answers)
    ]
    won = [each.demand for each in wins("idle", waiting, Fleet.of([bidder, busy]), NOW)]
    chats = sorted(tokens for tokens, line in answers if not line)
    assert len(won) == min(room, len(waiting))
    assert [each.response_tokens for each in won if each.lane is Lane.INTERACTIVE] == chats[: len(won)]


def test_of_lines_of_batches_the_one_that_would_wait_longest_moves_first() -> None:
    """Sites start what is short first, so that the longest waits for all others."""
    sites = Fleet.of([site("idle", slots=1), site("busy", running=4, pending=9)])
    for lane, first in ((Lane.BATCH, 800), (Lane.INTERACTIVE, 10)):
        waiting = [pending(tokens, tokens=tokens, lane=lane) for tokens in (10, 700, 800)]
        assert [each.demand.response_tokens for each in wins("idle", waiting, sites, NOW)] == [first]


def test_a_much_slower_site_wins_nothing_that_would_finish_sooner_where_it_is() -> None:
    bidder, busy = site("idle", seconds=1.0), site("busy", running=4, pending=1, seconds=0.01)
    assert wins("idle", [pending(0)], Fleet.of([bidder, busy]), NOW) == []


def test_a_far_site_wins_nothing_that_gains_less_than_the_way() -> None:
    bidder, busy = replace(site("idle"), rtt_s=30.0), site("busy", running=4, pending=2)
    assert wins("idle", [pending(0)], Fleet.of([bidder, busy]), NOW) == []


def test_a_far_site_is_not_asked_for_what_it_starts_before_its_answer_is_here() -> None:
    bidder, busy = site("idle"), site("busy", running=4, pending=1)
    assert wins("idle", [pending(0)], Fleet.of([bidder, busy]), NOW) != []
    assert wins("idle", [pending(0)], Fleet.of([bidder, replace(busy, rtt_s=30.0)]), NOW) == []


def test_a_site_with_a_free_slot_behind_a_long_prompt_wins_nothing() -> None:
    """The next iterations of such a site go to the prompt that runs there."""
    bidder, busy = site("idle", running=1), site("busy", running=4, pending=1)
    cost = IterationCost(base_s=0.02, per_token_s=0.001)
    assert wins("idle", [pending(0)], Fleet.of([bidder, busy]), NOW) != []
    load = replace(bidder.load, iteration=cost, unread_tokens=30_000)
    assert wins("idle", [pending(0)], Fleet.of([replace(bidder, load=load), busy]), NOW) == []


def test_a_query_that_moved_often_enough_stays() -> None:
    bidder, busy = site("idle"), site("busy", running=4, pending=5)
    sites = Fleet.of([bidder, busy])
    assert wins("idle", [pending(0, moves=MAX_MOVES)], sites, NOW) == []
    assert wins("idle", [pending(0, moves=MAX_MOVES - 1)], sites, NOW) != []


def test_nobody_wins_its_own_queue_or_one_of_a_site_that_left() -> None:
    bidder, busy = site("idle", pending=0), site("busy", running=4, pending=5)
    sites = Fleet.of([bidder, busy])
    assert wins("idle", [pending(0, "idle"), pending(1, "gone")], sites, NOW) == []


lengths = st.lists(st.floats(1, 900), min_size=1, max_size=6)


def donors_of(bidder: Site, offers: list[Offer]) -> list[str]:
    bid = Bid.of(bidder)
    return promising(bid, offers) if bid is not None else []


paces_s = st.floats(0.001, 0.1)
ways_s = st.floats(0, 3)


@given(lengths, lengths, st.integers(0, 8), paces_s, paces_s, ways_s, ways_s)
def test_a_quick_look_leaves_out_nothing_that_would_be_won(  # noqa: PLR0917  # hypothesis passes by place
    at_one: list[float],
    at_other: list[float],
    room: int,
    seconds: float,
    bidders: float,
    donor_way_s: float,
    way_s: float,
) -> None:
    one = replace(site("one", running=4, pending=len(at_one), seconds=seconds), rtt_s=donor_way_s)
    other = site("other", running=3, pending=len(at_other))
    bidder = replace(site("idle", slots=8, running=8 - room, seconds=bidders), rtt_s=way_s)
    fleet = Fleet.of([one, other, bidder])
    waiting = [
        [pending(number, donor, tokens=tokens) for number, tokens in enumerate(all_tokens, first)]
        for donor, all_tokens, first in (("one", at_one, 0), ("other", at_other, 10))
    ]
    offers = [
        offer(donor, [each.demand for each in all_of_it])
        for donor, all_of_it in zip((one, other), waiting, strict=True)
    ]
    donors = donors_of(bidder, offers)
    quickly = wins("idle", [each for each in waiting[0] + waiting[1] if each.site in donors], fleet, NOW)
    assert quickly == wins("idle", waiting[0] + waiting[1], fleet, NOW)


@given(
    st.lists(st.tuples(st.floats(1, 300), st.integers(0, 400), st.integers(0, 400)), min_size=1, max_size=6),
    st.floats(0.0, 0.05),
    st.floats(0.0, 0.05),
    ways_s,
)
def test_a_quick_look_counts_what_the_bidder_has_in_its_cache(
    waiting: list[tuple[float, int, int]], here_s: float, there_s: float, way_s: float
) -> None:
    donor = site("busy", running=4, pending=len(waiting), per_token_s=here_s)
    bidder = replace(site("idle", per_token_s=there_s), rtt_s=way_s)
    fleet = Fleet.of([donor, bidder])
    queue = [
        pending(number, tokens=tokens, prompt=400, cached=Cached({"busy": here, "idle": there}))
        for number, (tokens, here, there) in enumerate(waiting)
    ]
    offers = [offer(donor, [each.demand for each in queue])]
    assert donors_of(bidder, offers) or not wins("idle", queue, fleet, NOW)


def test_a_query_moves_to_the_prefix_that_another_site_has_cached() -> None:
    donor, bidder = site("busy", running=4, pending=1), site("idle", per_token_s=0.05)
    fleet = Fleet.of([donor, bidder])
    unknown, known = (
        pending(0, tokens=10.0, prompt=400, cached=cached)
        for cached in (NOTHING_CACHED, Cached({"idle": 380.0}))
    )
    assert wins("idle", [unknown], fleet, NOW) == []
    assert wins("idle", [known], fleet, NOW) == [known]
    assert donors_of(bidder, [offer(donor, [known.demand])]) == ["busy"]
