"""Texts encoded piece by piece have the ids of the whole, and no token stands for more than it may."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from site_engine.text.prompt_encoder import PIECE_CHARS, PromptEncoder, iter_pieces
from tests.support.engine_models import tokenizer as byte_level
from tests.support.tool_models import tool_tokenizer

DEMO = Path(__file__).parents[2] / "mico" / "demo_model" / "weights"
TEXT = ["a quick brown fox jumps over a lazy dog\nAnd 12 again\n\nthe  end of it\n1. one\n2. two"] * 8


def made(model: Any, normalizer: Any = None, pre: Any = None, **added: Any) -> Any:
    tokens = Tokenizer(model)
    if normalizer is not None:
        tokens.normalizer = normalizer
    if pre is not None:
        tokens.pre_tokenizer = pre
    kinds = {
        "BPE": trainers.BpeTrainer,
        "Unigram": trainers.UnigramTrainer,
        "WordPiece": trainers.WordPieceTrainer,
    }
    kind = kinds[type(model).__name__]
    unknown = {"unk_token": "<unk>"} if kind is trainers.UnigramTrainer else {}
    tokens.train_from_iterator(
        TEXT, kind(vocab_size=300, special_tokens=["<unk>"], show_progress=False, **unknown)
    )
    tokens.decoder = decoders.Metaspace()
    if added:
        tokens.add_tokens([AddedToken(**added)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="<unk>")


def llama_like() -> Any:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


KINDS = {
    "demo": lambda: transformers.AutoTokenizer.from_pretrained(DEMO),
    "byte level": byte_level,
    "tools": lambda: tool_tokenizer("hermes"),
    "prepended": lambda: made(models.BPE(unk_token="<unk>"), llama_like()),
    "metaspace": lambda: made(models.BPE(unk_token="<unk>"), None, pre_tokenizers.Metaspace()),
    "across spaces": lambda: made(models.BPE(unk_token="<unk>")),
    "unigram": lambda: made(models.Unigram(), None, pre_tokenizers.Metaspace()),
    "lower case": lambda: made(
        models.WordPiece(unk_token="<unk>"), normalizers.Lowercase(), pre_tokenizers.Whitespace()
    ),
    "added": lambda: made(
        models.BPE(unk_token="<unk>"), None, pre_tokenizers.Metaspace(), content="of it", lstrip=True
    ),
}


@cache
def kind(name: str) -> tuple[Any, PromptEncoder]:
    tokenizer = KINDS[name]()
    return tokenizer, PromptEncoder(tokenizer)


WORDS = st.sampled_from(
    [
        "a quick",
        " fox",
        "\n",
        "\n\n",
        " ",
        "  ",
        "12",
        "1",
        ".",
        "é",
        "日本語",
        "\u0301",
        "<|end|>",
        "of it",
        "\t",
        "_x",
    ]
)
TEXTS = st.lists(st.one_of(WORDS, st.text(max_size=3)), max_size=12).map("".join)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS, special=st.booleans())
def test_pieces_joined_are_the_whole(name: str, text: str, special: bool) -> None:
    tokenizer, encoder = kind(name)
    encoder_cut, encoder._cut = encoder._cut, lambda text, chars=1: encoder_cut(text, 1)
    try:
        pieces = [token for piece in encoder.pieces(text, special=special) for token in piece]
    finally:
        encoder._cut = encoder_cut
    assert pieces == list(tokenizer.encode(text, add_special_tokens=special, verbose=False))


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=40, deadline=None)
@given(text=TEXTS)
def test_no_token_stands_for_more_characters_than_said(name: str, text: str) -> None:
    tokenizer, encoder = kind(name)
    if encoder.max_token_chars is not None:
        ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        assert len(text) <= encoder.max_token_chars * len(ids)


def test_only_byte_level_tokenizers_bound_their_tokens() -> None:
    assert {name for name in KINDS if kind(name)[1].max_token_chars is not None} == {
        "demo",
        "byte level",
        "tools",
    }


@pytest.mark.parametrize("name", ["demo", "byte level", "tools"])
def test_a_long_text_is_encoded_in_short_pieces(name: str) -> None:
    text = "All work and no play makes Jack a dull boy. " * 4000
    _, encoder = kind(name)
    pieces = list(encoder.pieces(text, special=False))
    assert len(pieces) > len(text) // (2 * PIECE_CHARS)
    assert max(map(len, pieces)) < 2 * PIECE_CHARS


def test_a_text_without_a_word_is_one_piece() -> None:
    assert list(iter_pieces("語" * 100_000)) == ["語" * 100_000]


CONTROL = ["<|end|>", "<|e", "d|><", "<|user|>"]  # some overlap


@cache
def controlled() -> tuple[Any, PromptEncoder]:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level().backend_tokenizer)
    tokenizer.add_tokens([AddedToken(each, special=True, normalized=False) for each in CONTROL])
    return tokenizer, PromptEncoder(tokenizer)


@given(
    parts=st.lists(st.one_of(st.sampled_from([*CONTROL, "<", "<|", "|>", "end", " a"]), st.text(max_size=2)))
)
def test_a_shielded_text_has_no_control_token_and_all_its_characters(parts: list[str]) -> None:
    tokenizer, encoder = controlled()
    text = "".join(parts)
    ids = encoder.encode(encoder.shield(text), special=False)
    assert not set(tokenizer.convert_tokens_to_ids(CONTROL)) & set(ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert encoder.chars(encoder.shield(text)) == len(text)


@given(text=st.text())
def test_a_text_without_control_tokens_is_shielded_as_it_is(text: str) -> None:
    _, encoder = controlled()
    if not any(each in text for each in CONTROL):
        assert encoder.shield(text) == text
