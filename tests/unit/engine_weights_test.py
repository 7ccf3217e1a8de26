"""Weights read by several threads are those that transformers reads, whatever the family and the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from site_engine.model import weights
from site_engine.model.loader import load
from tests.support.engine_models import FAMILIES, tokenizer
from tests.support.model_families import random_model

torch.set_num_threads(1)
CPU = torch.device("cpu")


def saved(folder: Path, family: str = "llama", dtype: str = "float32", shard: str = "5GB") -> Path:
    model = random_model(FAMILIES[family]()).to(getattr(torch, dtype))
    model.generation_config.eos_token_id = [0, 7]
    model.save_pretrained(folder, max_shard_size=shard)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_the_same_as_from_transformers(
    family: str, shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "PIECE_BYTES", 1000)  # so that tensors come in pieces of several threads
    folder = saved(tmp_path / family, family, shard=shard)
    read = weights.reader(folder, torch.float32, CPU)
    assert read is not None
    plain, fast = load(str(folder)), load(str(folder), weights=read)
    expected, found = plain.model.state_dict(), fast.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    buffers = dict(plain.model.named_buffers())
    assert all(torch.equal(each, buffers[name]) for name, each in fast.model.named_buffers())
    assert type(fast.model) is type(plain.model)
    assert (fast.eos_token_ids, fast.revision, fast.layers) == (
        plain.eos_token_ids,
        plain.revision,
        plain.layers,
    )


def test_tied_weights_stay_one_tensor(tmp_path: Path) -> None:
    config = FAMILIES["llama"]()
    config.tie_word_embeddings = True
    random_model(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    model = load(str(tmp_path), weights=weights.reader(tmp_path, torch.float32, CPU)).model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_what_transformers_has_to_convert_is_left_to_it(tmp_path: Path) -> None:
    folder = saved(tmp_path / "half", dtype="float16")
    assert weights.reader(folder, torch.float32, CPU) is None
    assert weights.reader(folder, torch.float16, CPU) is not None
    assert weights.reader(tmp_path / "nothing", torch.float32, CPU) is None


def test_a_file_that_ends_too_early_is_an_error(tmp_path: Path) -> None:
    folder = saved(tmp_path / "cut")
    file = folder / weights.SINGLE
    read = weights.reader(folder, torch.float32, CPU)
    file.write_bytes(file.read_bytes()[:-100])
    assert read is not None
    with pytest.raises(OSError, match="ends too early"):
        read()


def test_of_a_single_file_and_the_index_of_a_save_before_the_file_counts(tmp_path: Path) -> None:
    """save_pretrained leaves the index of the shards that it replaces, and transformers passes over it."""
    folder = saved(saved(tmp_path / "again", shard="20KB"))
    assert (folder / weights.INDEX).is_file() and not list(folder.glob("*-of-*"))
    read = weights.reader(folder, torch.float32, CPU)
    assert read is not None
    plain, fast = load(str(folder)), load(str(folder), weights=read)
    expected = plain.model.state_dict()
    assert all(torch.equal(each, expected[name]) for name, each in fast.model.state_dict().items())


def test_a_pointer_to_a_file_is_an_error(tmp_path: Path) -> None:
    """git writes one where its large files were not fetched."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (tmp_path / weights.SINGLE).write_text(pointer)
    with pytest.raises(ValueError, match=r"model\.safetensors is no safetensors file, or cut"):
        weights.reader(tmp_path, torch.float32, CPU)
