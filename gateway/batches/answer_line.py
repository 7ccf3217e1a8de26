"""Answers one line of a batch as the endpoint answers a client, and renders the lines of the result files."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from typing import Final

import msgspec
from msgspec.structs import replace

from gateway.anthropic.messages_format import MESSAGES
from gateway.batches.context import BatchContext
from gateway.batches.order import prefill_heavy
from gateway.batches.pace import FIRST_PRIORITY
from gateway.batches.prompts import Kept, answer_prompts
from gateway.batches.values import WINDOW_S, Batch, Line, Order
from gateway.domain import Caller, Lane, Query
from gateway.openai import unary_response
from gateway.openai.error_body import translate
from gateway.openai.fields import Fields, Problems
from gateway.openai.frames import one_line
from gateway.openai.generation_format import CHAT_COMPLETIONS, COMPLETIONS, UnaryFormat
from gateway.openai.pooling_format import EMBEDDINGS
from gateway.openai.request import GenerationRequest, build_queries, check_model
from gateway.openai.response_schema import ResponseHead
from gateway.openai.responses_format import RESPONSES
from gateway.prompt import Pooling

ENDPOINTS: Final[Mapping[str, UnaryFormat]] = {
    "/v1/chat/completions": CHAT_COMPLETIONS,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/embeddings": EMBEDDINGS,
}
"""The endpoints that the lines of a batch may address."""
MAX_LINE_INPUTS: Final = 128
"""Inputs that one line may have embedded: its result is one line of a file, and a row of the database."""


def read_request(endpoint: UnaryFormat, body: dict[str, object]) -> GenerationRequest:
    """Read the body of a line. Raises BadRequest, as the endpoint itself would."""
    problems = Problems()
    request = endpoint.read(Fields(body, problems))
    (prompt, *_) = request.prompts or ("",)
    if isinstance(prompt, Pooling) and prompt.inputs > MAX_LINE_INPUTS:
        problems.add("input", f"holds at most {MAX_LINE_INPUTS} items in a batch, got {prompt.inputs}")
    problems.raise_any()
    return request


def line_queries(
    request: GenerationRequest,
    caller: Caller,
    context: BatchContext,
    *,
    query_id: str,
    preferred_site: str | None = None,
    within_s: float = WINDOW_S,
) -> list[Query]:
    """Build the queries of a line, in the batch lane. `preferred_site`: the choice of joint assignment."""
    queries = build_queries(
        request,
        caller,
        query_id=query_id,
        request_id=query_id,
        received_s=context.clock(),
        timeout_s=within_s,
        traceparent="",
    )
    return [replace(query, lane=Lane.BATCH, preferred_site=preferred_site) for query in queries]


async def answer_line(
    batch: Batch,
    line: Line,
    body: dict[str, object],
    caller: Caller,
    context: BatchContext,
    *,
    query_id: str,
    preferred_site: str | None,
    goes_first: bool,
    kept: Kept,
) -> bytes:
    """Return the body of the answer. Raises the errors that the endpoint would translate for a client.

    `kept`: the prompts that earlier runs of the line have answered.
    """
    endpoint, any_order = ENDPOINTS[batch.endpoint], batch.order is Order.BLEND
    request = read_request(endpoint, body)
    check_model(request, context.models(), caller.tenant, fleet_complete=context.knows_sites())
    within_s = max(1.0, batch.expires_at - context.unix_time())
    queries = [
        replace(
            query,
            any_order=any_order,
            prefill_heavy=any_order and prefill_heavy(line.prompt_tokens, line.response_tokens),
            priority=FIRST_PRIORITY if goes_first else query.priority,
        )
        for query in line_queries(
            request, caller, context, query_id=query_id, preferred_site=preferred_site, within_s=within_s
        )
    ]
    async with aclosing(answer_prompts(context.answer, queries, kept)) as pieces:
        answer = await unary_response.collect(pieces, request.choices, endpoint.logprobs)
    created_s = int(context.unix_time())
    head = ResponseHead(endpoint.id_prefix + query_id, created_s, request.model, answer.opening.fingerprint)
    rendered = endpoint.body(request, head, answer)
    return rendered if isinstance(rendered, bytes) else await join_parts(rendered)


async def join_parts(parts: Iterator[bytes]) -> bytes:
    """Join the parts of a large body. Each takes time to make: others get their turn between two of them."""
    made = []
    for part in parts:
        made.append(part)
        await asyncio.sleep(0)
    return b"".join(made)


def response_line(custom_id: str, query_id: str, body: bytes, status: int = 200) -> bytes:
    """Render a line of the output file or, with an error status, of the error file."""
    response = {"status_code": status, "request_id": query_id, "body": msgspec.Raw(body)}
    return _render(custom_id, query_id, response, None)


def error_line(endpoint: UnaryFormat, custom_id: str, query_id: str, error: Exception) -> bytes:
    """Render the error that a client of the endpoint would have got."""
    status, body = endpoint.error_response(translate(error, query_id), query_id)
    return response_line(custom_id, query_id, body, status)


def unanswered_line(custom_id: str, query_id: str, code: str, message: str) -> bytes:
    """Render the line of a query that did not run before the batch ended."""
    return _render(custom_id, query_id, None, {"code": code, "message": message})


def _render(custom_id: str, query_id: str, response: object, error: object) -> bytes:
    ids = {"id": f"batch_req_{query_id.removeprefix('batch_')}", "custom_id": custom_id}
    return one_line(msgspec.json.encode({**ids, "response": response, "error": error})) + b"\n"
