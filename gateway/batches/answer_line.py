"""One line of a batch, asked as any client's query is: read by the same readers, answered by `answer`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec.structs import replace

from gateway.batches.context import BatchContext
from gateway.batches.reading import Wanted
from gateway.batches.values import WINDOW_S
from gateway.domain import Caller, Lane, Query
from gateway.openai import unary_response
from gateway.openai.chat_request import read_chat
from gateway.openai.completion_request import read_completion
from gateway.openai.error_body import translate
from gateway.openai.fields import Fields, Problems
from gateway.openai.frames import one_line
from gateway.openai.merge import answer_all
from gateway.openai.request import GenerationRequest, build_queries, check_model
from gateway.openai.response_schema import CHAT, TEXT, ResponseHead, ResponseSchema


@dataclass(frozen=True, slots=True)
class Endpoint:
    shape: ResponseSchema
    read: Callable[[Fields], GenerationRequest]


ENDPOINTS: Final = {
    "/v1/chat/completions": Endpoint(CHAT, read_chat),
    "/v1/completions": Endpoint(TEXT, read_completion),
}


def asked_of(endpoint: Endpoint, body: dict[str, object], context: BatchContext) -> GenerationRequest:
    """Raises BadRequest, as the endpoint itself would."""
    problems = Problems()
    asked = endpoint.read(Fields(body, problems))
    problems.raise_any()
    check_model(asked, context.models())
    return asked


def line_queries(
    asked: GenerationRequest,
    caller: Caller,
    context: BatchContext,
    *,
    query_id: str,
    preferred_site: str | None = None,
    within_s: float = WINDOW_S,
) -> list[Query]:
    """Build the queries of a line: in the batch lane, with all the time that the batch has. `preferred_site`:
    the site that joint assignment chose.
    """
    queries = build_queries(
        asked,
        caller,
        query_id=query_id,
        request_id=query_id,
        received_s=context.clock(),
        timeout_s=within_s,
        traceparent="",
    )
    return [replace(query, lane=Lane.BATCH, preferred_site=preferred_site) for query in queries]


async def ask(
    endpoint: Endpoint,
    wanted: Wanted,
    caller: Caller,
    context: BatchContext,
    *,
    query_id: str,
    preferred_site: str | None,
    within_s: float,
) -> bytes:
    """The body of the answer. Raises what the endpoint would translate for a client."""
    asked = asked_of(endpoint, wanted.body, context)
    asking = line_queries(
        asked, caller, context, query_id=query_id, preferred_site=preferred_site, within_s=within_s
    )
    async with aclosing(answer_all(context.answer, asking)) as pieces:
        answer = await unary_response.collect(pieces, asked.choices)
    created_s = int(context.unix_time())
    head = ResponseHead(
        endpoint.shape.id_prefix + query_id, created_s, asked.model, answer.opening.fingerprint
    )
    return answer.body(endpoint.shape, head, asked.sampling.logprobs is not None)


def answered(custom_id: str, query_id: str, body: bytes, status: int = 200) -> bytes:
    """The line of the output file; with another status, of the error file."""
    response = {"status_code": status, "request_id": query_id, "body": msgspec.Raw(body)}
    return _line(custom_id, query_id, response, None)


def refused(custom_id: str, query_id: str, error: Exception) -> bytes:
    """What a client of the endpoint would have got instead of an answer."""
    problem = translate(error, query_id)
    return answered(custom_id, query_id, problem.body(), problem.status)


def never_ran(custom_id: str, query_id: str, code: str, message: str) -> bytes:
    return _line(custom_id, query_id, None, {"code": code, "message": message})


def _line(custom_id: str, query_id: str, response: object, error: object) -> bytes:
    named = {"id": f"batch_req_{query_id.removeprefix('batch_')}", "custom_id": custom_id}
    return one_line(msgspec.json.encode({**named, "response": response, "error": error})) + b"\n"
