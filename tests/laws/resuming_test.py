"""A broken answer goes on where the client's copy of it ends: nothing twice or missing, counted once."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.domain import Caller, Delta, Query
from gateway.domain import Sampling as Asked
from gateway.errors import UpstreamLost
from gateway.failure import AttemptFailure, FailureCause, Resume
from gateway.prompt import Chat, Message, Prompt
from gateway.query.state import QueryState
from gateway.routing.failover import FailedTry, resume_options, tries
from site_engine import messages as m
from site_engine.core.remaining_curve import RemainingCurve
from site_engine.core.request import Lane, RequestRejected, Sampling
from site_engine.engine_client import Prepared
from site_engine.errors import NotServed
from site_engine.federation.attempts import Attempts
from site_engine.remote.dialects import VLLM
from site_engine.remote.resume import continue_from_text
from site_engine.text.grammar import Grammars
from site_engine.text.tokenize import PromptTokenizer
from tests.support.engine_models import VOCAB, Collected, drain, engine_for, family, greedy, tokenizer

torch.set_num_threads(1)
PROMPT, LIMIT = tokenizer().encode("THE END", add_special_tokens=False), 40
BIAS = {tokenizer().convert_tokens_to_ids(letter): 50.0 for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}
"""Answers of capitals alone, none of which the tokenizer joins: they are tokenized as they were generated."""
PLAIN = Sampling(max_tokens=LIMIT, temperature=0.0)
texts = st.text(max_size=6)
prompts = st.sampled_from(
    [Chat((Message("user", "hi"),)), "hi", (1, 2), Chat((Message("user", "hi"),), "[1]")]
)
sampled = st.builds(
    Asked,
    seed=st.none() | st.just(1),
    temperature=st.sampled_from([0.0, 1.0]),
    guided_json=st.sampled_from(["", "{}"]),
)
resumes = st.builds(
    Resume,
    token_ids=st.sampled_from([(), (7, 8)]),
    text=texts,
    tokens=st.just(2),
    tool_calls=st.integers(0, 1),
    reasoning_chars=st.integers(0, 1),
    refused=st.booleans(),
)


def query(prompt: Prompt, sampling: Asked) -> Query:
    return Query("q", "m", prompt, sampling, Caller("k", "t"), received_s=0.0, deadline_s=9.0)


@given(prompts, sampled, resumes)
def test_what_goes_on_has_a_way_and_what_has_none_is_refused(
    prompt: Prompt, sampling: Asked, resume: Resume
) -> None:
    plan = tries(sampling, 3)
    next(plan)
    try:
        this = plan.send(FailedTry(AttemptFailure("a", FailureCause.LOST, "gone"), resume))
    except UpstreamLost:
        assert not resume.token_ids
        assert resume_options(query(prompt, sampling), resume) == ()
        return
    asked = query(prompt, sampling)
    ways = resume_options(asked, this.resume)
    assert ways
    assert all(asked.needs <= way for way in ways)
    if resume.has_output:
        assert all(way & {"resume", "resume_text", "resume_chat"} for way in ways)
        exact = {"resume", "reasoning"} if resume.reasoning_chars else {"resume"}
        assert (ways[0] == asked.needs | exact) is bool(resume.token_ids)
    by_text = [way for way in ways if way & {"resume_text", "resume_chat"}]
    if (
        resume.tool_calls
        or resume.reasoning_chars
        or resume.refused
        or (sampling.seed is not None and sampling.temperature > 0)
    ):
        assert not by_text  # only the exact tokens will do


class _Attempt:
    id = "a"


@given(st.lists(st.tuples(texts, st.integers(0, 3), st.booleans()), min_size=1, max_size=9))
def test_tokens_are_named_all_or_not_at_all(news: list[tuple[str, int, bool]]) -> None:
    """Some of the sites name the tokens that they count, others do not; the text is whole in any case."""
    state = QueryState(query("hi", Asked()), lambda: 0.0, 0.0)
    counted, named = 0, []
    attempt: Any = _Attempt()
    state.record_first(attempt)
    for text, tokens, names in news:
        ids = tuple(range(counted, counted + tokens)) if names else ()
        counted, named = counted + tokens, [*named, *ids]
        state.record_delta(Delta(0, text, counted, token_ids=ids))
    delivered = state.delivered
    assert delivered is not None
    assert (delivered.text, delivered.tokens) == ("".join(text for text, _, _ in news), counted)
    assert delivered.token_ids == (tuple(range(counted)) if len(named) == counted else ())


@cache
def whole() -> Collected:
    engine = engine_for(family("gpt2").served)
    engine.submit(greedy("whole", PROMPT, LIMIT + 2, logit_bias=BIAS))
    return drain(engine)["whole"]


def resumed(text: str, tokens: int, **more: Any) -> m.Assign:
    delivered = {"resumed_text": text, "resumed_chars": len(text), "resumed_tokens": tokens}
    prompt, sampling = (
        m.TokenPrompt(tuple(PROMPT)),
        more.pop("sampling", Sampling(max_tokens=LIMIT, temperature=0.0, logit_bias=BIAS)),
    )
    return m.Assign(
        "a",
        "q",
        "m",
        prompt,
        sampling,
        1,
        False,
        RemainingCurve(),
        Lane.CHAT,
        0,
        None,
        "",
        **delivered,
        **more,
    )


def at_a_site(assign: m.Assign, grammars: Grammars | None = None) -> tuple[str, m.Delta]:
    """The text that the site adds, and its last word."""
    attempts, engine = Attempts(1, {}), engine_for(family("gpt2").served)
    attempts.assign(assign, 0.0)
    prepared = PromptTokenizer(tokenizer(), VOCAB, lambda call: None, grammars).prepare_now(assign)
    (request,) = attempts.prepared("a", prepared)
    engine.submit(request)
    attempts.admitted("a")
    for output in drain(engine)[request.id].outputs:
        attempts.output("a", 0, output)
    steps = [each for each in attempts.outbox.take(1e9) if isinstance(each, m.Step)]
    deltas = [delta for step in steps for delta in step.deltas]
    return "".join(delta.text for delta in deltas), deltas[-1]


@pytest.mark.parametrize(
    ("assign", "follows"),
    [
        (resumed("", 0), True),
        (replace(resumed("", 0), prompt=m.TextPrompt("a")), True),
        (replace(resumed("", 0), prompt=m.ChatPrompt((m.ChatMessage("user", "a"),))), False),
        (resumed("ab", 2), False),  # of a text whose tokens are unknown the first are made anew
    ],
)
def test_whether_a_text_goes_on_from_its_prompt(assign: m.Assign, follows: bool) -> None:
    attempts = Attempts(1, {})
    attempts.assign(assign, 0.0)
    (request,) = attempts.prepared("a", Prepared((1,), ""))
    assert request.follows is follows


@settings(max_examples=12, deadline=None)
@given(st.integers(1, LIMIT), st.integers(-2, 2))
def test_a_site_of_our_own_goes_on_after_a_text(cut: int, miscounted: int) -> None:
    """`miscounted`: another server's tokens are not ours, and its count is the one that goes on."""
    text, tokens = whole().text[:cut], max(1, cut + miscounted)
    added, last = at_a_site(resumed(text, tokens))
    assert last.completion_tokens == max(LIMIT, tokens)
    assert text + added == whole().text[: cut + max(0, LIMIT - tokens)]
    assert last.finish == "length"


