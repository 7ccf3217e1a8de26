"""Laws of the gateway's event loop: how much is done before it turns to others, whatever comes in at once."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial

from gateway.domain import Delta
from gateway.federation.codec import MAX_TURN_DELTAS
from gateway.federation.stream_pace import READERS_PER_TURN, TURNS_TO_READ, StreamPace
from gateway.query.answer import answer
from tests.support.fakes.federation import scene
from wire import federation_pb2 as pb

TOKENS = 8 * MAX_TURN_DELTAS


def test_others_get_a_turn_between_the_parts_of_a_large_step() -> None:
    """What is handled in one turn reaches the reader as one delta."""

    async def main() -> None:
        async with scene() as here:
            here.gateway.federation._pace = StreamPace()  # readers wait for no more text
            site = await here.site("alpha", context_tokens=2 * TOKENS)
            async with aclosing(answer(here.gateway, here.query(max_tokens=TOKENS))) as events:
                opening = asyncio.ensure_future(anext(events))
                attempt_id = (await site.assigned()).attempt_id
                deltas = [
                    pb.Delta(attempt_id=attempt_id, text="x", token_ids=[120], completion_tokens=count)
                    for count in range(1, TOKENS + 1)
                ]
                deltas[-1].finish = pb.Delta.STOP
                step = pb.SiteMessage(step=pb.Step(deltas=deltas))
                report = pb.SiteMessage(load=pb.Load(seq=10, kv_free_tokens=100_000))
                await site.send(bunch=pb.SiteBunch(messages=[step, report]))
                await opening
                texts = [event.text async for event in events if isinstance(event, Delta)]
            assert "".join(texts) == TOKENS * "x"
            assert max(map(len, texts)) <= MAX_TURN_DELTAS
            assert here.gateway.federation.links["alpha"].live == 0

    asyncio.run(main())


def test_a_message_is_read_between_readers_that_waited_together() -> None:
    async def main() -> None:
        now_s, busy_s = 0.0, 0.0
        pace = StreamPace(0.02, lambda: now_s, lambda: busy_s)
        pace.begin()
        pace.wake(lambda: None)
        now_s = busy_s = 0.01  # the loop computed for all of the time: what comes now waits
        pace.begin()
        pace.begin()
        woken: list[int] = []
        readers = range(5 * READERS_PER_TURN - 1)
        for reader in readers:
            pace.wake(partial(woken.append, reader))
        assert not woken
        in_turn = []
        while len(woken) < len(readers):
            before = len(woken)
            await asyncio.sleep(0)
            in_turn.append(len(woken) - before)
        assert woken == list(readers)
        first = next(turn for turn, count in enumerate(in_turn) if count)
        some = [READERS_PER_TURN, *[0] * (TURNS_TO_READ - 1)]
        assert in_turn[first:] == [*some * 4, READERS_PER_TURN - 1]

    asyncio.run(main())
