"""Keep what prompts of a line were answered while the line runs again for the others: it was paid for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

from gateway.domain import Answer, AnswerEvent, Query
from gateway.errors import AboveQuota, ClientMistake, TooMany
from gateway.openai.merge import Pieces, answer_all

KeptAnswers = dict[int, list[AnswerEvent]]
"""Whole answers, by the position of the prompt in the line."""


async def answer_rest(answer: Answer, queries: Sequence[Query], kept: KeptAnswers) -> Pieces:
    """Answer those of a line's queries that `kept` lacks, keep the answers, and yield all as one.

    Where one fails, the others end first, to be kept; they are given up where the line can't be answered at
    all. Raises the error that decides it, else the first.
    """
    asked = [
        asyncio.create_task(_keep(answer, query, position, kept))
        for position, query in enumerate(queries)
        if position not in kept
    ]
    try:
        errors = await _errors_of(asked)
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    if errors:
        raise next(filter(_is_final, errors), errors[0])
    positions = {query.id: position for position, query in enumerate(queries)}

    async def repeat(query: Query) -> Pieces:
        for event in kept[positions[query.id]]:
            yield event

    async with aclosing(answer_all(repeat, queries)) as pieces:
        async for piece in pieces:
            yield piece


async def _keep(answer: Answer, query: Query, position: int, kept: KeptAnswers) -> None:
    async with aclosing(answer(query)) as events:
        kept[position] = [event async for event in events]


async def _errors_of(asked: Sequence[asyncio.Task[None]]) -> list[BaseException]:
    """Wait for all, or until one fails for good; return the errors so far."""
    errors: list[BaseException] = []
    running = set(asked)
    while running and not any(map(_is_final, errors)):
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        errors += [error for task in done if (error := task.exception()) is not None]
    return errors


def _is_final(error: BaseException) -> bool:
    """Return whether no other run of the line would fare better."""
    return isinstance(error, AboveQuota) or (
        isinstance(error, ClientMistake) and not isinstance(error, TooMany)
    )
