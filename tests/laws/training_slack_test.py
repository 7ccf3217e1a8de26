"""Training has the time that serving leaves, and never more than its bounds allow."""

from __future__ import annotations

from random import Random
from statistics import median, quantiles
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from site_engine.core.slack import (
    KEPT_DELAYS,
    LATE_CHUNK_TOKENS,
    MIN_CHUNK_TOKENS,
    Bounds,
    Deferral,
    NextSlice,
    Serving,
    Slack,
    SliceCosts,
)

SECONDS = st.floats(0.0, 1.0)
SERVING = st.builds(
    Serving,
    chat_waits=st.booleans(),
    chat_decodes=st.booleans(),
    batch=st.booleans(),
    since_tokens_s=SECONDS,
    iteration_s=SECONDS,
    newcomer_s=SECONDS,
    oldest_wait_s=SECONDS,
    sliced=st.booleans(),
    free_share=st.floats(0.0, 1.0),
)
FOLLOWING = st.builds(NextSlice, SECONDS, SECONDS, st.booleans())


@given(SERVING, FOLLOWING)
def test_a_slice_runs_only_where_what_is_served_can_wait_for_it(
    serving: Serving, following: NextSlice
) -> None:
    bounds = Bounds(between_tokens_s=0.5)
    slack = Slack(bounds)
    taken = slack.takes(serving, following)
    if serving.chat_waits:
        assert not taken
    elif serving.chat_decodes:
        whole_s = slack.aim_s - serving.iteration_s
        free, limit_s = serving.free_share, whole_s
        if serving.sliced:
            limit_s = min(free * whole_s, max(4 * serving.iteration_s, free**4 * whole_s))
        left_s = limit_s - min(serving.newcomer_s, whole_s / 4) - serving.since_tokens_s
        assert taken == (following.seconds <= left_s)
    else:
        assert taken == (not serving.batch)  # which has had no time yet


@given(SERVING, FOLLOWING)
def test_by_the_rule_of_the_paper_whole_micro_batches_run_beside_nothing(
    serving: Serving, following: NextSlice
) -> None:
    slack = Slack(Bounds(deferral=Deferral.ITERATION, wait_s=0.5))
    taken = slack.takes(serving, following)
    if not following.begins:
        assert taken
    elif serving.chat_decodes:
        assert not taken
    elif serving.chat_waits or serving.batch:
        assert taken == (serving.oldest_wait_s + following.micro_batch_s <= 0.5)
    else:
        assert taken


def shares(slack: Slack, serving: Serving, slice_s: float, iteration_s: float, steps: int = 4000) -> float:
    """Return training's share of the device time where an engine serves `serving` without end."""
    trained = served = 0.0
    for _ in range(steps):
        if slack.takes(serving, NextSlice(slice_s)):
            slack.trained(slice_s, serving, NextSlice(slice_s))
            trained += slice_s
        else:
            slack.served(iteration_s, batch_alone=serving.batch and not serving.chat_decodes)
            served += iteration_s
    return trained / (trained + served)


@given(st.floats(0.05, 0.95), st.floats(0.001, 0.02), st.floats(0.001, 0.02))
def test_batches_alone_have_their_share_of_the_time(share: float, slice_s: float, iteration_s: float) -> None:
    slack = Slack(Bounds(batch_share=share))
    assert shares(slack, Serving(batch=True), slice_s, iteration_s) == pytest.approx(1.0 - share, abs=0.02)


@given(st.floats(0.0, 0.5), st.floats(0.001, 0.02), st.floats(0.001, 0.02))
def test_training_has_its_least_share_beside_any_answers(
    share: float, slice_s: float, iteration_s: float
) -> None:
    """No slice fits the bound here, so that all the time that training has is what it was promised."""
    slack = Slack(Bounds(least_share=share, between_tokens_s=1e-6))
    serving = Serving(chat_decodes=True, iteration_s=iteration_s)
    assert shares(slack, serving, slice_s, iteration_s) == pytest.approx(share, abs=0.02)


@given(st.integers(0, 500))
def test_time_that_was_given_up_is_not_saved_for_later(rounds: int) -> None:
    """After any time beside chats, training takes at most a second at once from a batch."""
    slack = Slack(Bounds(batch_share=0.5, least_share=0.5))
    for _ in range(rounds):
        slack.served(1.0, batch_alone=False)
    serving, taken = Serving(batch=True), 0
    while slack.takes(serving, NextSlice(0.1)):
        slack.trained(0.1, serving, NextSlice(0.1))
        taken += 1
    assert taken <= 25


@given(st.floats(0.0, 0.1), st.floats(0.0, 0.1))
def test_prompts_beside_answers_get_what_the_bound_leaves(since_s: float, iteration_s: float) -> None:
    slack = Slack(Bounds(between_tokens_s=0.05))
    serving = Serving(chat_decodes=True, since_tokens_s=since_s)
    tokens = slack.chunk_tokens(serving, iteration_s, 1e-5)
    assert tokens is not None
    least = MIN_CHUNK_TOKENS if iteration_s < 0.05 else LATE_CHUNK_TOKENS
    assert tokens >= least
    assert tokens == least or since_s + iteration_s + tokens * 1e-5 <= slack.aim_s + 1e-9
    assert slack.chunk_tokens(Serving(chat_waits=True), iteration_s, 1e-5) is None


def between_tokens(draw: Random, *, slow: float, times: float, intervals: int) -> tuple[list[float], float]:
    """Return times between tokens beside slices of which `slow` take so many times longer, and training's
    share of all time.
    """
    slack, costs, now_s, trained_s, between = Slack(Bounds(between_tokens_s=0.02)), SliceCosts(), 0.0, 0.0, []
    while len(between) < intervals:
        began_s = now_s
        while True:
            kind, size = draw.choice((("forward", 1.0), ("backward", 2.0), ("head", 4.0)))
            following = NextSlice(costs.seconds(kind, 4000, now_s))
            serving = Serving(chat_decodes=True, since_tokens_s=now_s - began_s, iteration_s=0.001)
            if not slack.takes(serving, following):
                break
            taken_s = 0.001 * size * draw.uniform(0.8, 1.1) * (times if draw.random() < slow else 1.0)
            now_s += taken_s
            costs.observe(kind, 4000, taken_s, now_s)
            slack.trained(taken_s, serving, following)
            trained_s += taken_s
        now_s += 0.001 * draw.uniform(0.9, 1.5)
        between.append(now_s - began_s)
        slack.published(now_s - began_s)
    return between, trained_s / now_s


@pytest.mark.parametrize(("slow", "times"), [(0.0, 1.0), (0.01, 3.0), (0.0003, 50.0), (0.1, 3.0)])
def test_of_the_times_between_tokens_99_in_100_are_within_the_bound_whatever_slices_take(
    slow: float, times: float
) -> None:
    between, share = between_tokens(Random(1), slow=slow, times=times, intervals=8000)
    for part in (between[:2000], between[2000:4000], between[4000:]):
        assert quantiles(part, n=100)[98] <= 0.02
    assert share >= 0.4


def test_slices_fill_the_bound_where_they_take_what_is_foreseen() -> None:
    slack = Slack(Bounds(between_tokens_s=0.02))
    serving, following = Serving(chat_decodes=True, since_tokens_s=0.01, iteration_s=0.001), NextSlice(0.002)
    assert slack.aim_s < 0.02
    for _ in range(KEPT_DELAYS):
        slack.trained(0.002, serving, following)
        slack.published(0.013)
    assert slack.aim_s == 0.02


def test_a_long_delay_does_not_keep_slices_away_for_ever() -> None:
    slack = Slack(Bounds(between_tokens_s=0.02))
    serving, following = Serving(chat_decodes=True, iteration_s=0.001), NextSlice(0.012)
    assert slack.takes(serving, following)
    slack.trained(0.5, serving, following)
    slack.published(0.501)
    for _ in range(KEPT_DELAYS - 2):
        assert not slack.takes(serving, following)
        slack.published(0.001)
    assert slack.takes(serving, following)


def test_what_was_promised_to_training_and_times_without_it_are_no_delays() -> None:
    slack = Slack(Bounds(between_tokens_s=0.02, least_share=0.5))
    aim_s = slack.aim_s
    slack.published(5.0)
    slack.trained(0.5, Serving(), NextSlice(0.5))
    slack.published(5.0)
    slack.trained(0.5, Serving(chat_decodes=True), NextSlice(0.5))
    slack.published(0.5)
    assert slack.aim_s == aim_s


