"""Pieces joined equal the whole, no piece holds half a character, no stop string gets out."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from site_engine.core.request import TokenLogprob
from site_engine.federation.attempts import text_of_prompt
from site_engine.text.detokenize import (
    SILENT_TOKENS,
    ByteVocabulary,
    DecodingVocabulary,
    TextStream,
    Vocabulary,
)
from site_engine.text.vocabulary import agrees, byte_alphabet, byte_table, vocabulary_of
from tests.support.engine_models import tokenizer

TEXTS = st.text(alphabet=st.sampled_from("abc the 42,é日本👩‍🚀🦀Ω\n "), max_size=40)


def by_decoding() -> Vocabulary:
    return DecodingVocabulary(lambda ids: tokenizer().decode(ids, skip_special_tokens=True), str)


def vocabularies() -> list[Vocabulary]:
    table = byte_table(tokenizer())
    assert table is not None
    return [table, by_decoding()]


def test_a_byte_level_tokenizer_is_read_from_its_table() -> None:
    assert type(vocabulary_of(tokenizer())).__name__ == "ByteVocabulary"


@cache
def spaced() -> Any:
    """As Llama 2 and Mistral have it: a space before each word, left out before the first, and bytes for
    characters that are no tokens.
    """
    words = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = Tokenizer(models.BPE())
    trained.normalizer = words
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>", "<s>"], show_progress=False)
    trained.train_from_iterator(["the answer is Paris and 42", "abc the 42 é"], trainer)
    learned = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    made = Tokenizer(
        models.BPE(
            vocab={name: at for at, name in enumerate(dict.fromkeys(names))},
            merges=[tuple(each) for each in learned["merges"]],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    made.normalizer = words
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>")


@given(text=TEXTS)
@example(text="the answer is Paris")
def test_what_follows_a_text_begins_with_its_space(text: str) -> None:
    ids = spaced().encode(text)
    vocabulary = vocabulary_of(spaced())
    for cut in range(len(ids) + 1):
        begun = spaced().decode(ids[:cut])
        decoder = vocabulary.decoder(ids[:cut])
        pieces = "".join(decoder.push(token_id) for token_id in ids[cut:])
        assert begun + pieces == text or "\ufffd" in begun


LETTERS = ["the", "▁the", "▁", "a", "<s>", "<0xFF>", "<0xC3>"]


@given(pieces=st.lists(st.sampled_from(LETTERS), max_size=40))
@example(pieces=["a", *["<0xFF>"] * 30, "a"])
@example(pieces=["a", *["<s>"] * 30, "▁the"])
@example(pieces=["<0xC3>", *["<s>"] * 30, "a"])
def test_tokens_without_text_and_bytes_of_no_character_change_nothing_else(pieces: list[str]) -> None:
    ids = spaced().convert_tokens_to_ids(["a", *pieces, "a"])
    decoder = vocabulary_of(spaced()).decoder()
    assert "".join(map(decoder.push, ids)) == spaced().decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("piece", ["<s>", "<0xFF>", "a"])
def test_a_token_costs_as_much_however_many_without_text_came_before(piece: str) -> None:
    decoded: list[int] = []

    def decode(ids: list[int]) -> str:
        decoded.append(len(ids))
        return str(spaced().decode(ids, skip_special_tokens=True))

    decoder = DecodingVocabulary(decode, str).decoder()
    (token_id,) = spaced().convert_tokens_to_ids([piece])
    for _ in range(300):
        decoder.push(token_id)
    assert max(decoded) <= 2 * SILENT_TOKENS


def test_text_after_a_special_token_begins_with_its_space() -> None:
    """A special token has no text, and is not where the text of the prompt begins."""
    prompt = spaced().encode("the answer", add_special_tokens=False)
    (mark, paris) = (spaced().convert_tokens_to_ids("<s>"), spaced().encode("Paris"))
    vocabulary = vocabulary_of(spaced())
    for before, expected in (([*prompt, mark], " Paris"), ([mark], "Paris"), ([], "Paris")):
        decoder = vocabulary.decoder(before)
        assert "".join(map(decoder.push, paris)) == expected


@given(text=TEXTS)
@example(text="the answer is Paris")
def test_single_tokens_joined_are_the_text_as_bytes(text: str) -> None:
    table = byte_table(tokenizer())
    assert table is not None
    assert b"".join(table.token(each).raw for each in tokenizer().encode(text)) == text.encode()
    words = vocabulary_of(spaced())
    with_space = f" {text}" if text else ""
    assert b"".join(words.token(each).raw for each in spaced().encode(text)) == with_space.encode()


@given(text=TEXTS)
def test_pieces_joined_are_the_text(text: str) -> None:
    for vocabulary in vocabularies():
        decoder = vocabulary.decoder()
        pieces = [decoder.push(token_id) for token_id in tokenizer().encode(text)]
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, len(tokenizer()) - 1), max_size=30))
def test_any_tokens_give_what_the_tokenizer_gives_less_a_cut_character(ids: list[int]) -> None:
    whole = tokenizer().decode(ids, skip_special_tokens=True)
    for vocabulary in vocabularies():
        decoder = vocabulary.decoder()
        text = "".join(decoder.push(token_id) for token_id in ids)
        assert whole.startswith(text)
        assert whole[len(text) :].strip("\ufffd") == ""


@given(text=TEXTS)
def test_a_character_is_given_out_with_its_last_token(text: str) -> None:
    for vocabulary in vocabularies():
        decoder = vocabulary.decoder()
        seen: list[int] = []
        given_out = ""
        for token_id in tokenizer().encode(text):
            seen.append(token_id)
            given_out += decoder.push(token_id)
            assert given_out == tokenizer().decode(seen).rstrip("\ufffd")


def test_a_cut_character_is_held_back() -> None:
    ids = tokenizer().encode("a🦀")
    for vocabulary in vocabularies():
        decoder = vocabulary.decoder()
        assert "".join(decoder.push(token_id) for token_id in ids[:-1]) == "a"
        assert decoder.push(ids[-1]) == "🦀"


def test_special_tokens_are_no_text_and_ids_past_the_vocabulary_are_harmless() -> None:
    for vocabulary in vocabularies()[:1]:
        decoder = vocabulary.decoder()
        assert decoder.push(tokenizer().eos_token_id) == ""
        assert decoder.push(10_000) == ""
        assert vocabulary.token(tokenizer().eos_token_id).text == "<end>"


class Letters:
    """A decoder whose tokens are characters."""

    def push(self, token_id: int) -> str:
        return chr(token_id)


@given(
    text=st.text(alphabet="ab", max_size=30),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    skip=st.integers(0, 5),
)
def test_a_stream_ends_before_the_first_stop_string(text: str, stops: list[str], skip: int) -> None:
    stream = TextStream(Letters(), tuple(stops), skip)
    given_out = ""
    read = 0
    for char in text:
        given_out += stream.push(ord(char))
        read += 1
        if stream.stopped:
            break
    else:
        given_out += stream.flush()
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    assert bool(stream.stopped) == bool(ends)
    if ends:
        assert text[:read].endswith(stream.stopped)
        assert read == min(ends)
        begin = min(text[:read].index(stop) for stop in stops if stop in text[:read])
        assert given_out == text[:begin][skip:]
    else:
        assert given_out == text[skip:]


@pytest.mark.parametrize("watch", [True, False])
def test_no_stop_before_the_shortest_answer(watch: bool) -> None:
    stream = TextStream(Letters(), ("ab",))
    assert "".join(stream.push(ord(char), watch) for char in "xab") == ("x" if watch else "xab")
    assert stream.stopped == ("ab" if watch else "")


@pytest.mark.parametrize("make", [tokenizer, spaced])
@given(text=TEXTS.filter(bool), added=st.integers(0, 2))
def test_the_bytes_of_an_echoed_prompts_tokens_joined_equal_its_text(
    make: Any, text: str, added: int
) -> None:
    vocabulary = vocabulary_of(make())
    tokens = [TokenLogprob("<s>", b"<s>", None)] * added
    tokens += [TokenLogprob(*vocabulary.token(each), -1.0) for each in make().encode(text)]
    placed = text_of_prompt(tokens, text)
    assert b"".join(each.raw for each in placed) == text.encode()
    assert all(token.raw.endswith(each.raw) for token, each in zip(tokens, placed, strict=True))


def test_names_with_characters_that_stand_for_no_byte_are_read_as_they_are() -> None:
    """Added tokens have such names: also with characters that are bytes, but stand for none."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={char: at for at, char in enumerate(alphabet)}, merges=[]))
    made.decoder = decoders.ByteLevel()
    names = [" ", "a b", "\xa0", "\xad", "\x85", "\u0100", "\u0143", "\u0144", "日本", "\uffff", "🦀"]
    made.add_tokens(names)
    table = byte_table(transformers.PreTrainedTokenizerFast(tokenizer_object=made))
    assert table is not None
    known = byte_alphabet()
    for name in [*alphabet, *names]:
        expected = bytes(known[char] for char in name) if known.keys() >= set(name) else name.encode()
        (token_id,) = made.encode(name).ids if name in names else [alphabet.index(name)]
        assert table.token(token_id).raw == expected, name


