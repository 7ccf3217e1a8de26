"""Validates the input file of a batch: reads and forecasts every line once, and puts the lines in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from msgspec import structs

from gateway.batches.answer_line import ENDPOINTS, line_queries, read_request
from gateway.batches.capacity import lines_at_once
from gateway.batches.context import BatchContext
from gateway.batches.line_table import LineTable, OrderedLines
from gateway.batches.reading import InvalidLine, LineRequest, RawLine, read_line, split_lines
from gateway.batches.values import Batch, BatchError, Line
from gateway.domain import Caller, Query
from gateway.errors import MicoError
from gateway.openai.request import check_model
from gateway.prompt import Pooling
from gateway.routing.prefixes import Prefix, prefix_of

MAX_ERRORS: Final = 50
FORECAST_LINES: Final = 16
"""Lines that wait for their forecasts together; interactive queries have a lane of their own there."""


class InvalidInputFile(Exception):
    """The input file is not a valid batch. `errors` has at least one error."""

    def __init__(self, errors: list[BatchError]) -> None:
        super().__init__(errors[0].message)
        self.errors = errors


@dataclass(slots=True)
class ValidationState:
    """The results of the lines read so far."""

    custom_ids: set[str] = field(default_factory=set)
    model: str = ""
    errors: list[BatchError] = field(default_factory=list)
    lines: LineTable = field(default_factory=LineTable)


async def validate(batch: Batch, context: BatchContext) -> tuple[str, OrderedLines]:
    """Return the model of the batch, and its lines in the order of running. Raises InvalidInputFile."""
    state, waiting = ValidationState(), list[tuple[RawLine, LineRequest]]()
    try:
        async for raw in _raw_lines(batch, context):
            read = partial(_read, raw, batch, context, state)
            request = await context.side_work.run_if_large(batch.tenant, len(raw.data), read)
            if request is not None:
                waiting.append((raw, request))
            if len(waiting) == FORECAST_LINES:
                await _forecast(waiting, batch, context, state)
            if len(state.errors) >= MAX_ERRORS:
                break
    except InvalidLine as invalid:
        state.errors.append(invalid.error)
    await _forecast(waiting, batch, context, state)
    if not state.lines and not state.errors:
        state.errors.append(BatchError("empty_file", "The input file has no lines."))
    if state.errors:
        raise InvalidInputFile(state.errors)
    at_once = lines_at_once(context.sites(), context.model_of(replace(batch, model=state.model)))
    return state.model, await asyncio.to_thread(state.lines.in_order, batch.order, at_once)


async def _raw_lines(batch: Batch, context: BatchContext) -> AsyncIterator[RawLine]:
    file = await context.files.get(batch.tenant, batch.input_file_id)
    if file is None:
        message = f"The input file {batch.input_file_id} does not exist."
        raise InvalidInputFile([BatchError("invalid_file", message)])
    count = 0
    async for raw in split_lines(context.files.parts(file), context.limits.line_bytes):
        count += 1
        if count > context.limits.lines:
            message = f"A batch has at most {context.limits.lines} lines."
            raise InvalidInputFile([BatchError("too_many_lines", message)])
        yield raw


def _read(raw: RawLine, batch: Batch, context: BatchContext, state: ValidationState) -> LineRequest | None:
    """Read a line. Record an error and return None if it is invalid by itself or beside earlier lines."""
    try:
        request = read_line(raw, batch.endpoint, context.limits)
    except InvalidLine as invalid:
        state.errors.append(invalid.error)
        return None
    model = str(request.body["model"])
    state.model = state.model or model
    if request.custom_id in state.custom_ids:
        message = f"The custom_id {request.custom_id[:100]!r} was used by an earlier line."
        state.errors.append(BatchError("duplicate_custom_id", message, raw.number, "custom_id"))
        return None
    state.custom_ids.add(request.custom_id)
    if model != state.model:
        message = (
            f"All lines ask for one model: the first for {state.model[:100]!r}, this for {model[:100]!r}."
        )
        state.errors.append(BatchError("mismatched_model", message, raw.number, "body.model"))
        return None
    return request


async def _forecast(
    waiting: list[tuple[RawLine, LineRequest]], batch: Batch, context: BatchContext, state: ValidationState
) -> None:
    for line, prefix in await asyncio.gather(
        *(_line(raw, request, batch, context) for raw, request in waiting)
    ):
        state.lines.add(line, prefix)
    waiting.clear()


async def _line(
    raw: RawLine, request: LineRequest, batch: Batch, context: BatchContext
) -> tuple[Line, Prefix]:
    """Build a line with its expected length, which is 0 for a body that will be refused: it costs nothing."""
    caller = Caller(batch.key_id, batch.tenant)
    try:
        generation = read_request(ENDPOINTS[batch.endpoint], request.body)
        if context.knows_sites():
            check_model(generation, context.models(), batch.tenant)
        queries = line_queries(generation, caller, context, query_id=batch.id)
        model = context.model_of(replace(batch, model=generation.model))
        lengths = [await _expected_tokens(structs.replace(query, model=model), context) for query in queries]
    except (MicoError, RecursionError):  # some bodies nest more deeply than they can be encoded
        queries, lengths = [], []
    prefix = prefix_of(queries[0].prompt, batch.tenant, queries[0].model) if queries else Prefix((), 0)
    line = Line(
        number=raw.number,
        place=0,
        custom_id=request.custom_id,
        begins=raw.begins,
        size=len(raw.data),
        prompt_tokens=sum(query.prompt_tokens_guess for query in queries),
        response_tokens=sum(lengths),
    )
    return line, prefix


async def _expected_tokens(query: Query, context: BatchContext) -> float:
    if isinstance(query.prompt, Pooling):
        return 0.0
    forecast, max_tokens = await context.forecast(query), query.sampling.max_tokens
    capped = forecast if max_tokens is None else forecast.capped(max_tokens)
    return capped.expected() * query.sampling.n
