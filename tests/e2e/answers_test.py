"""Answers of a running federation: complete, from every site, in the model's own words."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion

from tests.support.local_federation import LocalFederation, eventually, mico

pytestmark = pytest.mark.e2e

TOPICS = ("the sky", "bread", "rivers", "clocks", "winter", "glass", "maps", "salt")
FORMS = ("Why is there {}?", "Write a line about {}.", "Explain {} to a child, please, and be brief.")
PROMPTS = [form.format(topic) for topic in TOPICS for form in FORMS]
AT_ONCE = 24
LONGEST_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Answer:
    """Two answers are equal when they say the same, whichever query they belong to."""

    query_id: str = field(compare=False)
    prompt: str
    text: str
    finish: str
    prompt_tokens: int
    completion_tokens: int


def request(federation: LocalFederation, prompt: str) -> dict[str, Any]:
    return {
        "model": federation.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_completion_tokens": LONGEST_TOKENS,
        "temperature": 0,
    }


def whole(sdk: OpenAI, federation: LocalFederation, prompt: str) -> Answer:
    raw = sdk.chat.completions.with_raw_response.create(**request(federation, prompt))
    body = ChatCompletion.model_validate_json(raw.text)
    (choice,) = body.choices
    assert body.usage is not None
    assert body.usage.total_tokens == body.usage.prompt_tokens + body.usage.completion_tokens
    text, usage = choice.message.content or "", body.usage
    return Answer(
        query_of(body.id), prompt, text, choice.finish_reason, usage.prompt_tokens, usage.completion_tokens
    )


def streamed(sdk: OpenAI, federation: LocalFederation, prompt: str) -> Answer:
    parts: list[str] = []
    finishes: list[str] = []
    usages: list[Any] = []
    ids: set[str] = set()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with sdk.chat.completions.create(**request(federation, prompt), **options) as chunks:
        for chunk in chunks:
            ids.add(chunk.id)
            parts += [choice.delta.content or "" for choice in chunk.choices]
            finishes += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
            usages += [chunk.usage] if chunk.usage else []
    (finish,), (usage,) = finishes, usages
    return Answer(
        query_of(ids.pop()), prompt, "".join(parts), finish, usage.prompt_tokens, usage.completion_tokens
    )


def query_of(answer_id: str) -> str:
    return answer_id.removeprefix("chatcmpl-")


@pytest.fixture(scope="module")
def answers(federation: LocalFederation) -> dict[str, list[Answer]]:
    """Every prompt, twenty-four at a time, whole and streamed mixed; by way of asking."""
    federation.wait_until_ready()
    return asked_all(federation)


def asked_all(federation: LocalFederation) -> dict[str, list[Answer]]:
    with federation.sdk() as sdk, ThreadPoolExecutor(AT_ONCE) as pool:
        asked = [(way, prompt) for prompt in PROMPTS for way in (whole, streamed)]
        told = list(pool.map(lambda each: (each[0].__name__, each[0](sdk, federation, each[1])), asked))
    return {name: [answer for way, answer in told if way == name] for name in ("whole", "streamed")}


def test_every_query_is_answered_and_a_stream_says_the_same_as_a_whole_answer(
    answers: dict[str, list[Answer]],
) -> None:
    assert len(answers["whole"]) == len(PROMPTS)
    assert answers["whole"] == answers["streamed"]


def test_greedy_text_is_what_transformers_generates_alone(
    federation: LocalFederation, answers: dict[str, list[Answer]]
) -> None:
    expected = generated_alone(federation.model_folder)
    assert {answer.prompt: answer.text for answer in answers["whole"]} == expected


def test_every_query_is_recorded_once_with_what_it_used_and_every_site_took_part(
    federation: LocalFederation, answers: dict[str, list[Answer]]
) -> None:
    told = {answer.query_id: answer for way in answers.values() for answer in way}
    records = federation.recorded_once(list(told))
    for query_id, record in records.items():
        used = (record.usage.prompt_tokens, record.usage.completion_tokens)
        assert used == (told[query_id].prompt_tokens, told[query_id].completion_tokens)
    took_part = {record.usage.site for record in records.values()}
    sites = {site.name for site in federation.running.sites}

    def all_took_part() -> bool:
        if sites - took_part:  # one was late with its reports for all that time
            federation.wait_until_ready()
            ids = [answer.query_id for way in asked_all(federation).values() for answer in way]
            took_part.update(record.usage.site for record in federation.recorded_once(ids).values())
        return took_part >= sites

    eventually(all_took_part, "every site answers")


def test_nothing_is_held_when_the_work_is_done(
    federation: LocalFederation, answers: dict[str, list[Answer]]
) -> None:
    assert answers
    federation.wait_until_idle()


def test_one_question_from_the_command_line(federation: LocalFederation) -> None:
    said = mico(federation.folder.path, "chat", "-q", PROMPTS[0], "--temperature", "0", "--max-tokens", "4")
    with federation.sdk() as sdk:
        asked = {**request(federation, PROMPTS[0]), "max_completion_tokens": 4}
        text = sdk.chat.completions.create(**asked).choices[0].message.content
    assert said == f"{text}\n"


def generated_alone(folder: Path) -> dict[str, str]:
    """The model's own greedy answers in float32, one prompt at a time, by plain transformers."""
    import torch
    import transformers

    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = {}
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            out = model.generate(**ids, max_new_tokens=LONGEST_TOKENS, do_sample=False)
        texts[prompt] = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts
