"""Describe the variants that an engine serves beside its base, whose weights they share, as chains of blocks.

Plain values. Holds no tensors and knows nothing of the wire format.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, Protocol


class Variant(NamedTuple):
    """A variant to load. `id` is its model name; either `adapter` or `model` is set.

    `adapter` is a folder in peft's format; `model` is the folder of a fine-tuned model of the base's
    architecture. `fingerprint`: the chain's expected fingerprint, empty to accept any. `tenant`: the only
    tenant that may use the model, empty for all.
    """

    id: str
    adapter: str = ""
    model: str = ""
    fingerprint: str = ""
    tenant: str = ""


class ServedVariant(Protocol):
    """The part of a served variant that the scheduler and the sampling rules read."""

    @property
    def fingerprint(self) -> str:
        """The name of the variant's contents, under which the prefix cache stores its pages."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def rank(self) -> int:
        """The largest rank of its adapters; 0: it has none and needs no adapter slot."""
        ...

    @property
    def virtual_tokens(self) -> int:
        """The number of tokens before every prompt that have keys and values but no ids."""
        ...


class BlockKind(StrEnum):
    BASE = "base"  # all weights of a base
    SLOTS = "slots"  # memory of the adapter slots, empty or not
    EMBEDDING = "embedding"
    LAYERS = "layers"
    HEAD = "head"  # with the last norm
    ADAPTER = "adapter"


class Block(NamedTuple):
    """A unit of storage, named by a hash of its contents. `LAYERS` are decoder layers `first` to `last`.

    `in_host`: the block is in host memory until a request needs it in a slot.
    """

    id: str
    kind: BlockKind
    first: int
    last: int
    bytes: int
    in_host: bool = False


class Chain(NamedTuple):
    """A served variant. Chains with equal fingerprints compute the same. `blocks` are the variant's own,
    beside the base's.

    `tokenizer` is a folder if the chat template or end tokens differ from the base's, else empty. The
    vocabulary is always the base's.
    """

    id: str
    fingerprint: str
    blocks: tuple[Block, ...]
    own_bytes: int  # memory that the variant needs beside the base
    eos_token_ids: tuple[int, ...]
    tokenizer: str = ""
