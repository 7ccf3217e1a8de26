"""Create the vocabulary of a tokenizer: a byte table if it is byte-level, else its `decode` method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any

from site_engine.text.detokenize import UNFINISHED, ByteVocabulary, DecodingVocabulary, NoText, Vocabulary

TRIALS = 32
"""The number of random texts, of TRIAL_TOKENS tokens each, that verify a method against the tokenizer."""
TRIAL_TOKENS = 24
NO_BYTE = 0xFFFF  # a placeholder above the range of single bytes


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """Return the vocabulary of a tokenizer. A byte table is used only if it agrees with the tokenizer."""
    if tokenizer is None:
        return NoText()

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    table = byte_table(tokenizer)
    if table is not None and agrees(table, decode, len(tokenizer), added_tokens(tokenizer)):
        return table
    return DecodingVocabulary(decode, lambda token_id: str(tokenizer.convert_ids_to_tokens(token_id)))


def byte_table(tokenizer: Any) -> ByteVocabulary | None:
    """Return the byte table of a byte-level tokenizer, or None for any other tokenizer."""
    from tokenizers.decoders import ByteLevel

    if not isinstance(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None), ByteLevel):
        return None
    alphabet = dict.fromkeys(range(0x100), NO_BYTE) | {
        ord(char): byte for char, byte in byte_alphabet().items()
    }

    def raw(name: str) -> bytes:
        """Return the bytes of a token name, or its UTF-8 bytes if a character is not in the alphabet."""
        try:
            return name.translate(alphabet).encode("latin-1")
        except UnicodeEncodeError:
            return name.encode()

    names = [str(name) for name in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))]
    special = {*tokenizer.all_special_ids}  # only those with a role; Llama 3 has 250 more
    special.update(token_id for token_id, each in added_tokens(tokenizer).items() if each.special)
    raws = [None if token_id in special else raw(name) for token_id, name in enumerate(names)]
    return ByteVocabulary(raws, names)


def byte_alphabet() -> dict[str, int]:
    """Return the byte for each printable character of byte-level vocabularies (GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


def added_tokens(tokenizer: Any) -> Mapping[int, Any]:
    """Return the added tokens of a transformers tokenizer, by token id."""
    found: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return found


def agrees(
    table: ByteVocabulary, decode: Callable[[list[int]], str], size: int, added: Iterable[int] = ()
) -> bool:
    """Return whether the table decodes like `decode`, except for an incomplete last character. Compares all
    `added` tokens, which random samples may miss, and random sequences of tokens.
    """
    random = Random(0)
    runs = ([random.randrange(size) for _ in range(TRIAL_TOKENS)] for _ in range(TRIALS))
    for ids in (list(added), *runs):
        decoder = table.decoder()
        text, whole = "".join(map(decoder.push, ids)), decode(ids)
        if not whole.startswith(text) or whole[len(text) :].strip(UNFINISHED):
            return False
    return True