@settings(max_examples=12, deadline=None)
@given(st.text("the answer né", min_size=1, max_size=20))
def test_a_text_that_was_tokenized_otherwise_is_gone_on_from_and_counted_alike(text: str) -> None:
    added, last = at_a_site(resumed(text, 30))
    assert (len(added), last.completion_tokens, last.finish) == (LIMIT - 30, LIMIT, "length")


@settings(max_examples=8, deadline=None)
@given(st.integers(1, LIMIT - 1))
def test_a_server_that_reads_the_text_behind_the_prompt_goes_on_as_it_would_have(cut: int) -> None:
    prompt, text = tokenizer().decode(PROMPT), whole().text[:cut]
    read = continue_from_text(replace(resumed(text, cut), prompt=m.TextPrompt(prompt)), VLLM)
    assert read.prompt == m.TextPrompt(prompt + text)
    engine = engine_for(family("gpt2").served)
    ids = tokenizer().encode(prompt + text, add_special_tokens=False)
    engine.submit(greedy("rest", ids, read.sampling.max_tokens or 0, logit_bias=BIAS))
    assert text + drain(engine)["rest"].text == whole().text[:LIMIT]


def test_a_stop_string_across_the_seam_is_honoured() -> None:
    text = whole().text
    stop = text[2:6]
    assert text.index(stop) == 2
    for cut in range(1, 6):
        sampling = Sampling(max_tokens=LIMIT, temperature=0.0, logit_bias=BIAS, stop=(stop,))
        added, last = at_a_site(resumed(text[:cut], cut, sampling=sampling))
        assert (text[:cut] + added, last.finish) == (text[: max(2, cut)], "stop")


def test_an_answer_in_json_goes_on_after_its_text_and_only_after_what_it_may_be() -> None:
    served = family("gpt2").served
    grammars = Grammars(served.tokenizer, served.vocab_size, served.eos_token_ids or (0,))
    one = {"type": "object", "properties": {"x": {"enum": [17]}}, "required": ["x"]}
    schema = json.dumps({**one, "additionalProperties": False})
    added, last = at_a_site(resumed('{"x": 1', 5, guided_json=schema, sampling=PLAIN), grammars)
    assert (added, last.finish) == ("7}", "stop")
    with pytest.raises(RequestRejected, match="not what was asked for"):
        at_a_site(resumed('{"y": 1', 5, guided_json=schema, sampling=PLAIN), grammars)


def test_a_text_that_the_tokenizer_says_otherwise_is_refused() -> None:
    with pytest.raises(NotServed, match="tokenizer does not say"):
        at_a_site(resumed("the <end> of it", 5))
