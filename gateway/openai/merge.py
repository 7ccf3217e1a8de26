"""Answers the queries of one request at the same time and merges their answers into one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from msgspec.structs import replace

from gateway.domain import Answer, AnswerEvent, Delta, Opening, Query, Usage
from gateway.tasks import cancel

QUEUE_PIECES = 64
"""Queue size per query. When the reader is slow, a full queue makes the answers wait."""

Pieces = AsyncGenerator[AnswerEvent, None]


def answer_all(answer: Answer, queries: Sequence[Query]) -> Pieces:
    """Yield one answer to all queries. The encoder checks that it is complete, and raises."""
    return answer(queries[0]) if len(queries) == 1 else _answer_concurrently(answer, queries)


async def _answer_concurrently(answer: Answer, queries: Sequence[Query]) -> Pieces:
    """Yield the opening only once every query has one, so that a refusal can still set the HTTP status."""
    queue: asyncio.Queue[tuple[int, AnswerEvent | Exception | None]] = asyncio.Queue(
        QUEUE_PIECES * len(queries)
    )
    pumps = [asyncio.create_task(_pump(answer, query, number, queue)) for number, query in enumerate(queries)]
    try:
        async for piece in _merge(queue, len(queries), queries[0].sampling.n):
            yield piece
    finally:
        await cancel(*pumps)


async def _pump(
    answer: Answer,
    query: Query,
    number: int,
    queue: asyncio.Queue[tuple[int, AnswerEvent | Exception | None]],
) -> None:
    """Put the pieces of one answer into the queue, then None, or the exception that ended the answer."""
    try:
        async with aclosing(answer(query)) as pieces:
            async for piece in pieces:
                await queue.put((number, piece))
    except Exception as exc:  # noqa: BLE001 - raised again by the reader of the queue
        await queue.put((number, exc))
    else:
        await queue.put((number, None))


async def _merge(
    queue: asyncio.Queue[tuple[int, AnswerEvent | Exception | None]], running: int, n: int
) -> Pieces:
    """Yield one opening, all deltas, then the summed usage.

    Deltas that arrive before the last opening are held until it arrives: at most the other queries' answers.
    """
    openings: list[Opening] = []
    waiting: list[Delta] = []
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
                yield merge_openings(openings)
                for delta in waiting:
                    yield delta
        else:
            delta = replace(piece, index=number * n + piece.index)
            if unopened:
                waiting.append(delta)
            else:
                yield delta
    yield merge_usages(usages)


def merge_usages(usages: Sequence[Usage]) -> Usage:
    return Usage(
        prompt_tokens=sum(each.prompt_tokens for each in usages),
        completion_tokens=sum(each.completion_tokens for each in usages),
        cached_tokens=sum(each.cached_tokens for each in usages),
        reasoning_tokens=sum(each.reasoning_tokens for each in usages),
        nano_usd=sum(each.nano_usd for each in usages),
    )


def merge_openings(openings: Sequence[Opening]) -> Opening:
    """Merge openings: all sites and models, the most attempts, the longest wait, the sum of prompt tokens."""
    return replace(
        openings[0],
        site=",".join(sorted({opening.site for opening in openings})),
        attempts=max(opening.attempts for opening in openings),
        queue_s=max(opening.queue_s for opening in openings),
        prompt_tokens=sum(opening.prompt_tokens for opening in openings),
        model=",".join(sorted({opening.model for opening in openings})),
    )
