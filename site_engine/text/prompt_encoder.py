"""Encode the text of prompts. Long texts are encoded in pieces, so that other work can run in between.

Pieces are used only if the concatenated token ids are known to equal those of the whole text.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, pairwise
from random import Random
from typing import Any
from uuid import uuid4

from site_engine.text.vocabulary import TRIAL_TOKENS, TRIALS, byte_alphabet

PIECE_CHARS = 1 << 13
"""The characters to encode in one step, which takes a few milliseconds."""
CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])|(?<=\S\n)(?=[^\W_])")
"""The start of a word after a space, or of a line. Tokenizers split there; few have tokens that span it."""
NFC_CHARS = 4
"""The maximum number of characters that NFC normalization composes into one (four for U+1F82)."""
KEEPING = {"ByteLevel", "Digits", "Split", "Punctuation"}
"""Pre-tokenizers that pass every character on to the model, unless configured to remove the delimiters."""


class PromptEncoder:
    """Encode texts with a transformers tokenizer. Thread-safe.

    `max_token_chars`: the maximum number of characters of text in one token, or None if unknown.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self.max_token_chars = None if self._backend is None else max_token_chars(tokenizer)
        self._control = control_tokens(tokenizer)
        self._seam = f"\ufdd0{uuid4().hex[:8]}"  # occurs in no text and can't be guessed
        self._cut: Callable[..., Iterator[str]] = iter_whole
        if self._backend is not None:
            if no_token_spans_a_cut(tokenizer) and self._agrees(iter_pieces):
                self._cut = iter_pieces
            elif not self._agrees(iter_whole):
                self._backend = None  # the tokenizer's own `encode` differs from the backend's

    def shield(self, text: str) -> str:
        """Mark a text so that `pieces` encodes names of control tokens in the text as plain characters."""
        found = self._control.search(text) if self._control else None
        if self._control is None or found is None:
            return text
        cuts = [0]
        while found is not None:
            cuts.append(found.start() + 1)
            found = self._control.search(text, found.start() + 1)
        return self._seam.join(text[start:end] for start, end in pairwise([*cuts, len(text)]))

    def chars(self, text: str) -> int:
        """Return the length of a text, excluding the marks added by `shield`."""
        return len(text) - text.count(self._seam) * len(self._seam)

    def pieces(self, text: str, *, special: bool) -> Iterator[list[int]]:
        """Yield the token ids of a text in pieces. `special`: add the model's special tokens to the text."""
        parts = text.split(self._seam)
        return self._encoded((piece for part in parts for piece in self._cut(part)), special)

    def encode(self, text: str, *, special: bool) -> list[int]:
        return [token for piece in self.pieces(text, special=special) for token in piece]

    def _encoded(self, parts: Iterable[str], special: bool) -> Iterator[list[int]]:
        for part in parts:
            if self._backend is None:
                yield list(self._tokenizer.encode(part, add_special_tokens=special, verbose=False))
            else:  # only the backend's batch calls release the GIL
                yield self._backend.encode_batch_fast([part], add_special_tokens=special)[0].ids
            special = False  # `_agrees` rejects tokenizers that add tokens at the end

    def _agrees(self, cut: Callable[..., Iterator[str]]) -> bool:
        """Return whether `cut` pieces encode like the tokenizer, on random texts cut as often as possible."""
        random = Random(0)
        for number in range(TRIALS):
            words = [self._random_text(random) for _ in range(4)]
            text = f"{words[0]} a b {words[1]}ab cd\n{words[2]}\n\nAb 1.\n2{words[3]}" if number else ""
            for special in (True, False):
                whole = self._tokenizer.encode(text, add_special_tokens=special, verbose=False)
                parts = self._encoded(cut(text, 1), special)
                if [token for part in parts for token in part] != list(whole):
                    return False
        return True

    def _random_text(self, random: Random) -> str:
        ids = [random.randrange(len(self._tokenizer)) for _ in range(TRIAL_TOKENS)]
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def control_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """Return a pattern that matches the names of special tokens, or None if there are none."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = sorted({each.content for each in added if each.special and len(each.content) > 1})
    return re.compile("|".join(map(re.escape, names))) if names else None


def iter_whole(text: str, _chars: int = 0) -> Iterator[str]:
    yield text


def iter_pieces(text: str, chars: int = PIECE_CHARS) -> Iterator[str]:
    """Split the text into parts of at least `chars` characters, except for the last part."""
    start = 0
    while len(text) - start > chars and (found := CUT.search(text, start + chars)) is not None:
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def no_token_spans_a_cut(tokenizer: Any) -> bool:
    """Return whether no token spans a CUT, so that the parts of a text can be encoded separately."""
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    alphabet = defaultdict(lambda: 0xFF, {ord(char): byte for char, byte in byte_alphabet().items()})
    texts = (str(name).translate(alphabet).encode("latin-1").decode("utf-8", "replace") for name in names)
    written = (str(name).replace("▁", " ") for name in names)
    return not any(CUT.search(text) for text in chain(texts, written) if " " in text or "\n" in text)


def max_token_chars(tokenizer: Any) -> int | None:
    """Return the maximum length of a byte-level token, in characters of the text before normalization.

    Return None for other tokenizers, which may drop characters or encode a run of unknown ones as one token.
    """
    from tokenizers import Tokenizer, models

    backend = tokenizer.backend_tokenizer
    steps_alone = Tokenizer(models.BPE())  # serializes without the vocabulary, which takes half a second
    steps_alone.pre_tokenizer, steps_alone.normalizer = backend.pre_tokenizer, backend.normalizer
    described = json.loads(steps_alone.to_str())
    pre = described["pre_tokenizer"] or {}
    steps = pre.get("pretokenizers", [pre])
    normalizer = (described["normalizer"] or {}).get("type")
    added, vocabulary = backend.get_added_tokens_decoder().values(), tokenizer.get_vocab()
    keeps_all = (
        isinstance(backend.model, models.BPE)
        and all(each.get("type") in KEEPING and each.get("behavior") != "Removed" for each in steps)
        and any(each["type"] == "ByteLevel" for each in steps)
        and normalizer in {None, "NFC"}
        and vocabulary.keys() >= byte_alphabet().keys()
        and not any(each.lstrip or each.rstrip for each in added)
    )
    if not keeps_all:
        return None
    longest = max(map(len, [*vocabulary, *(each.content for each in added)]))
    return longest * (NFC_CHARS if normalizer else 1)
