"""The API's promises about unary answers, text completions and the list of models."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import ModelInfo
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion

from gateway.domain import Caller, Delta, Finish, Opening, Query, TokenLogprob, Usage
from gateway.errors import ContextTooLong
from tests.support.fakes.edge import (
    KEY,
    MODEL,
    MODELS,
    NESTED,
    NO_DETAILS,
    OPENING,
    Edge,
    chat,
    chat_body,
    error_of,
    events_of,
    fail,
    get,
    play,
    run,
    scripted,
    text,
)


def chat_completion(response: Any) -> ChatCompletion:
    """Validate the body as sent over the wire: the SDK's own parsing is lenient."""
    assert response.status_code == 200, response.text
    return ChatCompletion.model_validate(response.json(), strict=True)


def test_a_completion_has_an_id_a_time_and_the_requested_model() -> None:
    completion = chat_completion(chat(model=NESTED)[0])
    assert completion.id.startswith("chatcmpl-")
    assert completion.object == "chat.completion"
    assert completion.created == 1_750_000_000
    assert completion.model == NESTED


def test_choices_are_sorted_by_index_whichever_finished_first() -> None:
    pieces = [
        OPENING,
        Delta(2, "c", 1, finish=Finish.STOP),
        Delta(0, "a", 1),
        Delta(1, "b", 1, finish=Finish.STOP),
    ]
    response, _ = chat(play(*pieces, Delta(0, "!", 2, finish=Finish.LENGTH), Usage(7, 4)), n=3)
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in choices] == ["a!", "b", "c"]
    assert [choice["finish_reason"] for choice in choices] == ["length", "stop", "stop"]
    for choice in choices:
        assert choice.keys() == {"index", "message", "logprobs", "finish_reason"}
        assert choice["message"].keys() == {"role", "content", "refusal"}
        assert choice["logprobs"] is choice["message"]["refusal"] is None


def test_tool_calls_is_absent_without_calls() -> None:
    response, _ = chat()
    assert "tool_calls" not in response.text
    assert "tool_calls" not in chat(stream=True)[0].text


@pytest.mark.parametrize("finish", list(Finish))
def test_finish_reasons_are_openais(finish: Finish) -> None:
    assert chat_completion(chat(scripted("x", finish=finish))[0]).choices[0].finish_reason == finish.value


def test_an_answer_without_a_finish_reason_is_a_502() -> None:
    response, _ = chat(play(OPENING, Delta(0, "half", 1)))
    assert error_of(response, 502)["code"] == "upstream_lost"
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("pieces", [[], [OPENING], [OPENING, Delta(0, "x", 1, finish=Finish.STOP)]])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_ends_in_any_other_way_is_an_error(pieces: list[Any], stream: bool) -> None:
    response, _ = chat(play(*pieces), stream=stream)
    assert '"code":"upstream_lost"' in response.text


def test_usage_adds_up() -> None:
    usage = chat(scripted("a", "b", "c"))[0].json()["usage"]
    assert usage == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, **NO_DETAILS}


def test_logprobs_have_openais_shape() -> None:
    response, _ = chat(scripted("Hi", "é"), logprobs=True, top_logprobs=2)
    chat_completion(response)
    logprobs = response.json()["choices"][0]["logprobs"]
    assert logprobs.keys() == {"content", "refusal"}
    assert [entry["token"] for entry in logprobs["content"]] == ["Hi", "é"]
    assert logprobs["content"][1]["bytes"] == [0xC3, 0xA9]
    assert [top["token"] for top in logprobs["content"][0]["top_logprobs"]] == ["a", "b"]


