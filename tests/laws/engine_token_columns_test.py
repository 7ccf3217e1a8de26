"""Outputs that are one token are in columns, those that say more are not, and the tokens are the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from site_engine.core.request import Output, Request, Sampling
from site_engine.core.step_outputs import StepOutputs
from site_engine.engine.engine import SiteEngine
from site_engine.text.detokenize import TokenNames
from site_engine.text.grammar import Grammars
from site_engine.text.tool_grammar import guided_source
from tests.support.engine_models import TOO_SHORT, drain, engine_for, family, greedy

torch.set_num_threads(1)

TOKENS = 12
SCHEMA = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 9, "maxItems": 9}


def asked(kind: str, tokens: int = TOKENS) -> Request:
    served = family("llama").served
    rules: dict[str, Any] = {"described": {"logprobs": 1}, "penalised": {"presence_penalty": 0.5}}.get(
        kind, {}
    )
    request = greedy(kind, [3, 2, 1], tokens, **rules)
    if kind == "guided":
        grammars = Grammars(served.tokenizer, served.vocab_size, served.eos_token_ids)
        source = guided_source(SCHEMA, None, None, grammars.literal)
        request.grammar = grammars.compile(source, "response_format")
        request.sampling = Sampling(max_tokens=100, temperature=0.0)
    return request


def without_text(**settings: Any) -> SiteEngine:
    served = replace(family("llama").served, vocabulary=TokenNames())
    return engine_for(served, **({"slots": 4, "kv_tokens": 512, "page_size": 4} | settings))


def outputs_of(engine: SiteEngine) -> tuple[dict[str, list[int]], dict[str, list[Output]]]:
    """Return the tokens of each request that are in columns, and its other outputs."""
    columns, others = dict[str, list[int]](), dict[str, list[Output]]()
    while engine.has_work:
        outputs = engine.step()
        if isinstance(outputs, StepOutputs):
            for request_id, token_id in zip(outputs.request_ids, outputs.token_ids, strict=True):
                columns.setdefault(request_id, []).append(token_id)
        for output in outputs.others if isinstance(outputs, StepOutputs) else outputs:
            others.setdefault(output.request_id, []).append(output)
    return columns, others


@pytest.mark.parametrize("kind", ["plain", "penalised", "guided"])
def test_all_tokens_but_the_first_and_the_last_are_in_columns(kind: str) -> None:
    engine = without_text()
    engine.submit(asked(kind))
    columns, others = outputs_of(engine)
    first, last = others[kind]
    assert first.timings is not None and first.finish is None
    assert last.timings is not None and last.finish is not None
    with_text = engine_for(family("llama").served, slots=4, kv_tokens=512, page_size=4)
    with_text.submit(asked(kind))
    assert [*first.token_ids, *columns[kind], *last.token_ids] == drain(with_text)[kind].token_ids


def test_tokens_with_log_probabilities_are_outputs_of_their_own() -> None:
    engine = without_text()
    for kind in ("plain", "described"):
        engine.submit(asked(kind))
    columns, others = outputs_of(engine)
    assert "described" not in columns and len(columns["plain"]) == TOKENS - 2
    assert [len(output.logprobs) for output in others["described"]] == [1] * TOKENS


def test_a_request_that_returns_tells_its_start_again() -> None:
    engine = without_text(slots=6, kv_tokens=96)
    for at in range(6):
        request = greedy(str(at), [7 * at + 1, 5, at + 2], 40)
        request.remaining = TOO_SHORT
        engine.submit(request)
    columns, others = outputs_of(engine)
    times = 0
    for at in range(6):
        last = others[str(at)][-1].timings
        assert last is not None
        starts = [output for output in others[str(at)][:-1] if output.timings is not None]
        assert len(starts) == 1 + last.preemptions
        assert len(columns[str(at)]) + len(others[str(at)]) == 40
        times += last.preemptions
    assert times > 0


def test_a_token_that_the_grammar_does_not_have_fails_the_request_at_once() -> None:
    engine = without_text()
    engine.submit(asked("guided"))
    engine.step()
    (request,) = engine._scheduler.running
    assert request.guide is not None
    take, wrong = request.guide.take, 5

    class Wrong:
        matcher, ended = request.guide.matcher, False

        @property
        def error(self) -> str:
            return request.guide.matcher.get_error() if request.guide is not None else ""

        def take(self, token_id: int) -> bool:
            return take(wrong)

    request.guide = Wrong()  # type: ignore[assignment]
    _, others = outputs_of(engine)
    (last,) = others["guided"]
    assert "the answer's grammar" in last.error and last.token_ids == ()
