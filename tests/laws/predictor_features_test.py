"""Any text gives features, quickly and always the same."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from predictor import features
from predictor.wordpiece import WordPieceTokenizer

anything = st.text(st.characters(), max_size=300)


@given(anything)
def test_any_text_gives_finite_features_within_the_table(text: str) -> None:
    bag = features.bag(text)
    assert bag.slots.shape == bag.weights.shape
    assert ((bag.slots >= 0) & (bag.slots < features.PADDING_SLOT)).all()
    assert len(set(bag.slots.tolist())) == len(bag.slots)
    assert bag.dense.shape == (features.DENSE_FEATURES,)
    assert np.isfinite(bag.weights).all()
    assert np.isfinite(bag.dense).all()


@given(anything)
def test_weights_are_of_length_one(text: str) -> None:
    weights = features.bag(text).weights
    assert len(weights) == 0 or abs(float((weights**2).sum()) - 1.0) < 1e-4


@given(st.lists(anything, min_size=1, max_size=5))
def test_a_batch_holds_its_bags_and_adds_nothing(texts: list[str]) -> None:
    bags = [features.bag(text) for text in texts]
    batch = features.batch(features.bags(texts))
    for row, bag in enumerate(bags):
        own = batch.slots[row] != features.PADDING_SLOT
        assert batch.slots[row][own].tolist() == bag.slots.tolist()
        assert batch.weights[row][own].tolist() == bag.weights.tolist()
        assert not batch.weights[row][~own].any()
        assert batch.dense[row].tolist() == bag.dense.tolist()


@given(st.text("ab 12?.\n", max_size=150))
def test_a_text_alone_has_the_features_that_it_has_among_others(text: str) -> None:
    """Alone it may be counted in another way, to the same bits."""
    alone, (among, _) = features.bag(text), features.bags([text, "another"])
    assert all(ours.dtype == theirs.dtype for ours, theirs in zip(alone, among, strict=True))
    assert [each.tolist() for each in alone] == [each.tolist() for each in among]


def test_lone_surrogates_controls_and_nothing_at_all() -> None:
    for text in ("", "\ud800", "\x00\x01\x1f", "\U0001f600" * 10, "ı̇ŞẞſK"):
        assert np.isfinite(features.bag(text).dense).all()


def test_of_a_long_text_only_the_ends_are_read() -> None:
    head, tail = "begin " * 600, " end" * 300
    short = features.bag(head + "x " * 40_000 + tail)
    other = features.bag(head + "y " * 40_000 + tail)
    assert short.slots.tolist() == other.slots.tolist()
    assert len(features.words("a " * 50_000)) <= features.HEAD_CHARS + features.TAIL_CHARS


def test_scripts_without_spaces_are_split_by_character() -> None:
    assert features.words("你好, World 2024!") == ["你", "好", ",", "world", "2024", "!"]


@given(st.text(st.characters(max_codepoint=127), max_size=200))
def test_plain_text_is_read_as_any_other(text: str) -> None:
    """A sign at the end that is not ASCII makes the general pattern read the same text."""
    assert features.words(text + "\n\u00b7") == [*features.words(text), "\n", "\u00b7"]
    vocabulary = ["[PAD]", "[unused1]", "[unused2]", "[UNK]", "[CLS]", "[SEP]"]
    pieces = WordPieceTokenizer(
        [*vocabulary, *map(chr, range(128)), *(f"##{chr(code)}" for code in range(128))]
    )
    short = text[:40]
    assert pieces.encode(short + " \u4e00")[:-2] == pieces.encode(short)[:-1]
