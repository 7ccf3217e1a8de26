"""The formats of POST /v1/embeddings, which is OpenAI's, and POST /v1/rerank, like Jina's and Cohere's."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from gateway.openai.error_body import ErrorResponse, incomplete_answer
from gateway.openai.fields import Fields
from gateway.openai.logprobs import LogprobLists
from gateway.openai.pooling_request import read_embeddings, read_rerank
from gateway.openai.request import GenerationRequest
from gateway.openai.response_schema import ResponseHead
from gateway.openai.unary_response import UnaryResponse
from gateway.prompt import Pooled, Pooling

PART_BYTES = 64 * 1024
_json = msgspec.json.Encoder().encode

Render = Callable[[GenerationRequest, ResponseHead, UnaryResponse, Sequence[Pooled]], Iterator[bytes]]


@dataclass(frozen=True, slots=True)
class PoolingFormat:
    """A format whose bodies are rendered part by part as they are sent: they may hold a hundred megabytes."""

    id_prefix: str
    read: Callable[[Fields], GenerationRequest]
    render: Render

    def logprobs(self) -> LogprobLists:
        return LogprobLists()

    def body(self, request: GenerationRequest, head: ResponseHead, answer: UnaryResponse) -> Iterator[bytes]:
        """Return the body's parts. Raises UpstreamLost if a result is missing."""
        (prompt,) = request.prompts
        found = answer.choices[0].pooled
        assert isinstance(prompt, Pooling), "the reader of this format makes no other"
        if len(found) != prompt.inputs:
            raise incomplete_answer()
        return self.render(request, head, answer, [found[index] for index in range(prompt.inputs)])

    def error_response(self, error: ErrorResponse, request_id: str) -> tuple[int, bytes]:
        return error.status, error.body()


def _usage(answer: UnaryResponse) -> dict[str, int]:
    return {"prompt_tokens": answer.usage.prompt_tokens, "total_tokens": answer.usage.total_tokens}


def _embeddings(
    request: GenerationRequest, head: ResponseHead, answer: UnaryResponse, pooled: Sequence[Pooled]
) -> Iterator[bytes]:
    part = bytearray(b'{"object":"list","data":[')
    for number, each in enumerate(pooled):
        if request.repeated["base64"]:
            values = b'"%s"' % b64encode(each.vector)
        else:
            values = _json(np.frombuffer(each.vector, "<f4").tolist())
        comma = b"," if number else b""
        part += b'%s{"object":"embedding","index":%d,"embedding":%s}' % (comma, number, values)
        if len(part) >= PART_BYTES:
            yield bytes(part)
            part.clear()
    tail = _json({"model": head.model, "usage": _usage(answer)})
    yield bytes(part) + b"]," + tail[1:]


def _ranks(
    request: GenerationRequest, head: ResponseHead, answer: UnaryResponse, pooled: Sequence[Pooled]
) -> Iterator[bytes]:
    top_n, documents = request.repeated["top_n"], request.repeated["documents"]
    best = sorted(pooled, key=lambda each: (-each.score, each.index))
    results = [
        {"index": each.index, "relevance_score": each.score}
        | ({"document": {"text": documents[each.index]}} if isinstance(documents, list) else {})
        for each in (best[:top_n] if isinstance(top_n, int) else best)
    ]
    yield _json({"id": head.id, "model": head.model, "usage": _usage(answer), "results": results})


EMBEDDINGS: Final = PoolingFormat("embd-", read_embeddings, _embeddings)
RERANK: Final = PoolingFormat("rerank-", read_rerank, _ranks)
