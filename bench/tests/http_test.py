"""Phases of the benchmark over HTTP, and the figures that it makes of streams."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.http import beside_later, forecasts_by, load_of
from bench.support.http_arrivals import Load, Question, Stream, Target, request, summary


@pytest.mark.parametrize(
    ("phase", "per_s", "clients", "chat", "fields"),
    [
        ("30/s", 30.0, 0, False, set()),
        ("0.5/s+chat", 0.5, 0, True, set()),
        ("256c+penalty", 0.0, 256, False, {"presence_penalty", "frequency_penalty"}),
        ("30/s+schema", 30.0, 0, True, {"ignore_eos", "response_format"}),
        ("30/s+chat+logprobs", 30.0, 0, True, {"logprobs", "top_logprobs"}),
        ("30/s+first", 30.0, 0, False, set()),
        ("256c+guessed", 0.0, 256, False, {"ignore_eos"}),
    ],
)
def test_a_phase_names_its_load(phase: str, per_s: float, clients: int, chat: bool, fields: set[str]) -> None:
    load = load_of(phase, 5.0)
    assert (load.per_s, load.clients, load.chat, set(load.extra)) == (per_s, clients, chat, fields)


@pytest.mark.parametrize("phase", ["", "30", "s", "30/s+tools", "30/s+penalty+schema"])
def test_an_unknown_phase_is_refused(phase: str) -> None:
    with pytest.raises(ValueError, match="no phase"):
        load_of(phase, 5.0)


def test_one_request_of_twenty_is_special() -> None:
    target, load = Target(80, "key", "m"), Load(per_s=1.0, extra={"presence_penalty": 0.5})
    raw = [request(target, Question("Hi", 5), load, number) for number in range(40)]
    bodies = [json.loads(each.partition(b"\r\n\r\n")[2]) for each in raw]
    assert [number for number, body in enumerate(bodies) if "presence_penalty" in body] == [0, 20]


def test_figures_are_of_whole_streams() -> None:
    stream = Stream(sent_s=1.0)
    for at_s, text in ((1.5, "a"), (1.6, "b"), (1.8, "c")):
        stream.event(json.dumps({"choices": [{"text": text}]}).encode(), at_s)
    stream.event(b'{"choices": [], "usage": {"completion_tokens": 3}}', 1.8)
    stream.event(b"[DONE]", 1.9)
    cut = Stream(sent_s=1.0, first_s=1.1)
    found = summary([stream, cut])
    assert (found["streams"], found["whole"], found["errors"]) == (2, 1, {"no end": 1})
    assert found["ttft_ms"]["p50"] == 500.0
    assert found["tpot_ms"]["p50"] == 200.0
    assert found["longest_gap_ms"]["p50"] == 200.0
    assert found["tokens_per_s"] == 3


def test_the_length_of_a_guessed_answer_is_told_in_no_request() -> None:
    target, load = Target(80, "key", "m"), load_of("256c+guessed", 5.0)
    bodies = [
        json.loads(request(target, Question("Hi", 5), load, number).partition(b"\r\n\r\n")[2])
        for number in range(3)
    ]
    assert [body["ignore_eos"] for body in bodies] == [False] * 3


def test_gaps_of_the_first_queries_are_compared_with_those_after_them() -> None:
    first, later = {"largest_gaps_ms": [900.0, 41.0, 39.0]}, {"itl_ms": {"p50": 6.0, "p99": 13.3}}
    assert beside_later(first, later) == {"limit_ms": 39.9, "gaps_over": 2, "largest_ms": [900.0, 41.0]}


def test_an_error_in_a_stream_is_no_whole_answer() -> None:
    stream = Stream(sent_s=1.0)
    stream.event(b'{"error": {"message": "gone"}}', 1.5)
    stream.event(b"[DONE]", 1.6)
    assert "gone" in stream.error


def test_a_run_tells_whether_the_model_forecast(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    assert forecasts_by(log) == ""
    log.write_text('{"message": "ready"}\n')
    assert forecasts_by(log) == "the model"
    log.write_text('{"message": "no forecaster could be loaded; forecasts come from histogram"}\n')
    assert forecasts_by(log) == "past answers"
