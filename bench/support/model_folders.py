"""Model folders with random weights and a byte-level tokenizer, for servers that load a model from disk."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END = "<|endoftext|>"
"""The name that the tokenizers of some families add if it is absent."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
LAYERS_PER_FILE = 8
SPREAD, BIAS_SPREAD = 0.02, 0.1


def write_model(shape: Path, folder: Path, texts: Iterable[str]) -> None:
    """Write a model in the shape of `shape`/config.json to `folder`, with a tokenizer trained on `texts`.

    Wait until the disk has it: a server appends to its files more slowly beside 16 GB that are being written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(shape / "config.json", folder / "config.json")
    config = json.loads((shape / "config.json").read_text())
    _write_tokenizer(folder, texts, config["vocab_size"], config["eos_token_id"])
    _write_weights(folder, config)
    os.sync()


def _write_tokenizer(folder: Path, texts: Iterable[str], vocab_size: int, end_id: int) -> None:
    """Train a byte-level BPE; pieces that no text has fill the vocabulary, so that every id decodes."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    bytes_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=end_id, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    described = json.loads(tokenizer.to_str())
    vocabulary = described["model"]["vocab"]
    for number in range(len(vocabulary), vocab_size):
        vocabulary[END if number == end_id else f"Ġpiece{number}"] = number
    end = {"id": end_id, "content": END, "special": True, "normalized": False}
    described["added_tokens"] = [{**end, "single_word": False, "lstrip": False, "rstrip": False}]
    (folder / "tokenizer.json").write_text(json.dumps(described))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _write_weights(folder: Path, config: dict[str, Any]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*size: int, spread: float = SPREAD) -> torch.Tensor:
        made = torch.empty(*size, dtype=torch.bfloat16, device=device)
        return made.normal_(0, spread, generator=generator).cpu()

    def ones() -> torch.Tensor:
        return torch.ones(config["hidden_size"], dtype=torch.bfloat16)

    layers, total_bytes = config["num_hidden_layers"], 0
    where: dict[str, str] = {}
    files = -(-layers // LAYERS_PER_FILE)
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        if number == 0:
            tensors["model.embed_tokens.weight"] = drawn(config["vocab_size"], config["hidden_size"])
        if number == files - 1:
            tensors["model.norm.weight"] = ones()
            if not config["tie_word_embeddings"]:
                tensors["lm_head.weight"] = drawn(config["vocab_size"], config["hidden_size"])
        for layer in range(number * LAYERS_PER_FILE, min(layers, (number + 1) * LAYERS_PER_FILE)):
            start = f"model.layers.{layer}."
            tensors |= {f"{start}{norm}_layernorm.weight": ones() for norm in ("input", "post_attention")}
            for key, size in _products(config).items():
                tensors[f"{start}{key}.weight"] = drawn(*size)
                if config["model_type"] == "qwen2" and key[-6:] in ("q_proj", "k_proj", "v_proj"):
                    tensors[f"{start}{key}.bias"] = drawn(size[0], spread=BIAS_SPREAD)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, name)
        total_bytes += sum(each.numel() * each.element_size() for each in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _products(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the (outputs, inputs) of a layer's linear products."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    return {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
