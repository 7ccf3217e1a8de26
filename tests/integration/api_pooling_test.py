"""The API's promises about POST /v1/embeddings and POST /v1/rerank."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import pytest
from openai.types import CreateEmbeddingResponse

from gateway.domain import AnswerEvent, Delta, Finish, Model, Query, Usage
from gateway.errors import NoSite
from gateway.openai.pooling_request import MAX_DIMENSIONS, MAX_INPUTS
from gateway.prompt import Pooled, Pooling
from tests.support.fakes.edge import MODEL, OPENING, Edge, Script, error_of, fail, post, run
from tests.support.server_abilities import embed, relevance, to_base64

DIMENSIONS = 6
POOLING = (Model(MODEL, "rev-1", 1024, 0, "mico", frozenset({"embed", "rerank"})),)
DOCUMENTS = ["a red fox", "the blue sea", "a red sea"]


def pooled(query: Query) -> list[Pooled]:
    assert isinstance(query.prompt, Pooling)
    body = json.loads(query.prompt.body_json)
    if query.prompt.task == "rerank":
        scores = [relevance(body["query"], each) for each in body["documents"]]
        return [Pooled(index, score=score) for index, score in enumerate(scores)]
    vectors = [embed(each, body.get("dimensions", DIMENSIONS)) for each in body["input"]]
    return [Pooled(index, base64.b64decode(to_base64(each))) for index, each in enumerate(vectors)]


async def answering(query: Query) -> AsyncGenerator[AnswerEvent, None]:
    """Bring the results in two parts, the last of them first."""
    results = pooled(query)[::-1]
    yield OPENING
    yield Delta(0, "", 0, pooled=tuple(results[:1]))
    yield Delta(0, "", 0, finish=Finish.STOP, pooled=tuple(results[1:]))
    yield Usage(7, 0)


async def losing_one(query: Query) -> AsyncGenerator[AnswerEvent, None]:
    yield OPENING
    yield Delta(0, "", 0, finish=Finish.STOP, pooled=tuple(pooled(query)[1:]))
    yield Usage(7, 0)


def asked(path: str, answer: Any = answering, **fields: Any) -> tuple[httpx2.Response, Script]:
    return post(path, {"model": MODEL} | fields, answer, models=lambda: POOLING)


def embeddings(**fields: Any) -> httpx2.Response:
    response, script = asked("/v1/embeddings", **fields)
    assert response.status_code == 200, response.text
    assert script.query.needs == {"embed"}
    assert script.query.sampling.max_tokens == 0
    return response


def vectors(response: httpx2.Response) -> list[Any]:
    body = response.json()
    CreateEmbeddingResponse.model_validate(body, strict=True)
    assert [each["index"] for each in body["data"]] == list(range(len(body["data"])))
    return [each["embedding"] for each in body["data"]]


# ---- embeddings


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("one", ["one"]),
        (["one", "two", "three"], ["one", "two", "three"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_inputs_of_every_kind_are_embedded_in_their_order(given: Any, inputs: list[Any]) -> None:
    response = embeddings(input=given)
    assert vectors(response) == [embed(each, DIMENSIONS) for each in inputs]
    assert response.json()["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert response.json()["model"] == MODEL
    assert response.headers["x-mico-site"] == OPENING.site


def test_dimensions_and_base64_are_as_openai_has_them() -> None:
    response = embeddings(input="one", dimensions=3, encoding_format="base64", user="ann")
    (encoded,) = [each["embedding"] for each in response.json()["data"]]
    assert encoded == to_base64(embed("one", 3))


def test_the_openai_sdk_reads_embeddings() -> None:
    async def scenario(edge: Edge) -> None:
        found = await edge.sdk.embeddings.create(model=MODEL, input=["one", "two"])
        assert [each.embedding for each in found.data] == [embed("one", DIMENSIONS), embed("two", DIMENSIONS)]
        floats = await edge.sdk.embeddings.create(model=MODEL, input="one", encoding_format="float")
        assert floats.data[0].embedding == embed("one", DIMENSIONS)

    run(scenario, answering, models=lambda: POOLING)


def test_a_large_response_comes_in_parts_that_join() -> None:
    response = embeddings(input=["x"] * 300, dimensions=1_000)
    assert "content-length" not in response.headers
    assert vectors(response) == [embed("x", 1_000)] * 300


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("model", {"model": None, "input": "x"}),
        ("input", {}),
        ("input", {"input": ""}),
        ("input", {"input": []}),
        ("input", {"input": {"text": "x"}}),
        ("input.0", {"input": [True]}),
        ("input.1", {"input": ["x", ""]}),
        ("input.1", {"input": ["x", [1]]}),
        ("input.1", {"input": [[1], []]}),
        ("input.0.0", {"input": [["x"]]}),
        ("input.1", {"input": [1, -1]}),
        ("input", {"input": ["x"] * (MAX_INPUTS + 1)}),
        ("dimensions", {"input": "x", "dimensions": 0}),
        ("dimensions", {"input": "x", "dimensions": MAX_DIMENSIONS + 1}),
        ("encoding_format", {"input": "x", "encoding_format": "int8"}),
        ("stream", {"input": "x", "stream": True}),
        ("truncate_prompt_tokens", {"input": "x", "truncate_prompt_tokens": 5}),
        ("normalize", {"input": "x", "normalize": False}),
    ],
)
def test_wrong_fields_of_embeddings_are_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    response, script = asked("/v1/embeddings", **fields)
    assert error_of(response, 400)["param"] == param
    assert not script.queries


def test_the_prompt_is_guessed_at_four_characters_a_token() -> None:
    _, script = asked("/v1/embeddings", input=["x" * 40, "y" * 80])
    assert script.query.prompt_tokens_guess == 11 + 21
    _, script = asked("/v1/embeddings", input=[[1, 2, 3], [4]])
    assert script.query.prompt_tokens_guess == 4


# ---- ranks


def ranked(path: str = "/v1/rerank", **fields: Any) -> dict[str, Any]:
    response, script = asked(path, **({"query": "red sea", "documents": DOCUMENTS} | fields))
    assert response.status_code == 200, response.text
    assert script.query.needs == {"rerank"}
    body: dict[str, Any] = response.json()
    assert body.keys() == {"id", "model", "usage", "results"}
    assert body["id"].startswith("rerank-")
    assert body["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    return body


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_by_their_relevance(path: str) -> None:
    assert ranked(path)["results"] == [
        {"index": 2, "relevance_score": 1.0},
        {"index": 0, "relevance_score": 0.5},
        {"index": 1, "relevance_score": 0.5},
    ]


def test_the_best_documents_are_returned_where_asked_for() -> None:
    documents = [{"text": each} for each in DOCUMENTS]
    assert ranked(documents=documents, top_n=1, return_documents=True)["results"] == [
        {"index": 2, "relevance_score": 1.0, "document": {"text": "a red sea"}}
    ]
    assert len(ranked(top_n=9)["results"]) == 3


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("query", {"query": None}),
        ("query", {"query": ["x"]}),
        ("documents", {"documents": None}),
        ("documents", {"documents": []}),
        ("documents", {"documents": "x"}),
        ("documents.1", {"documents": ["x", ""]}),
        ("documents.0", {"documents": [7]}),
        ("documents.0.text", {"documents": [{"title": "x"}]}),
        ("documents", {"documents": ["x"] * (MAX_INPUTS + 1)}),
        ("top_n", {"top_n": 0}),
        ("return_documents", {"return_documents": "yes"}),
        ("max_tokens_per_doc", {"max_tokens_per_doc": 5}),
        ("stream", {"stream": True}),
    ],
)
def test_wrong_fields_of_ranks_are_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    response, script = asked("/v1/rerank", **({"query": "q", "documents": ["d"]} | fields))
    assert error_of(response, 400)["param"] == param
    assert not script.queries


# ---- both


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank"])
def test_a_model_that_cannot_is_named(path: str) -> None:
    body = {"model": MODEL, "input": "x", "query": "q", "documents": ["d"]}
    response, script = post(path, body)  # to a model that chats
    error = error_of(response, 400)
    assert (error["param"], error["code"]) == ("model", "unsupported_parameter")
    assert f"No site that serves {MODEL} can" in error["message"]
    assert not script.queries


@pytest.mark.parametrize(("path", "other"), [("/v1/embeddings", "rerank"), ("/v1/rerank", "embed")])
def test_a_model_of_the_other_kind_is_not_told_of_text(path: str, other: str) -> None:
    body = {"model": MODEL, "input": "x", "query": "q", "documents": ["d"]}
    one_kind = (Model(MODEL, "rev-1", 1024, 0, "mico", frozenset({other})),)
    response, _ = post(path, body, answering, models=lambda: one_kind)
    assert error_of(response, 400)["message"].startswith(f"No site that serves {MODEL} can ")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
    ],
)
def test_a_model_that_only_embeds_is_no_model_to_chat_with(path: str, fields: dict[str, Any]) -> None:
    response, script = asked(path, **fields)
    error = error_of(response, 400)
    assert error["param"] == "model"
    assert error["message"] == f"{MODEL} can make embeddings and rank documents, and generates no text."
    assert not script.queries


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/embeddings", {"input": ["x", "y"]}), ("/v1/rerank", {"query": "q", "documents": DOCUMENTS})],
)
def test_an_answer_that_lacks_a_result_is_an_error(path: str, fields: dict[str, Any]) -> None:
    response, _ = asked(path, losing_one, **fields)
    error_of(response, 502)


def test_errors_and_scopes_are_those_of_every_endpoint() -> None:
    response, _ = asked("/v1/embeddings", fail(NoSite("no site serves it", retry_after_s=1.0)), input="x")
    error_of(response, 503)
    assert response.headers["retry-after"] == "1"
    response, _ = asked("/v1/embeddings", input="x" * 9_000_000)
    error_of(response, 413)

    async def scenario(edge: Edge) -> None:
        refused = await edge.post("/v1/embeddings", {"model": MODEL, "input": "x"}, authorization="Bearer no")
        error_of(refused, 401)

    run(scenario, answering, models=lambda: POOLING)
