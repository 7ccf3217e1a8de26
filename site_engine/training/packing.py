"""Pack examples into micro-batches without padding, in an order that a seed decides. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import numpy as np

from site_engine.core.training import Recipe
from site_engine.training.data import Example


class Packed(NamedTuple):
    """Sequences one after another; sequence i has the tokens [`begins[i]`, `begins[i + 1]`).

    `ids` and `positions` [tokens]; the tokens at `predicting` predict the `targets`, which are learned.
    """

    ids: np.ndarray
    positions: np.ndarray
    begins: tuple[int, ...]
    predicting: np.ndarray
    targets: np.ndarray


def pack(examples: Sequence[Example]) -> Packed:
    lengths = [len(example.ids) for example in examples]
    ids = np.concatenate([example.ids for example in examples])
    learned = np.flatnonzero(np.concatenate([example.learned for example in examples]))
    positions = np.concatenate([np.arange(length) for length in lengths])
    return Packed(ids, positions, (0, *np.cumsum(lengths).tolist()), learned - 1, ids[learned])


def epoch_order(examples: int, seed: int, epoch: int) -> list[int]:
    """Return the examples in the order of an epoch, the same in every process."""
    order = list(range(examples))
    Random(f"{seed}/{epoch}").shuffle(order)
    return order


def batch_at(step: int, examples: int, recipe: Recipe) -> list[int]:
    """Return the examples of an optimizer step: the position in the data is the step's number alone."""
    epoch, place = divmod(step, recipe.steps_per_epoch(examples))
    size = recipe.batch_size
    return epoch_order(examples, recipe.seed, epoch)[place * size : (place + 1) * size]


def micro_batches(lengths: Sequence[int], limit_tokens: int) -> list[list[int]]:
    """Group sequences by first fit, the longest first; one that is longer than the limit is alone."""
    groups: list[list[int]] = []
    left: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        fitting = next((group for group, room in enumerate(left) if room >= lengths[number]), None)
        if fitting is None:
            groups.append([])
            left.append(limit_tokens)
            fitting = len(groups) - 1
        groups[fitting].append(number)
        left[fitting] -= lengths[number]
    return groups
