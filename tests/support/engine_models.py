"""Tiny random models of many families for the engine's laws, each beside an untouched copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from site_engine.core.remaining_curve import RemainingCurve, RemainingPoint
from site_engine.core.request import Output, Request, Sampling
from site_engine.engine.build import packed_engine
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.model import certify
from site_engine.model.loader import LoadedModel, from_model
from tests.support.model_families import random_model

VOCAB = 320
CONTEXT = 192
WINDOW = 16
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
_NO_SPECIALS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}

FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, **_NO_SPECIALS
    ),
    "llama": lambda: transformers.LlamaConfig(**_SIZES, **_NO_SPECIALS),
    "qwen2": lambda: transformers.Qwen2Config(**_SIZES, **_NO_SPECIALS),
    "mistral": lambda: transformers.MistralConfig(**_SIZES, **_NO_SPECIALS, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **_SIZES, **_NO_SPECIALS, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8
    ),
}

TOO_SHORT = RemainingCurve((RemainingPoint(0, 1.0, 1),))
"""A forecast that every answer outgrows, so that requests are preempted."""
SHAPES: list[dict[str, Any]] = [
    {"page_size": 1, "slots": 8, "token_budget": 64},
    {"page_size": 16, "slots": 8, "token_budget": 10},
    {"page_size": 4, "slots": 6, "token_budget": 32, "kv_tokens": 176},
]
"""Engines in which pages lie otherwise; the last one has no room for all."""


@dataclass(frozen=True, slots=True)
class Family:
    served: LoadedModel
    plain: Any

    def generate(
        self, prompt: list[int], max_tokens: int, eos: int | None = None, *, guess: list[int] | None = None
    ) -> list[int]:
        """Return the greedy answer of transformers to the prompt alone."""
        return greedy_answer(self.plain, prompt, max_tokens, eos, guess=guess)

    def answers(self, requests: list[tuple[list[int], int]], guesses: list[list[int]]) -> list[list[int]]:
        """Return what transformers answers to each request alone; right guesses take one pass."""
        return [
            self.generate(prompt, length, guess=guess)
            for (prompt, length), guess in zip(requests, guesses, strict=True)
        ]


def greedy_answer(
    model: Any,
    prompt: list[int],
    max_tokens: int,
    eos: int | None = None,
    *,
    guess: list[int] | None = None,
) -> list[int]:
    """Return the greedy answer of a model of transformers to the prompt alone.

    One pass over a right guess takes the place of a pass for each token.
    """
    if guess and eos is None and len(guess) == max_tokens and is_greedy(model, prompt, guess):
        return guess
    with torch.no_grad():
        whole = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=0,
        )
    answer: list[int] = whole[0, len(prompt) :].tolist()
    return answer


def is_greedy(model: Any, prompt: list[int], answer: list[int]) -> bool:
    """Say if each token of an answer is the likeliest after all before it, to a model of transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer[:-1]])).logits
    likeliest: list[int] = logits[0, len(prompt) - 1 :].argmax(-1).tolist()
    return likeliest == answer


@cache
def family(name: str) -> Family:
    plain = random_model(FAMILIES[name]())
    return Family(from_model(copy.deepcopy(plain), tokenizer(), name=name, eos_token_ids=()), plain)


@cache
def tokenizer() -> Any:
    """A small byte-level tokenizer: 256 bytes, some merges, and an end-of-text token that is no text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    text = ["the answer is 42, née Zoë", "the other answer — Ω ≈ 3.14", "日本語のテキスト", "👩‍🚀 🦀 the end"]
    made.train_from_iterator(
        text * 4,
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=["<end>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


class Ticks:
    """A clock that moves by a fixed amount each time it is read."""

    def __init__(self, tick_s: float = 0.001) -> None:
        self.now_s = 0.0
        self._tick_s = tick_s

    def __call__(self) -> float:
        self.now_s += self._tick_s
        return self.now_s


def engine_for(model: LoadedModel, **settings: Any) -> SiteEngine:
    chosen = {
        "slots": 8,
        "token_budget": 64,
        "page_size": 4,
        "kv_tokens": 2048,
        "debug_poison": True,
    } | settings
    return packed_engine(model, EngineSettings(**chosen), Ticks())


def greedy(request_id: str, prompt: list[int], max_tokens: int, **sampling: Any) -> Request:
    return Request(request_id, prompt, Sampling(max_tokens=max_tokens, temperature=0.0, **sampling))


@dataclass(slots=True)
class Collected:
    """Everything one request gave, joined."""

    token_ids: list[int]
    text: str
    last: Output | None
    outputs: list[Output]


def drain(
    engine: SiteEngine, collected: dict[str, Collected] | None = None, steps: int = 10_000
) -> dict[str, Collected]:
    """Step until nothing is left to do; fails when the engine stalls."""
    collected = {} if collected is None else collected
    for _ in range(steps):
        if not engine.has_work:
            return collected
        gather(engine.step(), collected)
    raise AssertionError(f"still busy after {steps} steps")


def gather(outputs: list[Output], collected: dict[str, Collected]) -> None:
    for output in outputs:
        one = collected.setdefault(output.request_id, Collected([], "", None, []))
        assert one.last is None or one.last.finish is None, "an output after the last one"
        one.token_ids += output.token_ids
        one.text += output.text
        one.last = output
        one.outputs.append(output)


def assert_idle(engine: SiteEngine) -> None:
    """Nothing is held by anyone."""
    load = engine.load()
    assert (load.running, load.pending, load.kv_reserved_tokens, load.unread_tokens) == (0, 0, 0, 0)
    assert (load.token_load, load.pending_prompt_tokens, load.pending_response_tokens) == (0.0, 0, 0.0)
    assert not engine.has_work


def uncertified() -> Any:
    """Build engines on a device without the comparison of their logits, for tests that compare answers.

    It takes seconds where kernels are interpreted, and has tests of its own.
    """
    return mock.patch.object(certify, "runner_difference", return_value=0.0)
