"""A GGUF file is served as it is or refused with the reason, and a refused one leaves nothing behind."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from site_engine.errors import ModelNotSupported
from site_engine.model.cache import models_folder
from site_engine.model.gguf import check_room, converted
from site_engine.model.gguf_header import read_header
from site_engine.model.loader import load
from tests.support.model_families import random_model
from tests.support.tiny_gguf import VOCAB, WORDS, tiny_sizes, write_gguf

pytestmark = pytest.mark.slow
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return models_folder()


def left(cache: Path) -> list[Path]:
    return list(cache.rglob("*")) if cache.exists() else []


def llama(**others: Any) -> Any:
    return random_model(transformers.LlamaConfig(**tiny_sizes(**others)))


def test_the_header_says_what_was_written(tmp_path: Path) -> None:
    model = llama()
    header = read_header(write_gguf(tmp_path / "tiny.gguf", model, "llama"))
    assert header.family == "llama"
    assert header.elements == sum(parameter.numel() for parameter in model.parameters())
    assert header.metadata["tokenizer.ggml.tokens"] == WORDS
    assert header.metadata["llama.rope.freq_base"] == 10_000.0
    (embeddings,) = [tensor for tensor in header.tensors if tensor.name == "token_embd.weight"]
    assert embeddings.shape == (VOCAB, 64)


def test_a_file_is_served_under_its_name_and_ends_turns_as_its_template_does(tmp_path: Path) -> None:
    loaded = load(str(write_gguf(tmp_path / "tiny.gguf", llama(), "llama")))
    assert (loaded.name, loaded.context_tokens, loaded.vocab_size) == ("tiny", 256, VOCAB)
    assert loaded.eos_token_ids == (WORDS.index("<|im_end|>"),)
    chat = [{"role": "user", "content": "hello"}]
    ids = loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert [WORDS[number] for number in ids][:1] == ["<|im_start|>"]
    assert "hello" in [WORDS[number] for number in ids]


def test_a_turn_ends_though_the_file_names_another_end(tmp_path: Path) -> None:
    """Files of chat models may name the end of a text only; a turn ends with what the template writes."""
    path = write_gguf(
        tmp_path / "tiny.gguf",
        llama(eos_token_id=7),
        "llama",
        metadata={"tokenizer.ggml.eot_token_id": 9},
    )
    assert load(str(path)).eos_token_ids == (7, 9, WORDS.index("<|im_end|>"))


@pytest.mark.parametrize(("split", "parts"), [("smollm", ["ĠĠ", "1", "2"]), ("gpt-2", ["Ġ", "Ġ12"])])
def test_a_text_is_split_as_the_file_says(split: str, parts: list[str], tmp_path: Path) -> None:
    tokenizer = load(str(write_gguf(tmp_path / "tiny.gguf", llama(), "llama", split=split))).tokenizer
    found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("  12")
    assert [part for part, _ in found] == parts


def test_every_cut_of_a_file_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", llama(), "llama").read_bytes()
    cut = tmp_path / "cut.gguf"
    for end in [0, 3, 4, 8, 20, 24, *range(100, len(whole), len(whole) // 40), len(whole) - 1]:
        cut.write_bytes(whole[:end])
        with pytest.raises(ModelNotSupported, match=r"is cut|is no GGUF file"):
            load(str(cut))
    assert left(cache) == []


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ({"family": "mamba"}, "is of the family 'mamba'; GGUF files of llama, qwen2"),
        ({"metadata": {"llama.expert_count": 8}}, "sets llama.expert_count, which is not understood"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "scales its positions by 'yarn'"),
        ({"split": "deepseek-coder"}, "splits text as 'deepseek-coder' does"),
        ({"tensors": {"surplus.weight": np.ones(4, np.float32)}}, "weights, of which transformers reads"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    written: dict[str, Any], reason: str, tmp_path: Path, cache: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama(), **{"family": "llama", **written})
    with pytest.raises(ModelNotSupported, match=reason):
        load(str(path))
    assert left(cache) == []


def test_a_file_that_lacks_a_weight_is_refused(tmp_path: Path, cache: Path) -> None:
    """transformers would fill in random numbers, with a warning."""
    model = llama()
    path = write_gguf(tmp_path / "tiny.gguf", model, "llama", without=("blk.1.ffn_up.weight",))
    with pytest.raises(ModelNotSupported, match=r"has no model.layers.1.mlp.up_proj.weight"):
        load(str(path))
    assert left(cache) == []


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: b"", "is no GGUF file"),
        (lambda content: b"{" + content[1:], "its first four bytes are not GGUF"),
        (lambda content: content[:4] + b"\x01\0\0\0" + content[8:], "version 1 of the format"),
        (lambda content: content[:8] + b"\xff" * 16 + content[24:], "is cut|is no GGUF file"),
    ],
)
def test_what_is_no_such_file_is_refused(
    damage: Callable[[bytes], bytes], reason: str, tmp_path: Path, cache: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama(), "llama")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelNotSupported, match=reason):
        load(str(path))
    assert left(cache) == []


def test_a_file_that_changed_is_converted_again(tmp_path: Path, cache: Path) -> None:
    first = load(str(write_gguf(tmp_path / "tiny.gguf", llama(), "llama")))
    again = load(str(tmp_path / "tiny.gguf"))
    assert again.revision == first.revision
    other = random_model(transformers.LlamaConfig(**tiny_sizes()), seed=1)
    assert load(str(write_gguf(tmp_path / "tiny.gguf", other, "llama"))).revision != first.revision
    assert len(list(cache.iterdir())) == 1


def test_a_disk_without_room_is_told_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="MB are needed"):
        check_room(tmp_path, 1 << 60)
    check_room(tmp_path, 1)


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", llama(), "llama")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # bytes of a file: less than the weights
    try:
        with pytest.raises(OSError, match="File too large"):
            converted(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert left(cache) == []
    assert converted(path).is_dir()  # and now there is room
