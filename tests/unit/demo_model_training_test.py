"""The training script, from rows to a folder that loads, on a few made-up rows."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from mico.demo_model import train
from mico.demo_model.card import card
from mico.demo_model.corpus import (
    ANSWER,
    PROMPT,
    UNSCORED,
    Document,
    Made,
    as_chat,
    conversations,
    encode,
    load_corpus,
    make_corpus,
    pack,
)
from mico.demo_model.data import Exchange
from mico.demo_model.functions import draw_chat
from mico.demo_model.network import Batches, model_config
from mico.demo_model.tokens import CONTEXT_TOKENS, train_tokenizer
from mico.demo_model.train import WARM_UP_SHARE, Plan, fit, learning_rate, main

pytestmark = pytest.mark.slow

torch.set_num_threads(1)  # two threads on a busy machine wait for each other far longer than they compute

EXCHANGES = [
    Exchange("self_instruct_seed", f"p{i:08x}", f"What is {i} and {i}?", f"It is {2 * i}.") for i in range(40)
]

MEASURED = {
    "temperature": 0.7,
    "prompts": 1,
    "ended_share": 1.0,
    "looping_share": 0.25,
    "mean_tokens": 3.0,
    "percentile_tokens": {10: 3.0},
    "reference_mean_tokens": 4.0,
    "spearman_with_reference": 0.5,
    "answers": [{"prompt": "Two\nlines", "answer": "It is 6.", "tokens": 3}],
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer([text for each in EXCHANGES for text in (each.prompt, each.answer)], 300)


def test_encoding_equals_the_chat_template(tokenizer: Any) -> None:
    (document,) = encode(tokenizer, [as_chat(EXCHANGES[:2], "Be brief.")])
    messages = [{"role": "system", "content": "Be brief."}]
    for exchange in EXCHANGES[:2]:
        messages.append({"role": "user", "content": exchange.prompt})
        messages.append({"role": "assistant", "content": exchange.answer})
    assert document.tokens == tokenizer.apply_chat_template(messages, return_dict=False)


def test_answers_and_their_ends_are_scored_as_answers(tokenizer: Any) -> None:
    (document,) = encode(tokenizer, [as_chat([EXCHANGES[3]], "Be brief.")])
    scored = {
        score: tokenizer.decode([t for t, s in zip(*document, strict=True) if s == score])
        for score in (UNSCORED, PROMPT, ANSWER)
    }
    assert scored == {
        UNSCORED: "<|system|>Be brief.<|end|><|user|><|end|><|assistant|>",
        PROMPT: "What is 3 and 3?",
        ANSWER: "It is 6.<|end|>",
    }


def test_conversations_use_every_exchange_once() -> None:
    made = list(conversations(EXCHANGES, random.Random(1)))
    turns = [[each for each in chat.messages if each["role"] == "user"] for chat in made]
    assert [each["content"] for turn in turns for each in turn] == [each.prompt for each in EXCHANGES]
    assert {len(turn) for turn in turns} == {1, 2, 3}


def test_calls_are_scored_as_answers_and_results_as_prompts(tokenizer: Any) -> None:
    rng = random.Random(2)
    chat = next(each for each in iter(lambda: draw_chat(rng), None) if len(each.messages) == 4)
    (document,) = encode(tokenizer, [chat])
    answers = tokenizer.decode([t for t, s in zip(*document, strict=True) if s == ANSWER])
    call = chat.messages[1]["tool_calls"][0]["function"]
    written = json.dumps({"name": call["name"], "arguments": call["arguments"]}, ensure_ascii=False)
    assert answers == f"<tool_call>\n{written}\n</tool_call><|end|>{chat.messages[3]['content']}<|end|>"
    prompts = tokenizer.decode([t for t, s in zip(*document, strict=True) if s == PROMPT])
    assert prompts.startswith(chat.messages[0]["content"] + "<tool_response>")


def test_packing_keeps_every_document_whole() -> None:
    rng = random.Random(3)
    sizes = [rng.randint(1, CONTEXT_TOKENS) for _ in range(200)]
    documents = [Document([i + 1] * size, [ANSWER] * size) for i, size in enumerate(sizes)]
    windows = pack(documents, CONTEXT_TOKENS)
    for i, size in enumerate(sizes):
        rows, columns = np.nonzero(windows.tokens == i + 1)
        assert len(set(rows)) == 1
        assert columns.tolist() == list(range(columns[0], columns[0] + size))
        assert len(set(windows.documents[rows[0], columns])) == 1
    assert ((windows.documents > 0) == (windows.tokens > 0)).all()


def test_only_the_end_of_a_document_longer_than_a_window_is_lost() -> None:
    windows = pack([Document(list(range(1, 21)), [ANSWER] * 20)], 16)
    assert windows.tokens.tolist() == [list(range(1, 17))]


def test_positions_begin_anew_with_each_document() -> None:
    windows = pack([Document([7] * 3, [ANSWER] * 3), Document([8] * 2, [PROMPT] * 2)], 16)
    batches = Batches(windows, "cpu")
    assert batches.positions[0, :7].tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert batches.weights[0, :7].tolist() == pytest.approx([1, 1, 1, 0.2, 0.2, 0, 0])


def test_learning_rate_rises_then_falls_to_zero() -> None:
    plan = Plan(steps=100)
    rates = [learning_rate(plan, share / 1000) for share in range(1001)]
    top = round(WARM_UP_SHARE * 1000)
    assert rates[top] == max(rates) == pytest.approx(plan.peak_learning_rate)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] == 0


@pytest.fixture
def corpus_folder(tmp_path: Path) -> Path:
    rows = [
        {"source": e.source, "prompt_id": e.prompt_id, "prompt": e.prompt, "answer": e.answer}
        for e in EXCHANGES
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    make_corpus([data], tmp_path / "corpus", vocabulary=300, seed=1, context=128, made=Made(20, 20))
    return tmp_path / "corpus"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train a model of the same kind that is small."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    monkeypatch.setattr(
        train, "model_config", lambda tokenizer: LlamaConfig(**model_config(tokenizer).to_dict() | sizes)
    )


@pytest.mark.usefixtures("small")
def test_a_run_repeats_exactly(corpus_folder: Path) -> None:
    corpus, plan = load_corpus(corpus_folder), Plan(steps=2, batch_windows=2)
    once, again = (fit(corpus, plan)[0].state_dict() for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)


@pytest.mark.usefixtures("small")
def test_three_steps_make_a_folder_that_loads(tmp_path: Path, corpus_folder: Path) -> None:
    out = tmp_path / "model"
    main(f"--corpus {corpus_folder} --out {out} --steps 3 --batch-windows 2 --device cpu".split())
    model: Any = AutoModelForCausalLM.from_pretrained(out)
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    training = json.loads((out / "training.json").read_text(encoding="utf-8"))
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == len(tokenizer)
    assert training["steps"] == 3
    assert training["held_out_loss"] < np.log(len(tokenizer))  # better than knowing nothing
    figures = {"runs": [MEASURED], "nats_per_character": 0.5, "calls": {"known": 0.9, "invented": 1.0}}
    before = {
        "runs": [{**MEASURED, "ended_share": 0.5}],
        "nats_per_character": 0.7,
        "calls": {"known": 0.0, "invented": 0.0},
    }
    text = card(training, {"this model": figures, "0.1.0's": before}, exchanges="8 answers", note="")
    assert "| 0.7 | 1 | 100.0% | 25.0% | 3 | 3 | 0.50 |" in text
    assert "| | this model | 0.1.0's |\n|---|---|---|\n| ended by itself, greedy | 100.0% | 50.0% |" in text
    assert "| right calls of hand-written functions | 90.0% | 0.0% |" in text
    assert "    Two\n    lines" in text
