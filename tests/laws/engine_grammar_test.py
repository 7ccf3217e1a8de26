"""An answer that follows a grammar is valid when it stops, come what may, and nobody beside it notices."""

from __future__ import annotations

import json
from functools import cache, reduce
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from site_engine.core.request import (
    Finish,
    Request,
    RequestRejected,
    Sampling,
)
from site_engine.engine.engine import SiteEngine
from site_engine.errors import NotServed, Reason
from site_engine.model.grammar_bitmask import GrammarBitmask
from site_engine.text.grammar import Grammar, Grammars
from site_engine.text.tool_grammar import guided_source
from tests.support.engine_models import (
    TOO_SHORT,
    Collected,
    assert_idle,
    drain,
    engine_for,
    family,
    gather,
    greedy,
)

torch.set_num_threads(1)

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "name": {"type": "string", "maxLength": 12}},
    "required": ["x", "name"],
    "additionalProperties": False,
}
DEEP = reduce(lambda inner, _: {"type": "array", "items": inner}, range(400), {"type": "null"})
PROMPTS = [[7 * at + 1, 5, at + 2] for at in range(6)]


@cache
def grammars() -> Grammars:
    served = family("llama").served
    return Grammars(served.tokenizer, served.vocab_size, served.eos_token_ids)


def following(schema: Any) -> Grammar:
    return grammars().compile(guided_source(schema, None, None, grammars().literal), "response_format")


def guided(request_id: str, at: int, schema: Any = POINT, max_tokens: int = 150, **sampling: Any) -> Request:
    rules = {"temperature": 1.0, "seed": at} | sampling
    asked = Sampling(max_tokens=max_tokens, **rules)
    return Request(request_id, PROMPTS[at % 6], asked, grammar=following(schema))


def valid(one: Collected, schema: Any = POINT) -> bool:
    assert one.last is not None
    if one.last.finish is Finish.STOP:
        jsonschema.validate(json.loads(one.text), schema)
    else:
        assert one.last.finish is Finish.LENGTH, one.last.error
    return one.last.finish is Finish.STOP


leaves = st.one_of(
    st.just({"type": "integer"}),
    st.integers(-50, 50).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 9}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "number"}, {"const": 'é"\n'}]),
    st.integers(0, 8).map(lambda most: {"type": "string", "maxLength": most}),
    st.lists(st.text(max_size=4), min_size=1, max_size=3, unique=True).map(lambda words: {"enum": words}),
    st.just({"type": "string", "pattern": "^[a-c]{2,4}$"}),
)


def wider(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.text("abc_é", min_size=1, max_size=3)
    objects = st.dictionaries(names, inner, max_size=3).flatmap(
        lambda properties: st.sets(st.sampled_from(sorted(properties)) if properties else st.nothing()).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required),
                "additionalProperties": False,
            }
        )
    )
    arrays = st.builds(
        lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)
    )
    either = st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner)
    return st.one_of(objects, arrays, either)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.recursive(leaves, wider, max_leaves=5), st.integers(0, 1000))
def test_whatever_the_schema_an_answer_that_stops_is_valid(schema: Any, seed: int) -> None:
    engine = engine_for(family("llama").served)
    engine.submit(guided("random", seed, schema))
    engine.submit(guided("greedy", seed, schema, temperature=0.0))
    for one in drain(engine).values():
        valid(one, schema)
    assert_idle(engine)


def test_answers_do_end() -> None:
    """The laws here would hold of an engine whose answers are all cut."""
    engine = engine_for(family("llama").served)
    for at in range(8):
        engine.submit(guided(str(at), at))
    assert sum(valid(one) for one in drain(engine).values()) == 8


def test_rows_without_a_grammar_do_not_notice_those_that_have_one() -> None:
    alone, beside = engine_for(family("llama").served), engine_for(family("llama").served)
    for engine in (alone, beside):
        for at in range(4):
            engine.submit(greedy(f"plain {at}", PROMPTS[at], 30, logprobs=2))
    for at in range(4):
        beside.submit(guided(f"guided {at}", at))
    found, expected = drain(beside), drain(alone)
    for name, one in expected.items():
        assert found[name].token_ids == one.token_ids
        logprobs = [[each.logprobs for each in side.outputs] for side in (one, found[name])]
        assert logprobs[0] == logprobs[1]


