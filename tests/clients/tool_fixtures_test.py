"""The 469 answers that canitoolcall 0.1.1 recorded, read as this project reads them: `./dev test --clients`.

Of each it says which calls, reasoning and text are right. They are read from the text with all special tokens
in it. An answer that was cut within a call has that call as far as it came, with the finish reason `length`;
canitoolcall wants no call there, so for these it counts only that what came is not taken for a whole call.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from site_engine.core.request import merge_tool_calls
from site_engine.messages import Tools
from site_engine.text import tool_format as forms
from site_engine.text.parsed_answer import ParsedAnswer
from site_engine.text.thinking import ThinkingDecoder, marks_of, thinking_after
from site_engine.text.tool_call_parser import answer_parser
from site_engine.text.tool_format import AnswerFormat, Format

PACKAGE = Path(os.environ.get("MICO_CLIENTS", "/nowhere")) / "canitoolcall==0.1.1"
FORMATS: dict[str, dict[str, AnswerFormat]] = {
    "qwen3-hermes": {"Qwen/": forms.HERMES},
    "qwen3-xml": {"Qwen/": forms.QWEN_XML},
    "glm": {"zai-org/": forms.GLM},
    "mistral": {"mistralai/Mistral-7B-Instruct-v0.3": forms.MISTRAL, "mistralai/": forms.MISTRAL_ARGS},
    "gpt-oss": {"openai/": forms.HARMONY},
    "llama": {"meta-llama/Llama-3": forms.LLAMA},
}
"""The families that are read, each by the beginnings of its models' names. Others are refused `tools`."""
FIXTURES = 469
LEAST_RIGHT = 0.95
COMPLETE_THOUGH_CUT = {
    "qwen3-hermes/vllm-invalid-json-missing-brace"
}  # lacks nothing but the call's own brace
THOUGHTS = {"mistral": "[/THINK]", "mistralai/Magistral-Small-2506": "</think>"}
"""What the chat templates show that ends a thought, by family and by model; `</think>` everywhere else."""

pytestmark = pytest.mark.skipif(
    "MICO_CLIENTS" not in os.environ, reason="canitoolcall is not installed: ./dev test --clients"
)


class Read(NamedTuple):
    reasoning: str
    text: str
    calls: tuple[tuple[str, str], ...]


def recorded() -> Iterator[dict[str, Any]]:
    """Every recorded answer, with `prompt`: the end of the prompt before it."""
    [folder] = PACKAGE.glob("lib/python3*/site-packages/canitoolcall/_data/fixtures")
    for family in sorted(folder.glob("*/family.json")):
        models = {each["repo"]: each for each in json.loads(family.read_text())["reference_models"]}
        for file in sorted(family.parent.glob("*.jsonl")):
            for line in file.read_text().splitlines():
                fixture = json.loads(line)
                usual = models.get(fixture["models"][0], {}).get("default_generation_prompt", "")
                yield {**fixture, "prompt": fixture.get("generation_prompt") or usual}


def form_of(fixture: dict[str, Any]) -> AnswerFormat | None:
    known = FORMATS.get(fixture["family"], {})
    return next((form for begin, form in known.items() if fixture["models"][0].startswith(begin)), None)


class Parts:
    """A decoder whose token ids are places in a list of texts."""

    def __init__(self, parts: list[str]) -> None:
        self._parts = parts

    def push(self, token_id: int) -> str:
        return self._parts[token_id]


def split_reasoning(form: AnswerFormat, fixture: dict[str, Any], parts: list[str]) -> tuple[str, list[str]]:
    """What was thought, and the parts of the text after it."""
    shown = THOUGHTS.get(fixture["models"][0]) or THOUGHTS.get(fixture["family"], "</think>")
    marks = marks_of(shown)
    assert marks is not None
    thinking = thinking_after(fixture["prompt"], marks)
    if thinking.closed or fixture["family"] == "gpt-oss":
        return "", parts
    call = form.ends_thought if isinstance(form, Format) else ""
    decoder = ThinkingDecoder(Parts(parts), thinking._replace(call=call))
    texts = [*map(decoder.push, range(len(parts))), decoder.end()]
    return decoder.take(), texts


def parts_of(answer: str, seed: int) -> list[str]:
    """The answer in one part, by characters, or in parts of random lengths."""
    if seed < 2:
        return [answer] if seed == 0 else list(answer)
    draw, parts = random.Random(seed), []
    while answer:
        length = draw.randint(1, 24)
        parts.append(answer[:length])
        answer = answer[length:]
    return parts


def read(form: AnswerFormat, fixture: dict[str, Any], seed: int) -> Read:
    reasoning, texts = split_reasoning(form, fixture, parts_of(fixture["raw_output"], seed))
    functions = Tools(tuple(fixture["tools"])).functions
    parser = answer_parser(form, functions, ParsedAnswer(single=False, new_id=str))
    heard = [*map(parser.feed, texts), parser.end()]
    calls = merge_tool_calls(call for each in heard for call in each.calls)
    text = "".join(each.text for each in heard)
    reasoning += "".join(each.reasoning for each in heard)
    return Read(reasoning.strip(), text.strip(), tuple((call.name, call.arguments) for call in calls))


def is_right(got: Read, expected: dict[str, Any]) -> bool:
    asked = [(call["name"], call["arguments"]) for call in expected["tool_calls"]]
    called = [(name, as_json(arguments)) for name, arguments in got.calls]
    told = (got.reasoning, got.text) == tuple(
        (expected[each] or "").strip() for each in ("reasoning_content", "content")
    )
    return told and json.dumps(called, sort_keys=True) == json.dumps(asked, sort_keys=True)


def as_json(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def test_every_answer_is_of_a_family_that_is_read_or_of_one_that_is_not() -> None:
    fixtures = list(recorded())
    assert len(fixtures) == FIXTURES
    unread = {fixture["family"] for fixture in fixtures if form_of(fixture) is None}
    assert unread == {"deepseek", "gemma4", "kimi", "llama"}
    pythonic = {fixture["models"][0] for fixture in fixtures if fixture["family"] == "llama"}
    assert {each for each in pythonic if not each.startswith("meta-llama/Llama-4")} == {
        "meta-llama/Llama-3.3-70B-Instruct"
    }


@pytest.mark.parametrize("family", FORMATS)
def test_recorded_answers_are_read_right_however_they_are_cut(family: str) -> None:
    right, wrong = 0, []
    for fixture in recorded():
        form = form_of(fixture)
        if fixture["family"] != family or form is None:
            continue
        whole, *others = (read(form, fixture, seed) for seed in range(6))
        assert all(each == whole for each in others), f"{fixture['id']} depends on how it is cut"
        if "expected" not in fixture:
            complete = whole.calls and isinstance(as_json(whole.calls[-1][1]), dict)
            assert not complete or fixture["id"] in COMPLETE_THOUGH_CUT, fixture["id"]
        elif is_right(whole, fixture["expected"]):
            right += 1
        else:
            wrong.append(fixture["id"])
    assert right >= LEAST_RIGHT * (right + len(wrong)), wrong
