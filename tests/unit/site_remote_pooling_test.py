"""A server's whole answer to a request for embeddings or ranks."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest

from site_engine import messages as m
from site_engine.core.request import Finish, Pooled
from site_engine.remote import pooling
from site_engine.remote.pooling import PoolingResponse
from site_engine.remote.stream import MalformedStream
from tests.support.server_abilities import to_base64


def read(task: str, inputs: int, answer: Any, pieces: int = 1) -> tuple[Pooled, ...]:
    response = PoolingResponse("r", m.PoolingPrompt(task, {}, inputs, 1))
    raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    size = -(-len(raw) // pieces)
    for start in range(0, len(raw), size):
        assert response.feed(raw[start : start + size]) == []
    (output,) = response.end()
    assert output.finish is Finish.STOP
    return output.pooled


def vector(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def embeddings(*found: Any) -> dict[str, Any]:
    return {"data": [{"index": index, "embedding": each} for index, each in enumerate(found)]}


@pytest.mark.parametrize("pieces", [1, 2, 7])
@pytest.mark.parametrize("found", [[0.5, -2.0], to_base64([0.5, -2.0])])
def test_vectors_come_as_numbers_or_in_base64(found: Any, pieces: int) -> None:
    assert read("embed", 1, embeddings(found), pieces) == (Pooled(0, vector(0.5, -2.0)),)


def test_ranks_come_in_two_shapes() -> None:
    ranks = [{"index": 1, "relevance_score": 0.25}, {"index": 0, "relevance_score": -1}]
    assert read("rerank", 2, {"results": ranks}) == (Pooled(1, score=0.25), Pooled(0, score=-1.0))
    assert read("rerank", 1, [{"index": 0, "score": 0.75, "text": "x"}]) == (Pooled(0, score=0.75),)


@pytest.mark.parametrize(
    "usage",
    [{"prompt_tokens": 9, "total_tokens": 9}, {"total_tokens": 9}, {"prompt_tokens": -1, "total_tokens": 9}],
)
def test_ranks_count_what_the_server_counted(usage: dict[str, int]) -> None:
    """vLLM counts the tokens of ranks in all alone; without a count the gateway charges its guess."""
    response = PoolingResponse("r", m.PoolingPrompt("rerank", {}, 1, 1))
    answer = {"results": [{"index": 0, "relevance_score": 0.5}], "usage": usage}
    response.feed(json.dumps(answer).encode())
    (output,) = response.end()
    assert output.prompt_tokens == response.prompt_tokens == 9


@pytest.mark.parametrize(
    ("task", "inputs", "answer"),
    [
        ("embed", 1, b"<html>"),
        ("embed", 1, b'{"data": ['),
        ("embed", 1, {"data": []}),
        ("embed", 1, embeddings([1.0], [2.0])),
        ("embed", 2, embeddings([1.0])),
        ("embed", 2, {"data": [{"index": 0, "embedding": [1.0]}] * 2}),
        ("embed", 2, embeddings([1.0], [1.0, 2.0])),
        ("embed", 1, embeddings([])),
        ("embed", 1, embeddings("AAA=")),
        ("embed", 1, embeddings("***")),
        ("embed", 1, embeddings(base64.b64encode(vector(float("nan"))).decode())),
        ("embed", 1, embeddings(base64.b64encode(vector(float("inf"))).decode())),
        ("embed", 1, embeddings([1.0] * (pooling.MAX_DIMENSIONS + 1))),
        ("rerank", 1, {"results": [{"index": 0}]}),
        ("rerank", 1, {"results": [{"index": 5, "score": 1}]}),
        ("rerank", 1, {"data": []}),
        ("rerank", 1, b'{"meta": ' + b"[" * 10_000),
    ],
)
def test_an_answer_that_is_not_whole_is_none(task: str, inputs: int, answer: Any) -> None:
    with pytest.raises(MalformedStream):
        read(task, inputs, answer)


def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "MAX_ANSWER_BYTES", 10)
    with pytest.raises(MalformedStream, match="send fewer inputs"):
        read("embed", 1, embeddings([1.0]))
