"""Describe what the models of a site hold in its memory, as the site announces it, for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

MAX_SHARING = 8
"""Models that are named as sharing a part of another; the others are counted."""


class BlockKind(StrEnum):
    OTHER = "other"  # of a kind that only newer sites know
    BASE = "base"  # all weights of a base
    SLOTS = "slots"  # room for adapters beside them, whatever is in it
    EMBEDDING = "embedding"
    LAYERS = "layers"
    HEAD = "head"
    ADAPTER = "adapter"


class Block(NamedTuple):
    """A part of a model that a site stores once. `id` is of its contents, empty if it is nobody else's.

    `LAYERS` are decoder layers `first` to `last` - 1. `in_host`: it waits in host memory for a slot.
    """

    id: bytes
    kind: BlockKind
    first: int
    last: int
    bytes: int
    in_host: bool = False


class Memory(NamedTuple):
    """The bytes that the models of a site take on each of its devices, equal parts once, and in host memory.

    `own_bytes` are those of parts that need no slot; slots have one size, whatever is in them.
    """

    base_bytes: int
    slots_bytes: int
    own_bytes: int
    host_bytes: int


class Shared(NamedTuple):
    """The parts of a model that others of the site have too. `models`: how many have the most common of them;
    `names`: of some of those.
    """

    bytes: int = 0
    models: int = 0
    names: tuple[str, ...] = ()


def memory(awake: Sequence[tuple[Block, ...]]) -> Memory:
    """Return the memory of the models that are awake, by the blocks of each."""
    blocks = {each for model in awake for each in model}
    sizes = {kind: sum(each.bytes for each in blocks if each.kind is kind) for kind in BlockKind}
    base_bytes, slots_bytes = sizes[BlockKind.BASE], sizes[BlockKind.SLOTS]
    host_bytes = sum(each.bytes for each in blocks if each.in_host)
    in_slots = {BlockKind.ADAPTER} if slots_bytes else frozenset()
    own = (each for each in blocks if each.kind not in {BlockKind.BASE, BlockKind.SLOTS, *in_slots})
    return Memory(base_bytes, slots_bytes, sum(each.bytes for each in own if not each.in_host), host_bytes)


def sharing(models: Mapping[str, tuple[Block, ...]]) -> dict[str, Shared]:
    """Return of each model what others have too."""
    owners: dict[bytes, list[str]] = {}
    for name, blocks in models.items():
        for each in blocks:
            if each.id:
                owners.setdefault(each.id, []).append(name)
    found = {}
    for name, blocks in models.items():
        common = [each for each in blocks if len(owners.get(each.id, ())) > 1]
        widest = max((owners[each.id] for each in common), key=len, default=[name])
        others = tuple(each for each in widest[: MAX_SHARING + 1] if each != name)[:MAX_SHARING]
        found[name] = Shared(sum(each.bytes for each in common), len(widest) - 1, others)
    return found