def test_the_next_slice_is_foreseen_as_nearly_the_longest_of_the_last_of_its_kind_and_size() -> None:
    costs = SliceCosts()
    assert costs.seconds("forward", 10, 0.0) == 0.0
    costs.observe("forward", 10, 9.0, 0.0)
    assert costs.seconds("forward", 10, 0.0) == 0.0, "the first of a kind and size allocates"
    for taken_s in (0.5, 2.0, 3.0):
        costs.observe("forward", 10, taken_s, 0.0)
    assert costs.seconds("forward", 10, 0.0) == 2.0
    assert costs.seconds("forward", 5, 0.0) == 2.0
    assert costs.seconds("forward", 20, 0.0) == 4.0
    assert costs.seconds("backward", 10, 0.0) == 0.0
    for _ in range(100):
        costs.observe("forward", 10, 1.0, 0.0)
    assert costs.seconds("forward", 10, 0.0) == 1.0


@given(st.dictionaries(st.integers(1, 9), st.floats(0.001, 0.1), min_size=1), st.integers(1, 12))
def test_a_size_that_was_seen_has_its_own_cost_and_another_that_of_the_next_larger(
    taken_s: dict[int, float], size: int
) -> None:
    costs = SliceCosts()
    for known, seconds in taken_s.items():
        for _ in range(2):
            costs.observe("forward", known, seconds, 0.0)
    larger = [each for each in taken_s if each >= size]
    most = max(taken_s)
    wanted = taken_s[min(larger)] if larger else taken_s[most] * size / most
    assert costs.seconds("forward", size, 0.0) == pytest.approx(wanted)


def test_a_size_that_comes_seldom_is_foreseen_as_it_was_while_others_run() -> None:
    costs = SliceCosts()
    for _ in range(2):
        costs.observe("update", 0, 0.02, 0.0)
    for now_s in range(60):
        costs.observe("forward", 10, 0.001, float(now_s))
    assert costs.seconds("update", 0, 59.0) == 0.02


def test_a_slice_that_once_took_long_is_tried_again() -> None:
    """Such as the first of a process: beside answers that never end it would not run until they do."""
    costs, slack = SliceCosts(), Slack(Bounds(between_tokens_s=0.02))
    for _ in range(2):
        costs.observe("forward", 100, 0.5, 0.0)
    tried_s = next(
        now_s
        for now_s in range(3600)
        if slack.takes(Serving(chat_decodes=True), NextSlice(costs.seconds("forward", 100, now_s)))
    )
    assert 5 < tried_s < 60
    costs.observe("forward", 100, 0.005, tried_s)
    assert costs.seconds("forward", 100, tried_s) == 0.005


class Row:
    """A chat in a slot: tokens of its prompt that are not read, and of its answer that are to come."""

    def __init__(self, arrived_s: float, prompt: int, tokens: int) -> None:
        self.arrived_s, self.unread, self.left, self.tokens = arrived_s, prompt, tokens, tokens


SLOTS = 8
SLICES_S = (0.003, 0.004, 0.007)
"""A layer forward, computed again, and backward."""


def arrivals(seed: int) -> list[tuple[float, int, int]]:
    """Return 400 chats: arrival in mean times between two, tokens of the prompt and of the answer."""
    draw, at, chats = Random(seed), 0.0, list[tuple[float, int, int]]()
    for _ in range(400):
        at += draw.expovariate(1.0)
        lengths = draw.lognormvariate(3.7, 0.8), draw.lognormvariate(2.3, 0.8)
        chats.append((at, *(min(96, max(2, int(each))) for each in lengths)))
    return chats


