"""Answers the prompts of one line, each of them once however often the line runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from msgspec.structs import replace

from gateway.domain import Answer, AnswerEvent, Query
from gateway.errors import AboveQuota, ClientMistake, TooMany
from gateway.openai.merge import Pieces, answer_all
from gateway.tasks import cancel

Kept = dict[int, list[AnswerEvent]]
"""The answers of a line's prompts, by their place among them."""


async def answer_prompts(answer: Answer, queries: Sequence[Query], kept: Kept) -> Pieces:
    """Yield one answer to all queries, as `answer_all` does. What is in `kept` is not asked again, and what
    is answered although another query fails is put there.
    """
    if len(queries) > 1:
        await _keep_answers(answer, queries, kept)
        answer = _replay({query.id: kept[place] for place, query in enumerate(queries)})
        kept.clear()  # if they make no whole answer, all are asked again
    async with aclosing(answer_all(answer, queries)) as pieces:
        async for piece in pieces:
            yield piece


async def _keep_answers(answer: Answer, queries: Sequence[Query], kept: Kept) -> None:
    """Answer all queries to their ends, or until one is refused for good. Raises the first error.

    Those that are asked are numbered from 0, as those of a line that runs for the first time.
    """
    asked = [place for place in range(len(queries)) if place not in kept]
    numbered = {place: replace(queries[place], id=queries[at].id) for at, place in enumerate(asked)}
    pending = {asyncio.create_task(_keep(answer, query, place, kept)) for place, query in numbered.items()}
    errors = list[BaseException]()
    try:
        while pending and not any(map(_is_final, errors)):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
            errors += [error for task in done if (error := task.exception()) is not None]
    finally:
        await cancel(*pending)
    if errors:
        raise next(filter(_is_final, errors), errors[0])


async def _keep(answer: Answer, query: Query, place: int, kept: Kept) -> None:
    async with aclosing(answer(query)) as pieces:
        kept[place] = [piece async for piece in pieces]


def _is_final(error: BaseException) -> bool:
    """Return whether the line has failed: it does not run again."""
    return isinstance(error, AboveQuota) or (
        isinstance(error, ClientMistake) and not isinstance(error, TooMany)
    )


def _replay(answers: Mapping[str, list[AnswerEvent]]) -> Answer:
    async def replayed(query: Query) -> AsyncGenerator[AnswerEvent, None]:
        for piece in answers[query.id]:
            yield piece

    return replayed
