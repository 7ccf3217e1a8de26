"""What a grammar allows next does not depend on how llguidance cuts the vocabulary into slices."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from site_engine.model.grammar_bitmask import WORD_BITS
from site_engine.text.grammar import SLICES
from site_engine.text.tool_grammar import guided_source

LETTERS = "etaoin shrdlu"
END = "<end>"


@cache
def tokens(sliced: bool) -> LLTokenizer:
    """All bytes, and words of 2 to 34 letters: each length that a slice ends at, and its neighbours."""
    vocabulary = {each: number for number, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for length in range(2, 35):
        for first in range(4):
            word = "".join(LETTERS[(first + place * length) % len(LETTERS)] for place in range(length))
            vocabulary.setdefault(word.replace(" ", "Ġ"), len(vocabulary))
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END])
    return LLTokenizer(made.to_str(), eos_token=made.token_to_id(END), slices=SLICES if sliced else [])


def mask(matcher: LLMatcher) -> np.ndarray[Any, np.dtype[np.int32]]:
    bits = np.zeros(-(-tokens(True).vocab_size // WORD_BITS), np.int32)
    matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    return bits


limits = st.fixed_dictionaries({}, optional={"minLength": st.integers(0, 9), "maxLength": st.integers(9, 60)})
strings = st.one_of(
    limits.map(lambda given: {"type": "string", **given}),
    st.just({"type": "string", "pattern": "^[A-Z][a-z ]{1,20}$"}),
    st.just({"enum": ["etaoin", "shrdlu", "a\nb"]}),
)


@given(strings, st.lists(st.integers(0, 1 << 30), min_size=1, max_size=12))
def test_slices_change_no_mask(schema: dict[str, Any], drawn: list[int]) -> None:
    whole = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    lark = LLMatcher.grammar_from_lark(guided_source(whole, None, None, json.dumps))
    sliced, plain = (LLMatcher(tokens(each), lark, log_level=0) for each in (True, False))
    for matcher in (sliced, plain):
        assert matcher.try_consume_tokens(tokens(True).tokenize_str('{"a": "'))
    for number in drawn:
        bits = mask(sliced)
        assert np.array_equal(bits, mask(plain))
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        if not len(allowed):
            break
        token_id = int(allowed[number % len(allowed)])
        assert sliced.consume_token(token_id)
        assert plain.consume_token(token_id)
