"""Make the vocabulary of a tokenizer: a table of bytes if it is byte-level, else its own decode."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from site_engine.text.detokenize import UNFINISHED, ByteVocabulary, DecodingVocabulary, NoText, Vocabulary

TRIALS = 32
TRIAL_TOKENS = 24


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """Return the byte table only where it agrees with the tokenizer."""
    if tokenizer is None:
        return NoText()

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    table = byte_table(tokenizer)
    if table is not None and agrees(table, decode, len(tokenizer)):
        return table
    return DecodingVocabulary(decode, lambda token_id: str(tokenizer.convert_ids_to_tokens(token_id)))


def byte_table(tokenizer: Any) -> ByteVocabulary | None:
    """Return the bytes of every token of a byte-level tokenizer; None for any other kind."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = {} if backend is None else json.loads(backend.to_str()).get("decoder") or {}
    if decoder.get("type") != "ByteLevel":
        return None
    alphabet = byte_alphabet()
    names = [str(name) for name in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))]
    special = set(tokenizer.all_special_ids)
    raws: list[bytes | None] = []
    for token_id, name in enumerate(names):
        plain = all(char in alphabet for char in name)
        raw = bytes(alphabet[char] for char in name) if plain else name.encode()
        raws.append(None if token_id in special else raw)
    return ByteVocabulary(raws, names)


def byte_alphabet() -> dict[str, int]:
    """Return the printable stand-in of each byte in byte-level vocabularies (GPT-2), by stand-in."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


def agrees(table: ByteVocabulary, decode: Callable[[list[int]], str], size: int) -> bool:
    """Compare on random runs of tokens, except for a cut character at the end."""
    random = Random(0)
    for _ in range(TRIALS):
        ids = [random.randrange(size) for _ in range(TRIAL_TOKENS)]
        decoder = table.decoder()
        text, whole = "".join(map(decoder.push, ids)), decode(ids)
        if not whole.startswith(text) or whole[len(text) :].strip(UNFINISHED):
            return False
    return True
