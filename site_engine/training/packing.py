"""Pack examples into micro-batches without padding, in an order determined by a seed. No side effects."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from site_engine.core.training import Recipe
from site_engine.training.data import Example

PARTS = 8
"""Number of micro-batch sizes up to the limit."""


class Packed(NamedTuple):
    """Concatenated sequences; sequence i has the tokens [`begins[i]`, `begins[i + 1]`).

    `ids` and `positions` have the shape [tokens]. The tokens at `predicting` predict the `targets`, of which
    the first `learned` count towards the loss.
    """

    ids: np.ndarray
    positions: np.ndarray
    begins: tuple[int, ...]
    predicting: np.ndarray
    targets: np.ndarray
    learned: int


def pack(examples: Sequence[Example]) -> Packed:
    lengths = [len(example.ids) for example in examples]
    ids = np.concatenate([example.ids for example in examples])
    learned = np.flatnonzero(np.concatenate([example.learned for example in examples]))
    positions = np.concatenate([np.arange(length) for length in lengths])
    return Packed(ids, positions, (0, *np.cumsum(lengths).tolist()), learned - 1, ids[learned], len(learned))


def pad(packed: Packed, tokens: int, learned_in: int) -> Packed:
    """Pad to `tokens` tokens with one more sequence, and the targets to a multiple of `learned_in`.

    The padding is computed but does not count towards the loss.
    """
    more, targets = tokens - len(packed.ids), -packed.learned % learned_in
    ids, positions = (np.pad(each, (0, more)) for each in (packed.ids, packed.positions))
    predicting, wanted = (np.pad(each, (0, targets)) for each in (packed.predicting, packed.targets))
    begins = (*packed.begins, tokens) if more else packed.begins
    return packed._replace(ids=ids, positions=positions, begins=begins, predicting=predicting, targets=wanted)


def sizes_up_to(limit_tokens: int, longest: int) -> tuple[int, ...]:
    """Return the sizes of micro-batches in ascending order: PARTS fractions of the limit and, if an example
    exceeds the limit and thus is alone in its micro-batch, powers of two times the limit.
    """
    sizes = [-(-limit_tokens * part // PARTS) for part in range(1, PARTS + 1)]
    while sizes[-1] < longest:
        sizes.append(2 * sizes[-1])
    return tuple(dict.fromkeys(sizes))


def fitting_size(sizes: Sequence[int], tokens: int) -> int:
    """Return the smallest size of at least `tokens` tokens. The largest size must be sufficient."""
    return sizes[bisect_left(sizes, tokens)]


@lru_cache(maxsize=8)
def epoch_order(examples: int, seed: int, epoch: int) -> np.ndarray:
    """Return the indices of the examples in an epoch's order. numpy guarantees this generator's stability."""
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    return np.random.RandomState(np.frombuffer(digest, dtype="<u4")).permutation(examples)


def batch_at(step: int, examples: int, recipe: Recipe) -> list[int]:
    """Return the indices of an optimizer step's examples. They depend only on the step and the recipe."""
    epoch, place = divmod(step, recipe.steps_per_epoch(examples))
    size = recipe.batch_size
    return list(map(int, epoch_order(examples, recipe.seed, epoch)[place * size : (place + 1) * size]))


def micro_batches(lengths: Sequence[int], limit_tokens: int) -> list[list[int]]:
    """Group sequence indices by best fit, longest first. A sequence over the limit forms its own group."""
    groups: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # tokens left and index of each group, ascending
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        fitting = bisect_left(rooms, (lengths[number], 0))
        room, group = rooms.pop(fitting) if fitting < len(rooms) else (limit_tokens, len(groups))
        if group == len(groups):
            groups.append([])
        groups[group].append(number)
        insort(rooms, (room - lengths[number], group))
    return groups