def test_a_row_with_a_grammar_does_not_depend_on_its_neighbours() -> None:
    def answers(together: bool) -> list[list[int]]:
        engine = engine_for(family("llama").served)
        found: dict[str, Collected] = {}
        for at in range(5):
            engine.submit(guided(f"{at}", at))
            if not together:
                drain(engine, found)
        drain(engine, found)
        return [found[f"{at}"].token_ids for at in range(5)]

    assert answers(together=True) == answers(together=False)


def test_preemption_changes_nothing() -> None:
    def answers(**room: int) -> dict[str, Collected]:
        engine = engine_for(family("llama").served, slots=6, page_size=4, **room)
        for at in range(6):
            request = guided(str(at), at, {"type": "string", "minLength": 30, "maxLength": 40})
            request.remaining = TOO_SHORT
            engine.submit(request)
        return drain(engine)

    tight, roomy = answers(kv_tokens=96), answers()
    assert sum(one.last.timings.preemptions for one in tight.values() if one.last and one.last.timings) > 0
    assert [tight[str(at)].text for at in range(6)] == [roomy[str(at)].text for at in range(6)]


@pytest.mark.parametrize("delivered", [1, 7, 15])
def test_an_answer_goes_on_elsewhere_where_it_was(delivered: int) -> None:
    whole = drain_one(guided("a", 3))
    resumed = guided("a", 3)
    resumed.resumed = whole.token_ids[:delivered]
    resumed.__post_init__()
    rest = drain_one(resumed)
    assert whole.token_ids[:delivered] + rest.token_ids == whole.token_ids
    assert rest.text == whole.text
    assert valid(whole)


def test_an_answer_that_was_complete_when_its_site_died_only_ends() -> None:
    whole = drain_one(guided("a", 3))
    resumed = guided("a", 3)
    resumed.resumed = whole.token_ids
    resumed.__post_init__()
    rest = drain_one(resumed)
    assert (rest.token_ids, rest.text) == ([], whole.text)
    assert rest.last is not None
    assert rest.last.finish is Finish.STOP


def test_tokens_that_do_not_fit_the_schema_cannot_be_resumed_from() -> None:
    engine = engine_for(family("llama").served)
    resumed = guided("a", 3)
    resumed.resumed = [5, 5, 5]
    resumed.__post_init__()
    with pytest.raises(RequestRejected) as refused:
        engine.submit(resumed)
    assert refused.value.param == "resume"
    assert_idle(engine)


def test_a_request_that_is_taken_again_begins_again() -> None:
    engine = engine_for(family("llama").served, slots=1)
    first, second = guided("first", 0), guided("second", 1)
    engine.submit(first)
    engine.submit(second)
    found: dict[str, Collected] = {}
    gather(engine.step(), found)
    assert engine.release(["second"]) == ["second"]
    engine.submit(second)
    assert valid(drain(engine, found)["second"])


def test_a_cut_answer_says_so() -> None:
    cut = drain_one(guided("a", 0, {"type": "string", "minLength": 50}, max_tokens=10))
    assert cut.last is not None
    assert (cut.last.finish, cut.last.completion_tokens) == (Finish.LENGTH, 10)


def test_the_last_token_allowed_may_complete_the_answer() -> None:
    whole = drain_one(guided("a", 3))
    assert valid(drain_one(guided("a", 3, max_tokens=len(whole.token_ids))))


@pytest.mark.parametrize("min_tokens", [0, 40])
def test_a_grammar_at_its_end_ends_the_answer_before_its_minimum(min_tokens: int) -> None:
    one = drain_one(guided("a", 0, {"enum": ["yes", "no"]}, min_tokens=min_tokens, ignore_eos=True))
    assert json.loads(one.text) in {"yes", "no"}


def test_a_minimum_holds_where_the_grammar_leaves_a_choice() -> None:
    one = drain_one(guided("a", 0, {"type": "integer"}, min_tokens=12, max_tokens=60))
    assert one.last is not None
    assert one.last.completion_tokens >= 12
    int(one.text)


