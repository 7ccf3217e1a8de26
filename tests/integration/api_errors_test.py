"""The API's promises about errors: every kind of failure, and the exception of OpenAI's SDK for it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest

from gateway import errors
from gateway.domain import AnswerEvent, Query
from gateway.openai.error_body import translate
from tests.support.fakes.edge import MODEL, Edge, chat, chat_body, error_of, fail, run, scripted

TREE = [
    (
        errors.BadRequest("Not so.", param="n", code="invalid_value"),
        400,
        "invalid_value",
        openai.BadRequestError,
    ),
    (errors.ContextTooLong("9 > 8."), 400, "context_length_exceeded", openai.BadRequestError),
    (errors.Unauthenticated("Who?"), 401, "invalid_api_key", openai.AuthenticationError),
    (errors.Forbidden("Not this model."), 403, "permission_denied", openai.PermissionDeniedError),
    (errors.ModelNotFound("No model 'x'."), 404, "model_not_found", openai.NotFoundError),
    (errors.NotFound("No batch 'x'."), 404, "not_found", openai.NotFoundError),
    (errors.TooMany("Slower."), 429, "rate_limit_exceeded", openai.RateLimitError),
    (errors.BudgetSpent("Next month."), 429, "insufficient_quota", openai.RateLimitError),
    (errors.AboveQuota("Smaller."), 429, "rate_limit_exceeded", openai.RateLimitError),
    (errors.Overloaded("Full."), 503, "overloaded", openai.InternalServerError),
    (errors.NoSite("None serves it."), 503, "no_site", openai.InternalServerError),
    (errors.UpstreamFailed("Broke."), 502, "upstream_error", openai.InternalServerError),
    (errors.UpstreamLost("Lost."), 502, "upstream_lost", openai.InternalServerError),
    (errors.DeadlinePassed("Too late."), 504, "timeout", openai.InternalServerError),
    (errors.ShuttingDown("Going down."), 503, "shutting_down", openai.InternalServerError),
]


@pytest.mark.parametrize(("error", "status", "code", "raised"), TREE)
@pytest.mark.parametrize("stream", [False, True])
def test_every_failure_has_its_status(
    error: errors.MicoError, status: int, code: str, raised: type[openai.APIStatusError], stream: bool
) -> None:
    async def scenario(edge: Edge) -> None:
        with pytest.raises(raised) as caught:
            await edge.sdk.chat.completions.create(**chat_body(stream=stream))
        assert caught.value.status_code == status
        assert caught.value.code == code
        assert caught.value.request_id
        assert error.message in caught.value.message
        if error.param:
            assert caught.value.param == error.param

    run(scenario, fail(error))


def leaves(kind: type[errors.MicoError]) -> set[type[errors.MicoError]]:
    return {kind}.union(*(leaves(sub) for sub in kind.__subclasses__()))


def test_no_error_of_the_tree_is_forgotten() -> None:
    concrete = leaves(errors.MicoError) - {errors.MicoError, errors.ClientMistake}
    assert concrete == {type(error) for error, *_ in TREE}
    assert translate(errors.MicoError("?"), "id").status == 500


def test_an_unknown_model_is_named() -> None:
    response, _ = chat(fail(errors.ModelNotFound("The model 'nope' is not served here.")), model="nope")
    error = error_of(response, 404)
    assert (error["param"], "nope" in error["message"]) == ("model", True)


@pytest.mark.parametrize("error", [errors.TooMany, errors.Overloaded, errors.NoSite])
@pytest.mark.parametrize(
    ("wait_s", "seconds", "milliseconds"),
    [(2.5, "3", "2500"), (0.0, "1", "1"), (1e6, "120", "120000"), (120.0, "120", "120000")],
)
def test_retry_after_is_sent_and_capped(
    error: type[errors.MicoError], wait_s: float, seconds: str, milliseconds: str
) -> None:
    response, _ = chat(fail(error("Wait.", retry_after_s=wait_s)))
    assert response.headers["retry-after"] == seconds
    assert response.headers["retry-after-ms"] == milliseconds
    assert "x-should-retry" not in response.headers


def test_a_429_or_503_always_has_a_retry_after() -> None:
    for error in (errors.TooMany("x"), errors.Overloaded("x"), errors.NoSite("x")):
        assert int(chat(fail(error))[0].headers["retry-after"]) >= 1


def failing_first(error: errors.MicoError, times: int) -> Any:
    failures = iter([error] * times)

    async def answer(query: Query) -> AsyncGenerator[AnswerEvent, None]:
        for failure in failures:
            raise failure
        async for piece in scripted("at last")(query):
            yield piece

    return answer


@pytest.mark.parametrize("stream", [False, True])
def test_the_sdk_retries_twice_and_gets_its_answer(stream: bool) -> None:
    async def scenario(edge: Edge) -> None:
        sdk = edge.sdk.with_options(max_retries=2)
        raw = await sdk.chat.completions.with_raw_response.create(**chat_body(stream=stream))
        assert raw.retries_taken == 2
        assert raw.http_request.headers["x-stainless-retry-count"] == "2"

    full = errors.Overloaded("Full.", retry_after_s=0.001)
    assert len(run(scenario, failing_first(full, 2)).queries) == 3


@pytest.mark.parametrize("error", [errors.UpstreamLost("Lost."), errors.DeadlinePassed("Late.")])
def test_no_retry_is_advised_when_it_would_repeat_paid_work(error: errors.MicoError) -> None:
    async def scenario(edge: Edge) -> None:
        with pytest.raises(openai.InternalServerError):
            await edge.sdk.with_options(max_retries=2).chat.completions.create(**chat_body())

    assert len(run(scenario, fail(error)).queries) == 1


def test_a_refusal_by_the_query_layer_is_a_403() -> None:
    """The HTTP edge passes the caller on with the query; it does not decide which models a caller may use."""
    response, script = chat(fail(errors.Forbidden(f"This key may not use '{MODEL}'.")))
    assert error_of(response, 403)["code"] == "permission_denied"
    assert script.query.model == MODEL