def test_an_impossible_token_has_a_finite_logprob() -> None:
    token = TokenLogprob("x", b"x", float("-inf"))
    response, _ = chat(
        play(OPENING, Delta(0, "x", 1, finish=Finish.STOP, logprobs=(token,)), Usage(7, 1)), logprobs=True
    )
    assert response.json()["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


def test_the_sdks_parse_raises_on_finish_reason_length() -> None:
    async def scenario(edge: Edge) -> None:
        with pytest.raises(openai.LengthFinishReasonError):
            await edge.sdk.chat.completions.parse(**chat_body())

    run(scenario, scripted("x", finish=Finish.LENGTH))


# ---- text completions ----


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Once", ["Once"]),
        (["Once"], ["Once"]),
        (["Once", "Twice"], ["Once", "Twice"]),
        ([1, 2.0, 3], [(1, 2, 3)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
    ],
)
def test_a_prompt_is_a_text_a_list_of_texts_or_token_ids(prompt: Any, prompts: list[Any]) -> None:
    response, script = text(prompt=prompt, n=2)
    Completion.model_validate(response.json(), strict=True)
    assert [query.prompt for query in script.queries] == prompts
    assert len({query.id for query in script.queries}) == len(prompts)
    assert len(response.json()["choices"]) == 2 * len(prompts)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        ([""], "prompt.0"),
        (["a", 1], "prompt.1"),
        ([1, "a"], "prompt.1"),
        ([1, -1], "prompt.1"),
        ([1, True], "prompt.1"),
        ([1, 2**32], "prompt.1"),
        ([[1], []], "prompt.1"),
        ([[1], [2, "x"]], "prompt.1.1"),
        ([None], "prompt.0"),
    ],
)
def test_prompts_of_other_kinds_are_refused(prompt: Any, param: str) -> None:
    response, script = text(prompt=prompt)
    assert error_of(response, 400)["param"] == param
    assert not script.queries


def test_prompts_times_n_is_bounded() -> None:
    response, script = text(prompt=["x"] * 65, n=2)
    error = error_of(response, 400)
    assert error["param"] == "prompt"
    assert "128" in error["message"]
    assert not script.queries


def echoing(query: Query) -> Any:
    """Answer with the prompt and the number of the choice; later prompts open and answer first."""

    async def answer() -> Any:
        rank = int(str(query.prompt)[-1])
        yield Opening(f"site-{rank % 2}", "aws", "r", rank, rank / 1000, rank, "rev-1")
        for k in range(query.sampling.n):
            yield Delta(k, f"{query.prompt}/{k}", 1, finish=Finish.STOP)
        yield Usage(rank, query.sampling.n)

    return answer()


@pytest.mark.parametrize("stream", [False, True])
def test_the_index_of_a_choice_is_prompt_times_n_plus_k(stream: bool) -> None:
    response, _ = text(echoing, prompt=["p1", "p2", "p3"], n=2, stream=stream)
    chunks = events_of(response.content) if stream else [response.json()]
    texts = [""] * 6
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["p1/0", "p1/1", "p2/0", "p2/1", "p3/0", "p3/1"]
    assert response.headers["x-mico-site"] == "site-0,site-1"
    assert response.headers["x-mico-attempts"] == "3"
    assert response.headers["x-mico-queue-ms"] == "3"
    assert "x-mico-cost-usd" not in response.headers, "no site has a price"
    if not stream:
        assert response.json()["usage"] == {
            "prompt_tokens": 6,
            "completion_tokens": 6,
            "total_tokens": 12,
            **NO_DETAILS,
        }


@pytest.mark.parametrize("stream", [False, True])
def test_one_refused_prompt_refuses_the_request(stream: bool) -> None:
    def answer(query: Query) -> Any:
        failing = fail(ContextTooLong("2000 tokens do not fit into 1024."))
        return failing(query) if query.prompt == "long" else scripted("x")(query)

    response, script = text(answer, prompt=["a", "long", "b"], stream=stream)
    assert error_of(response, 400)["code"] == "context_length_exceeded"
    assert len(script.ended) == 3


def test_the_default_max_tokens_of_a_text_completion_is_16() -> None:
    assert text()[1].query.sampling.max_tokens == 16
    assert text(max_tokens=None)[1].query.sampling.max_tokens == 16
    assert text(max_tokens=40)[1].query.sampling.max_tokens == 40


def test_an_echo_alone_generates_no_token() -> None:
    echoed = play(OPENING, Delta(0, "Once", 0, finish=Finish.LENGTH), Usage(7, 0))
    response, script = text(echoed, echo=True, max_tokens=0)
    assert script.query.sampling.max_tokens == 0
    assert response.json()["choices"][0]["text"] == "Once"
    assert response.json()["usage"]["total_tokens"] == 7


