"""Pieces joined equal the whole, no piece holds half a character, no stop string gets out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from site_engine.detokenize import DecodingVocabulary, TextStream, Vocabulary
from site_engine.vocabulary import byte_table, vocabulary_of
from tests.engine_models import tokenizer

TEXTS = st.text(alphabet=st.sampled_from("abc the 42,é日本👩‍🚀🦀Ω\n "), max_size=40)


def by_decoding() -> Vocabulary:
    return DecodingVocabulary(lambda ids: tokenizer().decode(ids, skip_special_tokens=True), str)


def vocabularies() -> list[Vocabulary]:
    table = byte_table(tokenizer())
    assert table is not None
    return [table, by_decoding()]


def test_a_byte_level_tokenizer_is_read_from_its_table() -> None:
    assert type(vocabulary_of(tokenizer())).__name__ == "ByteVocabulary"


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
    assert stream.stopped == bool(ends)
    if ends:
        assert read == min(ends)
        begin = min(text[:read].index(stop) for stop in stops if stop in text[:read])
        assert given_out == text[:begin][skip:]
    else:
        assert given_out == text[skip:]


@pytest.mark.parametrize("watch", [True, False])
def test_no_stop_before_the_shortest_answer(watch: bool) -> None:
    stream = TextStream(Letters(), ("ab",))
    assert "".join(stream.push(ord(char), watch) for char in "xab") == ("x" if watch else "xab")
    assert stream.stopped is watch