def test_special_tokens_without_a_role_are_no_text_and_the_table_is_used() -> None:
    """Llama 3 has 256 special tokens, of which transformers names three by a role."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: at for at, name in enumerate([*alphabet, *(f"w{at}" for at in range(4000))])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.decoder = decoders.ByteLevel()
    silent = ["<|end|>", *(f"<|reserved_{at}|>" for at in range(8))]
    made.add_special_tokens(silent)
    made.add_tokens(["<tool_call>"])
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")
    assert len(wrapped.all_special_ids) < len(silent)
    vocabulary = vocabulary_of(wrapped)
    assert type(vocabulary).__name__ == "ByteVocabulary"
    for name, said in [*((each, "") for each in silent), ("<tool_call>", "<tool_call>")]:
        token_id = wrapped.convert_tokens_to_ids(name)
        assert vocabulary.decoder().push(token_id) == said
        assert vocabulary.token(token_id).text == name


def test_a_table_that_reads_one_added_token_otherwise_is_not_used() -> None:
    """Random runs over a large vocabulary miss it."""
    table = ByteVocabulary([bytes([32 + at % 64]) for at in range(100_000)], ["?"] * 100_000)

    def decode(ids: list[int]) -> str:
        return "".join("" if each == 77_777 else chr(32 + each % 64) for each in ids)

    assert agrees(table, decode, 100_000)
    assert not agrees(table, decode, 100_000, [77_777])
