"""Make the vocabulary of a tokenizer: a table of bytes if it is byte-level, else its own decode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any

from site_engine.text.detokenize import UNFINISHED, ByteVocabulary, DecodingVocabulary, NoText, Vocabulary

TRIALS = 32
"""Random texts on which a faster way must agree with the tokenizer's own, of TRIAL_TOKENS each."""
TRIAL_TOKENS = 24
NO_BYTE = 0xFFFF  # a character beyond those of single bytes


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """Return the byte table only where it agrees with the tokenizer."""
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
    """Return the bytes of every token of a byte-level tokenizer; None for any other kind."""
    from tokenizers.decoders import ByteLevel

    if not isinstance(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None), ByteLevel):
        return None
    alphabet = dict.fromkeys(range(0x100), NO_BYTE) | {
        ord(char): byte for char, byte in byte_alphabet().items()
    }

    def raw(name: str) -> bytes:
        """Return the bytes that a name stands for: its own if it has other characters than stand-ins."""
        try:
            return name.translate(alphabet).encode("latin-1")
        except UnicodeEncodeError:
            return name.encode()

    names = [str(name) for name in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))]
    special = {*tokenizer.all_special_ids}  # those with a role; Llama 3 has 250 more
    special.update(token_id for token_id, each in added_tokens(tokenizer).items() if each.special)
    raws = [None if token_id in special else raw(name) for token_id, name in enumerate(names)]
    return ByteVocabulary(raws, names)


def byte_alphabet() -> dict[str, int]:
    """Return the printable stand-in of each byte in byte-level vocabularies (GPT-2), by stand-in."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


def added_tokens(tokenizer: Any) -> Mapping[int, Any]:
    """Return what a tokenizer of transformers says of each token beyond its model's, by token id."""
    found: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return found


def agrees(
    table: ByteVocabulary, decode: Callable[[list[int]], str], size: int, added: Iterable[int] = ()
) -> bool:
    """Compare on all of `added`, which chance may miss, and on random runs of tokens, except for a cut
    character at the end.
    """
    random = Random(0)
    runs = ([random.randrange(size) for _ in range(TRIAL_TOKENS)] for _ in range(TRIALS))
    for ids in (list(added), *runs):
        decoder = table.decoder()
        text, whole = "".join(map(decoder.push, ids)), decode(ids)
        if not whole.startswith(text) or whole[len(text) :].strip(UNFINISHED):
            return False
    return True
