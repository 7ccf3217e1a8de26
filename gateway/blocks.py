"""Describe the memory of a site's models for operators, as announced by the site. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

MAX_SHARING = 8
"""The number of models that are listed by name as sharing a part; the others are only counted."""


class BlockKind(StrEnum):
    OTHER = "other"  # of a kind unknown to this version
    BASE = "base"  # all weights of a base
    SLOTS = "slots"  # preallocated room for adapters, used or not
    EMBEDDING = "embedding"
    LAYERS = "layers"
    HEAD = "head"
    ADAPTER = "adapter"


class Block(NamedTuple):
    """A part of a model that a site stores once. `id` identifies its contents; empty if it is not shared.

    `LAYERS` are decoder layers `first` to `last` - 1. `in_host`: whether it waits in host memory for a slot.
    """

    id: bytes
    kind: BlockKind
    first: int
    last: int
    bytes: int
    in_host: bool = False


class Memory(NamedTuple):
    """The bytes of a site's models on each of its devices and in host memory. Shared parts count once.

    `own_bytes`: the parts outside of base and slots. Slots have a fixed size, used or not.
    """

    base_bytes: int
    slots_bytes: int
    own_bytes: int
    host_bytes: int


class Shared(NamedTuple):
    """The parts of a model that other models of the site share. `bytes`: their size. `models`: how many other
    models have the most shared part. `names`: the names of up to MAX_SHARING of these.
    """

    bytes: int = 0
    models: int = 0
    names: tuple[str, ...] = ()


def memory(awake: Sequence[tuple[Block, ...]]) -> Memory:
    """Return the memory of the awake models, given the blocks of each."""
    blocks = {each for model in awake for each in model}
    sizes = {kind: sum(each.bytes for each in blocks if each.kind is kind) for kind in BlockKind}
    base_bytes, slots_bytes = sizes[BlockKind.BASE], sizes[BlockKind.SLOTS]
    host_bytes = sum(each.bytes for each in blocks if each.in_host)
    in_slots = {BlockKind.ADAPTER} if slots_bytes else frozenset()
    own = (each for each in blocks if each.kind not in {BlockKind.BASE, BlockKind.SLOTS, *in_slots})
    return Memory(base_bytes, slots_bytes, sum(each.bytes for each in own if not each.in_host), host_bytes)


def sharing(models: Mapping[str, tuple[Block, ...]]) -> dict[str, Shared]:
    """Return the shared parts of each model, by name."""
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
