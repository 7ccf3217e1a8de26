"""Whether a file is a batch: every line is read and forecast once, and given its turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Final

from gateway.batches import reading
from gateway.batches.answer_line import ENDPOINTS, asked_of, line_queries
from gateway.batches.context import BatchContext
from gateway.batches.order import order
from gateway.batches.reading import BadLine, Raw, Wanted
from gateway.batches.values import Batch, Fault, Line
from gateway.domain import Caller, Query
from gateway.errors import MicoError

FAULTS_TOLD: Final = 50
AT_ONCE: Final = 16
"""Lines that are forecast together: chat that comes meanwhile waits for so many at most."""


class NoBatch(Exception):
    def __init__(self, faults: list[Fault]) -> None:
        super().__init__(faults[0].message)
        self.faults = faults


@dataclass(slots=True)
class Seen:
    """What the lines so far have in common, and what is wrong with them."""

    custom_ids: set[str] = field(default_factory=set)
    model: str = ""
    faults: list[Fault] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)


async def validated(batch: Batch, context: BatchContext) -> tuple[str, list[Line]]:
    """The batch's model, and its lines in the order of running. Raises NoBatch."""
    seen, waiting = Seen(), list[tuple[Raw, Wanted]]()
    try:
        async for raw in _raw_lines(batch, context):
            if (wanted := _read(raw, batch, context, seen)) is not None:
                waiting.append((raw, wanted))
            if len(waiting) == AT_ONCE:
                await _forecast(waiting, batch, context, seen)
            if len(seen.faults) >= FAULTS_TOLD:
                break
    except BadLine as bad:
        seen.faults.append(bad.fault)
    await _forecast(waiting, batch, context, seen)
    if not seen.lines and not seen.faults:
        seen.faults.append(Fault("empty_file", "The input file has no lines."))
    if seen.faults:
        raise NoBatch(seen.faults)
    turns = order(seen.lines)
    return seen.model, [replace(seen.lines[index], place=place) for place, index in enumerate(turns)]


async def _raw_lines(batch: Batch, context: BatchContext) -> AsyncIterator[Raw]:
    file = await context.files.get(batch.tenant, batch.input_file_id)
    if file is None:
        raise NoBatch([Fault("invalid_file", f"The input file {batch.input_file_id} does not exist.")])
    count = 0
    async for raw in reading.lines(context.files.parts(file), context.limits.line_bytes):
        count += 1
        if count > context.limits.lines:
            raise NoBatch([Fault("too_many_lines", f"A batch has at most {context.limits.lines} lines.")])
        yield raw


def _read(raw: Raw, batch: Batch, context: BatchContext, seen: Seen) -> Wanted | None:
    """Notes what is wrong with the line by itself and beside those before it."""
    try:
        wanted = reading.read_line(raw, batch.endpoint, context.limits)
    except BadLine as bad:
        seen.faults.append(bad.fault)
        return None
    model = str(wanted.body["model"])
    seen.model = seen.model or model
    if wanted.custom_id in seen.custom_ids:
        message = f"The custom_id {wanted.custom_id[:100]!r} was used by an earlier line."
        seen.faults.append(Fault("duplicate_custom_id", message, raw.number, "custom_id"))
        return None
    seen.custom_ids.add(wanted.custom_id)
    if model != seen.model:
        message = (
            f"All lines ask for one model: the first for {seen.model[:100]!r}, this for {model[:100]!r}."
        )
        seen.faults.append(Fault("mismatched_model", message, raw.number, "body.model"))
        return None
    return wanted


async def _forecast(
    waiting: list[tuple[Raw, Wanted]], batch: Batch, context: BatchContext, seen: Seen
) -> None:
    seen.lines += await asyncio.gather(*(_line(raw, wanted, batch, context) for raw, wanted in waiting))
    waiting.clear()


async def _line(raw: Raw, wanted: Wanted, batch: Batch, context: BatchContext) -> Line:
    """A body that will be refused costs nothing and is expected to."""
    asker = Caller(batch.key_id, batch.tenant)
    try:
        asked = asked_of(ENDPOINTS[batch.endpoint], wanted.body, context)
        asking = line_queries(asked, asker, context, query_id=batch.id)
        lengths = [await _expected(query, context) for query in asking]
    except MicoError:
        asking, lengths = [], []
    return Line(
        number=raw.number,
        place=0,
        custom_id=wanted.custom_id,
        begins=raw.begins,
        size=len(raw.data),
        prompt_tokens=sum(query.prompt_tokens_guess for query in asking),
        response_tokens=sum(lengths),
    )


async def _expected(query: Query, context: BatchContext) -> float:
    forecast, most = await context.forecast(query), query.sampling.max_tokens
    capped = forecast if most is None else forecast.capped(most)
    return capped.expected() * query.sampling.n
