"""Parse a server's whole answer to a request for embeddings or ranks. Does no I/O."""

from __future__ import annotations

import binascii
from collections.abc import Sequence

import msgspec
import numpy as np

from site_engine.core.request import Finish, Output, Pooled
from site_engine.messages import PoolingPrompt
from site_engine.remote.abilities import EMBED
from site_engine.remote.stream import DECODE_ERRORS, MalformedStream, Usage, possible_count

MAX_ANSWER_BYTES = 128 << 20
MAX_DIMENSIONS = 8_192


class _Embedding(msgspec.Struct):
    """An embedding in base64, or as numbers by a server that does not know base64."""

    index: int
    embedding: str | list[float]


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]
    usage: Usage | None = None


class _Rank(msgspec.Struct):
    """`relevance_score` of most servers, `score` of text-embeddings-inference and SGLang."""

    index: int
    relevance_score: float | None = None
    score: float | None = None


class _Ranks(msgspec.Struct):
    results: list[_Rank]
    usage: Usage | None = None


_embeddings = msgspec.json.Decoder(_Embeddings)
_ranks = msgspec.json.Decoder(_Ranks | list[_Rank])


class PoolingResponse:
    """Collects an answer that counts only as a whole, in place of a `ResponseStream`."""

    delivered = 0
    cached_tokens = 0
    tokens = 0
    done = False
    started = False
    is_ended = False

    def __init__(self, request_id: str, prompt: PoolingPrompt) -> None:
        self.prompt_tokens = 0
        self._request_id = request_id
        self._prompt = prompt
        self._received: list[bytes] = []
        self._size = 0

    def tokens_of(self, _: int) -> int:
        return 0

    def feed(self, received: bytes) -> list[Output]:
        """Keep one read from the network. Raises MalformedStream."""
        self._size += len(received)
        if self._size > MAX_ANSWER_BYTES:
            raise MalformedStream(f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB; send fewer inputs")
        self._received.append(received)
        return []

    def end(self) -> list[Output]:
        """Return all results. Raises MalformedStream unless each input has one."""
        raw, self._received = b"".join(self._received), []
        try:
            found = _embeddings.decode(raw) if self._prompt.task == EMBED else _ranks.decode(raw)
        except DECODE_ERRORS as exc:
            raise MalformedStream(f"no answer of the kind that was asked for: {exc}") from exc
        usage = None if isinstance(found, list) else found.usage
        if isinstance(found, _Embeddings):
            pooled = [Pooled(each.index, vector=to_vector(each.embedding)) for each in found.data]
            if len({len(each.vector) for each in pooled}) > 1:
                raise MalformedStream("embeddings of different lengths")
        else:
            pooled = to_scores(found if isinstance(found, list) else found.results)
        if sorted(each.index for each in pooled) != list(range(self._prompt.inputs)):
            raise MalformedStream(f"{len(pooled)} results for {self._prompt.inputs} inputs")
        if usage is not None:  # nothing is generated, so that the sum is that of the prompts
            counts = possible_count(usage.prompt_tokens), possible_count(usage.total_tokens)
            self.prompt_tokens = next(filter(None, counts), 0)
        return [
            Output(
                self._request_id,
                finish=Finish.STOP,
                prompt_tokens=self.prompt_tokens,
                pooled=tuple(pooled),
            )
        ]


def to_vector(embedding: str | list[float]) -> bytes:
    """Return an embedding in float32, little endian. Raises MalformedStream."""
    try:
        raw = binascii.a2b_base64(embedding) if isinstance(embedding, str) else None
        values = np.asarray(embedding, "<f4") if raw is None else np.frombuffer(raw, "<f4")
    except ValueError as exc:
        raise MalformedStream(f"an embedding that is none: {exc}") from exc
    if not 0 < len(values) <= MAX_DIMENSIONS or not np.isfinite(values).all():
        raise MalformedStream(f"an embedding of {len(values)} dimensions, or one that is not finite")
    return values.tobytes()


def to_scores(ranks: Sequence[_Rank]) -> list[Pooled]:
    """Raises MalformedStream for a rank without a score."""
    scores = [each.score if each.relevance_score is None else each.relevance_score for each in ranks]
    if None in scores:
        raise MalformedStream("a rank without a score")
    return [Pooled(each.index, score=score or 0.0) for each, score in zip(ranks, scores, strict=True)]