def test_text_completion_logprobs_cover_an_echoed_prompt() -> None:
    def token(text: str, logprob: float | None) -> TokenLogprob:
        top = () if logprob is None else (TokenLogprob("z", b"z", -0.1),)
        return TokenLogprob(text, text.encode(), logprob, top)

    first = Delta(0, "Once upon", 1, prompt_logprobs=(token("Once", None),), logprobs=(token(" upon", -2.0),))
    last = Delta(0, " a", 2, finish=Finish.STOP, logprobs=(token(" a", -3.0),))
    answer = play(OPENING, first, last, Usage(1, 2))
    expected = {
        "tokens": ["Once", " upon", " a"],
        "token_logprobs": [None, -2.0, -3.0],
        "top_logprobs": [None, {" upon": -2.0, "z": -0.1}, {" a": -3.0, "z": -0.1}],
        "text_offset": [0, 4, 9],
    }
    response, script = text(answer, echo=True, logprobs=1)
    assert script.query.sampling.echo
    assert script.query.sampling.logprobs == 1
    assert response.json()["choices"][0]["logprobs"] == expected
    assert response.json()["choices"][0]["text"] == "Once upon a"

    joined: dict[str, list[Any]] = {name: [] for name in expected}
    for chunk in events_of(text(answer, echo=True, logprobs=1, stream=True)[0].content):
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            joined[name] += values
    assert joined == expected


@pytest.mark.parametrize("stream", [False, True])
def test_text_offsets_are_of_the_text_that_is_returned(stream: bool) -> None:
    """A token without text begins where the next one does, a part of a character where the character does."""
    bos, word = TokenLogprob("<s>", b"", None), TokenLogprob("Crab ", b"Crab ", -1.0)
    parts = [TokenLogprob("\ufffd", raw, -1.0) for raw in (b"\xf0\x9f", b"\xa6", b"\x80")]
    end = TokenLogprob("!", b"!", -1.0)
    first = Delta(0, "Crab ", 1, prompt_logprobs=(bos, word), logprobs=(parts[0],))
    middle = [Delta(0, "", 2, logprobs=(parts[1],)), Delta(0, "\U0001f980", 3, logprobs=(parts[2],))]
    last = Delta(0, "!", 4, finish=Finish.STOP, logprobs=(end,))
    answer = play(OPENING, first, *middle, last, Usage(2, 4))
    response = text(answer, echo=True, logprobs=0, stream=stream)[0]
    bodies = events_of(response.content) if stream else [response.json()]
    found = [choice["logprobs"] for body in bodies for choice in body["choices"] if choice["logprobs"]]
    assert [offset for each in found for offset in each["text_offset"]] == [0, 0, 5, 5, 5, 6]


@pytest.mark.parametrize("logprobs", [-1, 6, True])
def test_text_completion_logprobs_are_zero_to_five(logprobs: Any) -> None:
    assert error_of(text(logprobs=logprobs)[0], 400)["param"] == "logprobs"


def test_a_text_completion_has_openais_shape() -> None:
    response, _ = text()
    completion = Completion.model_validate(response.json(), strict=True)
    assert completion.id.startswith("cmpl-")
    assert completion.object == "text_completion"
    assert completion.choices[0].text == "Hello world"
    assert completion.choices[0].finish_reason == "stop"