def served_beside(
    chats: list[tuple[float, int, int]], gap_s: float, slack: Slack | None, *, by_slots: bool = True
) -> tuple[float, float, float]:
    """Answer chats in eight slots, in virtual time, beside training without end if there is a `slack`.

    Returns the 99th percentile of the first tokens, training's share of the time, and the time.
    """
    draw, now_s, tokens_s, trained_s, slices, sliced = Random(1), 0.0, 0.0, 0.0, 0, False
    coming = [Row(at * gap_s, prompt, tokens) for at, prompt, tokens in reversed(chats)]
    rows, first_s, chunk = list[Row](), list[float](), None
    while coming or rows:
        while coming and len(rows) < SLOTS and coming[-1].arrived_s <= now_s:
            rows.append(coming.pop())
        waits = bool(coming) and coming[-1].arrived_s <= now_s
        decoding = [row for row in rows if not row.unread]
        iteration_s = 0.004 + 0.00035 * len(decoding)
        if slack is not None:
            serving = Serving(
                chat_waits=waits or len(decoding) < len(rows),
                chat_decodes=bool(decoding),
                since_tokens_s=now_s - tokens_s,
                iteration_s=iteration_s,
                newcomer_s=MIN_CHUNK_TOKENS * 0.00016,
                sliced=sliced,
                free_share=1 - len(rows) / SLOTS if by_slots else 1.0,
            )
            following = NextSlice(SLICES_S[slices % 3])
            if slack.takes(serving, following):
                taken_s = following.seconds * draw.uniform(0.8, 1.1)
                slack.trained(taken_s, serving, following)
                now_s, trained_s, slices, sliced = now_s + taken_s, trained_s + taken_s, slices + 1, True
                continue
            chunk = slack.chunk_tokens(serving, iteration_s, 0.00016)
        if not rows:
            now_s = coming[-1].arrived_s
            continue
        for row in [row for row in rows if row.unread]:
            read = row.unread if chunk is None else min(row.unread, chunk)
            row.unread, chunk = row.unread - read, None if chunk is None else chunk - read
            iteration_s += 0.00016 * read
        now_s, sliced = now_s + iteration_s * draw.uniform(0.95, 1.08), False
        for row in [row for row in rows if not row.unread]:
            first_s += [now_s - row.arrived_s] if row.left == row.tokens else []
            row.left -= 1
        rows = [row for row in rows if row.left]
        if slack is not None:
            slack.published(now_s - tokens_s)
        tokens_s = now_s
    return quantiles(first_s, n=100)[98], trained_s / now_s, now_s


@pytest.mark.parametrize(("load", "most", "least"), [(0.1, 1.2, 0.6), (0.3, 1.25, 0.45), (0.6, 1.6, 0.2)])
def test_first_tokens_are_little_later_beside_training_which_has_less_time_as_slots_fill(
    load: float, most: float, least: float
) -> None:
    """Chats that answer at the bound keep their slots from those to come."""
    by_slots, without, shares = list[float](), list[float](), list[float]()
    for seed in range(8):
        chats = arrivals(seed)
        gap_s = served_beside(chats, 1e-9, None)[2] / len(chats) / load
        alone_s, _, _ = served_beside(chats, gap_s, None)
        first_s, share, _ = served_beside(chats, gap_s, Slack(Bounds(between_tokens_s=0.05)))
        filled_s, _, _ = served_beside(chats, gap_s, Slack(Bounds(between_tokens_s=0.05)), by_slots=False)
        by_slots.append(first_s / alone_s)
        without.append(filled_s / alone_s)
        shares.append(share)
    assert median(by_slots) <= most
    assert median(by_slots) - 1.0 <= 0.6 * (median(without) - 1.0)
    assert min(shares) >= least


@given(st.floats(0.001, 0.012), st.floats(0.0, 0.001))
def test_with_no_free_slot_one_slice_runs_between_two_tokens(slice_s: float, iteration_s: float) -> None:
    slack, following = Slack(Bounds(between_tokens_s=0.02)), NextSlice(slice_s)
    for _ in range(20):
        serving = Serving(chat_decodes=True, iteration_s=iteration_s, free_share=0.0)
        assert slack.takes(serving, following)
        slack.trained(slice_s, serving, following)
        assert not slack.takes(serving._replace(sliced=True, since_tokens_s=slice_s), following)
        slack.published(slice_s + iteration_s)


@pytest.mark.parametrize(
    "wrong", [{"batch_share": 1.0}, {"least_share": -0.1}, {"between_tokens_s": 0.0}, {"wait_s": -1.0}]
)
def test_bounds_without_meaning_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Bounds(**wrong)
