"""Split a model's layers over several ranks, by the names and shapes of its tensors alone.

As Megatron-LM splits them (Shoeybi et al., 2019, section 3): query, key, value, gate and up by columns of
their output, output and down by rows of their input, so that a layer needs two sums over the ranks. All else
is on every rank: the embedding, the norms and the vocabulary head, so that each rank takes the same token
from the same logits and none are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from site_engine.errors import ModelNotSupported

FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM")
"""The models whose layers have these projections and no others."""
BY_COLUMNS = ("q_proj", "gate_proj", "up_proj")
BY_KV_HEADS = ("k_proj", "v_proj")
BY_ROWS = ("o_proj", "down_proj")


class Sizes(NamedTuple):
    """The sizes of a model that are divided over the ranks."""

    heads: int
    kv_heads: int
    width: int  # of the MLP

    def of_rank(self, ranks: int) -> Sizes:
        """Return the sizes of one rank; with more ranks than KV heads several have the same one."""
        return Sizes(self.heads // ranks, max(1, self.kv_heads // ranks), self.width // ranks)


class Part(NamedTuple):
    """The part of a tensor that a rank keeps: [begin, end) of rows of the tensor, or of its columns.

    `zero`: only the first rank keeps it, the others have zeros in its place.
    """

    rows: tuple[int, int]
    columns: tuple[int, int] | None = None
    zero: bool = False


def sizes_of(config: Mapping[str, Any], ranks: int) -> Sizes:
    """Return the sizes of a model by its config.json. Raises ModelNotSupported if they can't be split."""
    family = (config.get("architectures") or ["a model without architectures"])[0]
    if family not in FAMILIES:
        raise ModelNotSupported(f"{family} cannot be split over {ranks} devices, {', '.join(FAMILIES)} can")
    heads = int(config["num_attention_heads"])
    sizes = Sizes(heads, int(config.get("num_key_value_heads") or heads), int(config["intermediate_size"]))
    for name, count in (("attention heads", sizes.heads), ("columns of the MLP", sizes.width)):
        if count % ranks:
            raise ModelNotSupported(f"{count} {name} cannot be divided over {ranks} devices")
    if sizes.kv_heads % ranks and ranks % sizes.kv_heads:
        raise ModelNotSupported(
            f"{sizes.kv_heads} KV heads can neither be divided over {ranks} devices nor each be on several"
        )
    return sizes


def part_of(name: str, shape: tuple[int, ...], sizes: Sizes, rank: int, ranks: int) -> Part:
    """Return the part of a tensor [rows, columns], or [rows], that a rank keeps.

    A weight's rows are the columns of the product. A bias that is added after the sum over the ranks is the
    first rank's.
    """
    module, kind = name.rsplit(".", 2)[-2:] if name.count(".") > 1 else ("", "")
    count = shape[0]
    if module in BY_COLUMNS:
        return Part((rank * count // ranks, (rank + 1) * count // ranks))
    if module in BY_KV_HEADS:
        first, dim = rank * sizes.kv_heads // ranks, count // sizes.kv_heads
        return Part((first * dim, (first + sizes.of_rank(ranks).kv_heads) * dim))
    if module in BY_ROWS and kind == "weight":
        return Part((0, count), (rank * shape[1] // ranks, (rank + 1) * shape[1] // ranks))
    return Part((0, count), zero=module in BY_ROWS and rank > 0)


def part_shape(part: Part, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a part of a tensor."""
    rows = part.rows[1] - part.rows[0]
    if part.columns is None:
        return (rows, *shape[1:])
    return rows, part.columns[1] - part.columns[0]