def test_a_stop_string_ends_an_answer_within_its_grammar() -> None:
    one = drain_one(guided("a", 3, stop=('"name"',)))
    assert one.text.startswith('{"x":')
    assert '"name"' not in one.text
    assert one.last is not None
    assert one.last.finish is Finish.STOP


def test_log_probabilities_are_those_of_the_model_without_the_grammar() -> None:
    free = drain_one(greedy("a", PROMPTS[0], 1, logprobs=3))
    held = drain_one(guided("a", 0, temperature=0.0, logprobs=3))
    assert held.outputs[0].logprobs[0].top == free.outputs[0].logprobs[0].top
    assert held.outputs[0].logprobs[0].logprob not in {None, 0.0}


def test_biases_and_penalties_do_not_break_the_grammar() -> None:
    close = family("llama").served.tokenizer.convert_tokens_to_ids("}")
    one = drain_one(guided("a", 3, logit_bias={close: -100.0}, presence_penalty=2.0, repetition_penalty=1.3))
    assert valid(one)


def test_a_mask_that_fails_costs_only_those_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(family("llama").served)
    engine.submit(guided("guided", 0))
    engine.submit(greedy("plain", PROMPTS[1], 5))
    masks = engine._rules.masks

    def break_down(*_: object) -> None:
        raise RuntimeError("no memory for a mask")

    monkeypatch.setattr(masks, "_fill", break_down)
    found = drain(engine)
    ends = {name: one.last and (one.last.finish, one.last.error) for name, one in found.items()}
    assert ends["guided"] == (Finish.FAILED, "RuntimeError: no memory for a mask")
    assert ends["plain"] == (Finish.LENGTH, "")
    assert_idle(engine)


@pytest.mark.parametrize(
    ("schema", "reason", "told"),
    [
        ({"type": "strin"}, Reason.INVALID, "strin"),
        ({"$ref": "#/nowhere"}, Reason.INVALID, "nowhere"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, Reason.INVALID, "incompatible"),
        ({"type": "array", "uniqueItems": True}, Reason.UNSUPPORTED, "uniqueItems"),
        ({"enum": ["x" * 300_000]}, Reason.INVALID, "longer"),
        ({"$ref": "#"}, Reason.INVALID, "no answer"),
        (DEEP, Reason.INVALID, "recursion"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_reason(
    schema: Any, reason: Reason, told: str
) -> None:
    with pytest.raises(NotServed, match=told) as refused:
        following(schema)
    assert (refused.value.reason, refused.value.param) == (reason, "response_format")
    assert "x-guidance" not in refused.value.message


def test_masks_are_applied_on_a_device_as_on_a_cpu() -> None:
    size = family("llama").served.vocab_size
    requests = [guided(str(row), row) for row in range(3)]
    for row, request in enumerate(requests):
        request.row, request.guide = 2 - row, following(POINT).start()
    masks = GrammarBitmask(4, size)
    here, there = torch.randn(4, size), torch.zeros(4, size)
    there[:] = here
    masks.allow(requests, [0, 2], here)
    masks._mask_on_device([2, 0], [0, 2], there)
    assert torch.equal(here, there)
    kept = torch.isfinite(here).sum(-1).tolist()
    assert kept[1] == kept[3] == size
    assert 0 < kept[0] < size


def test_a_schema_that_would_compile_for_seconds_is_refused_with_the_reason() -> None:
    properties = {f"p_{number}": {"type": "string"} for number in range(4_000)}
    with pytest.raises(NotServed, match=r"can't be enforced: grammar size.* too big") as refused:
        following({"type": "object", "properties": properties})
    assert (refused.value.reason, refused.value.param) == (Reason.INVALID, "response_format")


def test_one_schema_is_compiled_once() -> None:
    assert following(POINT) is following(dict(POINT))


def drain_one(request: Request, engine: SiteEngine | None = None) -> Collected:
    engine = engine or engine_for(family("llama").served)
    engine.submit(request)
    (one,) = drain(engine).values()
    assert_idle(engine)
    return one