def test_a_streamed_text_completion_has_openais_shape() -> None:
    response, _ = text(
        scripted("a", "b", finish=Finish.LENGTH), stream=True, stream_options={"include_usage": True}
    )
    *chunks, usage = events_of(response.content)
    for chunk in (chunks[-1], usage):  # before the end the reason is null, which the SDK's type does not know
        Completion.model_validate(chunk, strict=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 9


# ---- models ----


def test_models_are_listed_with_their_context_length() -> None:
    async def scenario(edge: Edge) -> None:
        body = (await edge.http.get("/v1/models")).json()
        assert body["object"] == "list"
        for card in body["data"]:
            Model.model_validate(card, strict=True)
        assert body["data"][0] == {
            "id": MODEL,
            "object": "model",
            "created": 1_700_000_000,
            "owned_by": "mico",
            "root": MODEL,
            "parent": None,
            "max_model_len": 1024,
            "features": ["chat", "guided", "logprobs", "tools"],
            "state": "ready",
        }
        assert [model.id async for model in edge.sdk.models.list()] == [MODEL, NESTED]

    run(scenario)


def test_clients_of_anthropics_api_get_its_models() -> None:
    async def scenario(edge: Edge) -> None:
        headers = {"anthropic-version": "2023-06-01"}
        page = (await edge.http.get("/v1/models", headers=headers)).json()
        assert (page["first_id"], page["last_id"], page["has_more"]) == (MODEL, NESTED, False)
        card = (await edge.http.get(f"/v1/models/{MODEL}", headers=headers)).json()
        assert card == page["data"][0]
        assert card == {
            "type": "model",
            "id": MODEL,
            "display_name": MODEL,
            "created_at": "2023-11-14T22:13:20Z",
            "lifecycle": "active",
            "max_input_tokens": 1024,
            "max_tokens": 1024,
        }
        ModelInfo.model_validate_json(json.dumps(card), strict=True)

    run(scenario)


def test_clients_of_anthropics_api_page_through_models_in_both_directions() -> None:
    served = [replace(MODELS[0], id=f"m-{number:02}") for number in range(45)]
    ids = [model.id for model in served]

    async def scenario(edge: Edge) -> None:
        models = anthropic.AsyncAnthropic(
            api_key=KEY, base_url="http://edge", http_client=edge.http, max_retries=0
        ).models
        first = await models.list()
        assert ([each.id for each in first.data], first.has_more) == (ids[:20], True)
        assert (first.first_id, first.last_id) == (ids[0], ids[19])
        assert [each.id async for each in models.list()] == ids
        assert [each.id async for each in models.list(limit=1000)] == ids
        after = await models.list(limit=3, after_id=ids[41])
        assert ([each.id for each in after.data], after.has_more) == (ids[42:], False)
        before = await models.list(limit=2, before_id=ids[5])
        assert ([each.id for each in before.data], before.has_more) == (ids[3:5], True)
        backwards = [each.id async for each in models.list(limit=2, before_id=ids[3])]
        assert backwards == [ids[1], ids[2], ids[0]]
        end = await models.list(after_id=ids[-1])
        assert (end.data, end.first_id, end.last_id, end.has_more) == ([], None, None, False)
        for query in ("limit=0", "limit=1001", "after_id=a&before_id=b", "after_id=gone"):
            answer = await edge.http.get(f"/v1/models?{query}", headers={"anthropic-version": "2023-06-01"})
            assert (answer.status_code, answer.json()["type"]) == (400, "error"), query
        assert len((await edge.http.get("/v1/models?limit=1")).json()["data"]) == 45, "OpenAI's has no pages"

    run(scenario, models=lambda: served)


def test_no_model_is_listed_to_clients_of_anthropics_api_that_ask_for_retired_ones() -> None:
    async def scenario(edge: Edge) -> None:
        models = anthropic.AsyncAnthropic(
            api_key=KEY, base_url="http://edge", http_client=edge.http, max_retries=0
        ).models
        assert [each.id async for each in models.list(lifecycle=["retired"])] == []
        both = models.list(lifecycle=["deprecated", "active"], limit=1)
        assert [each.id async for each in both] == [MODEL, NESTED]

    run(scenario)


def test_pages_of_models_fit_together_where_each_gateway_has_them_in_another_order() -> None:
    served = [replace(MODELS[0], id=f"m-{number:02}") for number in range(45)]
    orders = random.Random(1)

    async def scenario(edge: Edge) -> None:
        models = anthropic.AsyncAnthropic(
            api_key=KEY, base_url="http://edge", http_client=edge.http, max_retries=0
        ).models
        assert [each.id async for each in models.list()] == [model.id for model in served]

    run(scenario, models=lambda: orders.sample(served, len(served)))


def test_a_key_lists_only_the_models_it_may_use() -> None:
    async def scenario(edge: Edge) -> None:
        narrow = edge.sdk.with_options(api_key="narrow")
        assert [model.id async for model in narrow.models.list()] == [MODEL]
        with pytest.raises(openai.NotFoundError):
            await narrow.models.retrieve(NESTED)

    run(scenario)
    assert isinstance(get("/v1/models").json()["error"], dict)


def test_a_model_is_retrieved_by_a_name_with_slashes() -> None:
    async def scenario(edge: Edge) -> None:
        assert (await edge.sdk.models.retrieve(NESTED)).id == NESTED
        assert (await edge.http.get(f"/v1/models/{NESTED}")).json()["id"] == NESTED
        error = error_of(await edge.http.get("/v1/models/org/unknown"), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "org/unknown" in error["message"]

    run(scenario)


def test_callers_reach_the_answer_with_their_rights() -> None:
    async def scenario(edge: Edge) -> None:
        await edge.sdk.with_options(api_key="narrow").chat.completions.create(**chat_body())

    assert run(scenario).query.caller == Caller("key-2", "tenant-2", models=frozenset({MODEL}))


def test_a_whole_answer_says_what_it_cost_exactly() -> None:
    last = Delta(0, "4", 1, finish=Finish.STOP)
    response, _ = chat(play(OPENING, last, Usage(7, 1, nano_usd=1_234_000_005)))
    assert response.headers["x-mico-cost-usd"] == "1.234000005"
    response, _ = chat(play(OPENING, last, Usage(7, 1, nano_usd=1_200)))
    assert response.headers["x-mico-cost-usd"] == "0.0000012"
