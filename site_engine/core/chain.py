"""Name what one engine serves beside its base: variants, which share the base's weights, as chains of blocks.

Plain values. Does not hold tensors; does not know the wire.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, Protocol


class Variant(NamedTuple):
    """A variant as an operator asks for it: `id` is its model name, one of the folders is given.

    `adapter` is a folder as peft writes it; `model` is a fine-tuned model of the base's architecture.
    `fingerprint`: that of the chain which the folder must still hold; empty takes any. `tenant`: whose
    model it is alone; empty: everyone's.
    """

    id: str
    adapter: str = ""
    model: str = ""
    fingerprint: str = ""
    tenant: str = ""


class ServedVariant(Protocol):
    """The part of a served variant that the scheduler and the rules of sampling read."""

    @property
    def fingerprint(self) -> str:
        """A name of its contents: keys and values of prefixes belong to it."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def rank(self) -> int:
        """The largest rank of its adapters; 0: it has none, and needs no slot."""
        ...

    @property
    def virtual_tokens(self) -> int:
        """The tokens before every prompt that it has keys and values for, and no ids."""
        ...


class BlockKind(StrEnum):
    BASE = "base"  # all weights of a base
    SLOTS = "slots"  # room for adapters beside them, whatever is in it
    EMBEDDING = "embedding"
    LAYERS = "layers"
    HEAD = "head"  # with the last norm
    ADAPTER = "adapter"


class Block(NamedTuple):
    """A unit of storage, named by a hash of its contents. `LAYERS` are decoder layers `first` to `last`.

    `in_host`: it waits in host memory until requests of it bring it into a slot.
    """

    id: str
    kind: BlockKind
    first: int
    last: int
    bytes: int
    in_host: bool = False


class Chain(NamedTuple):
    """A served variant. `fingerprint` names its contents: chains of one fingerprint compute the same.
    `blocks` are those that the variant has beside the base's.

    `tokenizer` is the folder if its template or end tokens are unlike the base's, else empty; the vocabulary
    is the base's.
    """

    id: str
    fingerprint: str
    blocks: tuple[Block, ...]
    own_bytes: int  # that the variant needs beside the base
    eos_token_ids: tuple[int, ...]
    tokenizer: str = ""
