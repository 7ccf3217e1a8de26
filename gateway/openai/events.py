"""Between the answers to queries and their encoding: several prompts are merged into one answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from msgspec.structs import replace

from gateway.domain import Answer, Delta, Opening, Piece, Query, Usage
from gateway.errors import UpstreamLost

QUEUE_PIECES = 64
"""Per prompt; a slow reader then holds back the answers themselves."""

Pieces = AsyncGenerator[Piece, None]


def together(answer: Answer, queries: Sequence[Query]) -> Pieces:
    """The answer to all queries as one. Whoever encodes it sees whether it stops short, and raises that."""
    return answer(queries[0]) if len(queries) == 1 else merged(answer, queries)


def stopped_short() -> UpstreamLost:
    """An end without a finish reason would look like success to OpenAI's SDK, so none gets through."""
    return UpstreamLost("The site stopped before the answer was finished. What was sent is incomplete.")


async def merged(answer: Answer, queries: Sequence[Query]) -> Pieces:
    """Runs the queries together. Opens when all have opened, so that a refusal still decides the status."""
    queue: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue(QUEUE_PIECES * len(queries))
    pumps = [asyncio.create_task(_pump(answer, query, number, queue)) for number, query in enumerate(queries)]
    try:
        async for piece in _in_order(queue, len(queries), queries[0].sampling.n):
            yield piece
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    answer: Answer, query: Query, number: int, queue: asyncio.Queue[tuple[int, Piece | Exception | None]]
) -> None:
    """Every query ends in the queue with None or with what went wrong."""
    try:
        async with aclosing(answer(query)) as pieces:
            async for piece in pieces:
                await queue.put((number, piece))
    except Exception as exc:  # noqa: BLE001 - raised again by the reader of the queue
        await queue.put((number, exc))
    else:
        await queue.put((number, None))


async def _in_order(
    queue: asyncio.Queue[tuple[int, Piece | Exception | None]], running: int, n: int
) -> Pieces:
    """Deltas that arrive before the last opening wait for it, a whole answer at most; usage is last."""
    openings: list[Opening] = []
    early: list[Delta] = []
    usages: list[Usage] = []
    unopened = running
    while running:
        number, piece = await queue.get()
        if isinstance(piece, Exception):
            raise piece
        if piece is None:
            running -= 1
        elif isinstance(piece, Usage):
            usages.append(piece)
        elif isinstance(piece, Opening):
            openings.append(piece)
            unopened -= 1
            if not unopened:
                yield joined(openings)
                for delta in early:
                    yield delta
        else:
            delta = replace(piece, index=number * n + piece.index)
            if unopened:
                early.append(delta)
            else:
                yield delta
    yield Usage(sum(u.prompt_tokens for u in usages), sum(u.completion_tokens for u in usages))


def joined(openings: Sequence[Opening]) -> Opening:
    """One opening for several: every site that takes part, the longest wait, all prompt tokens."""
    return replace(
        openings[0],
        site=",".join(sorted({opening.site for opening in openings})),
        attempts=max(opening.attempts for opening in openings),
        queue_s=max(opening.queue_s for opening in openings),
        prompt_tokens=sum(opening.prompt_tokens for opening in openings),
    )
