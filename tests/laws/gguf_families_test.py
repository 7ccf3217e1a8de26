"""The model served from a GGUF file is the one it was written from: same logits, same greedy tokens."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from site_engine.core.request import Request, Sampling
from site_engine.engine.build import packed_engine
from site_engine.engine.settings import EngineSettings
from site_engine.errors import ModelNotSupported
from site_engine.model.gguf import FAMILIES
from site_engine.model.loader import load
from tests.support.model_families import random_model
from tests.support.tiny_gguf import tiny_sizes, write_gguf

pytestmark = pytest.mark.slow
torch.set_num_threads(1)
PROMPTS = ([5, 6, 7], list(range(30, 70)), [9])
ANSWER_TOKENS = 12
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**tiny_sizes()),
    "qwen2": lambda: transformers.Qwen2Config(**tiny_sizes(tie_word_embeddings=True)),
    "qwen3": lambda: transformers.Qwen3Config(**tiny_sizes(head_dim=32)),
    "gemma2": lambda: transformers.Gemma2Config(**tiny_sizes(head_dim=32, sliding_window=16)),
    "gemma3": lambda: transformers.Gemma3TextConfig(**tiny_sizes(head_dim=32, sliding_window=16)),
    "phi3": lambda: transformers.Phi3Config(**tiny_sizes(sliding_window=16)),
    "starcoder2": lambda: transformers.Starcoder2Config(**tiny_sizes(tie_word_embeddings=True)),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def greedy(path: Path) -> list[list[int]]:
    """Serve the prompts together and return their tokens."""
    loaded = load(str(path))
    engine = packed_engine(loaded, EngineSettings(slots=4, kv_tokens=1024), time.monotonic)
    for number, prompt in enumerate(PROMPTS):
        sampling = Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        engine.submit(Request(str(number), prompt, sampling))
    answers: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    return [answers[str(number)] for number in range(len(PROMPTS))]


def expected(model: Any) -> list[list[int]]:
    """Return the tokens of each prompt, generated alone by transformers."""
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=ANSWER_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_the_model_that_was_written(family: str, tmp_path: Path) -> None:
    model = random_model(CONFIGS[family]())
    assert greedy(write_gguf(tmp_path / "tiny.gguf", model, family)) == expected(model)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16", "BF16"])
def test_quantized_weights_are_unpacked_exactly(kind: str, tmp_path: Path) -> None:
    """The reference is the model with its weights rounded as the format rounds them."""
    quantization = gguf.GGMLQuantizationType[kind]
    model = random_model(CONFIGS["llama"]())
    path = write_gguf(tmp_path / "tiny.gguf", model, "llama", kind=quantization)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                rounded = gguf.dequantize(gguf.quantize(parameter.numpy(), quantization), quantization)
                parameter.copy_(torch.from_numpy(rounded.astype(np.float32)))
    assert greedy(path) == expected(model)


def test_positions_scaled_as_by_llama_3_are_scaled(tmp_path: Path) -> None:
    """The format has the factors of the scaling as a tensor, which transformers passes over."""
    sizes = tiny_sizes(head_dim=32, rope_parameters=dict(LLAMA3))
    model = random_model(transformers.LlamaConfig(**sizes))
    plain = 500_000.0 ** -(torch.arange(0, 32, 2) / 32)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    path = write_gguf(tmp_path / "tiny.gguf", model, "llama", tensors={"rope_freqs.weight": factors})
    assert greedy(path) == expected(model)
    served = load(str(path)).model.model.rotary_emb.inv_freq  # short contexts hardly see the difference
    assert torch.allclose(served, model.model.rotary_emb.inv_freq)
    assert not torch.allclose(served, plain)


def test_positions_scaled_linearly_are_scaled(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    model = random_model(transformers.LlamaConfig(**tiny_sizes(rope_parameters=rope)))
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = write_gguf(tmp_path / "tiny.gguf", model, "llama", metadata=metadata)
    assert greedy(path) == expected(model)


def test_positions_scaled_by_another_rule_are_refused(tmp_path: Path) -> None:
    factors = np.linspace(1.0, 3.0, 8, dtype=np.float32)
    path = write_gguf(
        tmp_path / "tiny.gguf",
        random_model(CONFIGS["llama"]()),
        "llama",
        tensors={"rope_freqs.weight": factors},
    )
    with pytest.raises(ModelNotSupported, match="by a rule that is not understood"):
        load(str(path))
