"""Word pieces: any text gives some, never too many, and known words are split as the vocabulary says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.wordpiece import MAX_PIECES, WordPieceTokenizer, pad

VOCABULARY = (
    *("[PAD]", "[unused0]", "[unused1]", "[unused2]", "[UNK]", "[CLS]", "[SEP]"),
    *("play", "##ing", "##ed", "the", "cafe", "?", "好", "1", "##2", "a"),
)
PIECES = WordPieceTokenizer(VOCABULARY)


def cut(text: str) -> list[str]:
    return [VOCABULARY[piece] for piece in PIECES.encode(text)][1:-1]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Playing the", ["play", "##ing", "the"]),
        ("Café?", ["cafe", "?"]),
        ("played 好好", ["play", "##ed", "好", "好"]),
        ("12", ["1", "##2"]),
        ("a\nthe\n\n a", ["a", "[unused1]", "the", "[unused2]", "a"]),
        ("xylophone", ["[UNK]"]),
        ("a" * 1_000, ["[UNK]"]),
        ("", []),
    ],
)
def test_words_are_split_into_their_longest_pieces(text: str, pieces: list[str]) -> None:
    assert cut(text) == pieces


@given(st.text(st.characters(), max_size=400))
def test_any_text_gives_pieces_of_the_vocabulary(text: str) -> None:
    found = PIECES.encode(text)
    assert 2 <= len(found) <= MAX_PIECES
    assert all(0 < piece < len(VOCABULARY) for piece in found)
    assert found == PIECES.encode(text)


def test_of_a_long_text_the_beginning_and_the_end_are_kept() -> None:
    found = cut("the " + "a " * 5_000 + "playing")
    assert len(found) == MAX_PIECES - 2
    assert found[0] == "the"
    assert found[-2:] == ["play", "##ing"]


def test_shorter_texts_are_padded_with_zeros() -> None:
    assert pad([[5, 6], [5, 7, 8, 6]]).tolist() == [[5, 6, 0, 0], [5, 7, 8, 6]]
