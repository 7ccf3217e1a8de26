"""A chat never waits for the line of a batch, and no token of either changes for it."""

from __future__ import annotations

import pytest
import torch

from site_engine.core.remaining_curve import RemainingCurve, RemainingPoint
from site_engine.core.request import Lane
from tests.support.engine_models import Collected, assert_idle, engine_for, family, gather, greedy

torch.set_num_threads(1)

LINES = [[7 * at + 1, 5, at + 2] for at in range(4)]
CHAT = [3, 1, 4]
WRONG_FORECAST = RemainingCurve((RemainingPoint(0, 5.0, 9),))


@pytest.mark.parametrize(("slots", "kv_tokens"), [(4, 4096), (8, 176)], ids=["no slot free", "no page free"])
def test_a_chat_takes_the_slot_of_a_batch_line_at_once(slots: int, kv_tokens: int) -> None:
    engine = engine_for(family("llama").served, slots=slots, kv_tokens=kv_tokens, page_size=4)
    for at, prompt in enumerate(LINES):
        line = greedy(f"line {at}", prompt, 40)
        line.lane = Lane.BATCH
        engine.submit(line)
    collected: dict[str, Collected] = {}
    for _ in range(6):
        gather(engine.step(), collected)
    engine.submit(greedy("chat", CHAT, 5))
    gather(engine.step(), collected)
    assert collected["chat"].token_ids, "the chat has its first token in the very next iteration"
    while engine.has_work:
        gather(engine.step(), collected)
    expected = [family("llama").generate(prompt, 40) for prompt in LINES]
    assert [collected[f"line {at}"].token_ids for at in range(4)] == expected
    assert collected["chat"].token_ids == family("llama").generate(CHAT, 5)
    assert_idle(engine)


def test_lines_do_not_take_slots_from_each_other_nor_from_a_chat() -> None:
    engine = engine_for(family("llama").served, slots=2)
    engine.submit(greedy("chat", CHAT, 30))
    for at in range(3):
        line = greedy(f"line {at}", LINES[at], 10)
        line.lane = Lane.BATCH
        engine.submit(line)
    collected: dict[str, Collected] = {}
    while engine.has_work:
        gather(engine.step(), collected)
    timings = [one.last.timings for one in collected.values() if one.last and one.last.timings]
    assert [each.preemptions for each in timings] == [0] * 4


@pytest.mark.parametrize(("lane", "starts"), [(Lane.BATCH, "0"), (Lane.CHAT, "1")])
def test_the_shortest_chat_starts_first_and_lines_start_as_they_come(lane: Lane, starts: str) -> None:
    lengths = (120, 90, 110, 150)
    engine = engine_for(family("llama").served, slots=1, kv_tokens=1024)
    for at, tokens in enumerate(lengths):
        request = greedy(str(at), [7, at], tokens, ignore_eos=True)
        request.lane, request.remaining = lane, WRONG_FORECAST
        engine.submit(request)
    collected: dict[str, Collected] = {}
    gather(engine.step(), collected)
    assert [name for name, one in collected.items() if one.token_ids] == [starts]
    prompts = 3 * 2  # the first one's is computed, and the token made of it is to be read
    assert engine.load().token_load == sum(lengths) + prompts
    assert engine.load().unread_tokens == 1
