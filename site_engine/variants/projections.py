"""Which modules of a model adapters on a GPU change, and the room of a slot for them.

Plain numbers, without torch: `plan.py` counts with them before there is a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from site_engine.config import SiteConfig

ADAPTER_SLOTS, ADAPTER_RANK, MAX_ADAPTER_RANK = 8, 16, 64
"""Adapters that run at once on a GPU, and the rank of their slots unless a configured one needs more."""
SCALE_BYTES = 4
SERVED_ON_GPU = (
    "engines on a GPU serve LoRA and biases of attention and MLP, own weights of decoder layers, "
    "and prefix tuning"
)
EMBEDDINGS, MAX_VIRTUAL_TOKENS = "prompt_embeddings", 1024
"""The one tensor of prefix tuning, by peft's name, and the most tokens that it may have."""


def largest_rank(config: SiteConfig) -> int:
    """Return the rank that the slots of a site must have, by what the folders of its adapters say; their
    check comes when they load.
    """
    return max(ADAPTER_RANK, *(rank_of(Path(each.adapter)) for each in config.variants if each.adapter), 0)


def rank_of(folder: Path) -> int:
    """Return the rank that an adapter's folder says, 0 where it says none that slots may have."""
    try:
        settings = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        ranks = (settings["r"], *(settings.get("rank_pattern") or {}).values())
        return min(MAX_ADAPTER_RANK, max(map(int, ranks)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


class Projection(IntEnum):
    """The joined projections of a layer."""

    QUERY_KEY_VALUE = 0
    OUTPUT = 1
    GATE_UP = 2
    DOWN = 3


MODULES = {
    Projection.QUERY_KEY_VALUE: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    Projection.OUTPUT: ("self_attn.o_proj",),
    Projection.GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
    Projection.DOWN: ("mlp.down_proj",),
}


NORMS = ("input_layernorm", "post_attention_layernorm")


class Size(NamedTuple):
    """The sizes of a joined projection: its input, the columns of each module in it, and whether they have
    biases, which variants may train.
    """

    depth: int
    columns: tuple[int, ...]
    biased: bool = False


def slot_rank(rank: int) -> int:
    """Return the rank of slots that hold adapters of up to `rank`."""
    return max(ADAPTER_RANK, 1 << (rank - 1).bit_length())


def slot_bytes(sizes: Sequence[Size], layers: int, rank: int, item_bytes: int) -> int:
    """Return the memory of one slot for adapters of up to `rank`."""
    numbers = sum(slot_rank(rank) * (len(each.columns) * each.depth + sum(each.columns)) for each in sizes)
    numbers += sum(sum(each.columns) for each in sizes if each.biased)
    return layers * (numbers * item_bytes + SCALE_BYTES * sum(len(each.columns) for each in sizes))
