"""Run rows of the base and of its variants in one batch: each module computes its rows group by group.

The rows of every variant are selected by index, never masked: 0 times a number that is not finite is not 0.
Which rows belong to whom is known per thread, as the attention context is, so that a variant is certified
beside the steps of an engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from site_engine.core.loader_turns import released
from site_engine.core.schedule_plan import SchedulePlan
from site_engine.model.host_copies import to_device
from site_engine.model.runner import UseVariants
from site_engine.variants.changes import Change, LoadedVariant

Index: TypeAlias = slice | torch.Tensor
"""Rows of a batch; a slice where they are neighbours."""


class Group(NamedTuple):
    """The rows of one variant among a step's tokens, and among those whose logits are wanted."""

    variant: LoadedVariant
    tokens: Index
    wanted: Index


class BatchRows(NamedTuple):
    """The groups of one step, which has as many `tokens` and `wanted` rows."""

    groups: Sequence[Group]
    tokens: int
    wanted: int

    def changes(self, module: str, count: int) -> list[tuple[Change, Index]]:
        """Return the changes of a module that computes `count` rows, each with the rows that it is for."""
        if count not in {self.tokens, self.wanted}:
            raise RuntimeError(f"{module} computes {count} rows in a step of {self.tokens} tokens")
        return [
            (change, group.tokens if count == self.tokens else group.wanted)
            for group in self.groups
            if (change := group.variant.changes.get(module)) is not None
        ]


_current = threading.local()


@contextmanager
def use(rows: BatchRows | None) -> Iterator[None]:
    """Make `rows` current on this thread; None: all rows are the base's."""
    before = getattr(_current, "rows", None)
    _current.rows = rows
    try:
        yield
    finally:
        _current.rows = before


def rows_of(device: torch.device) -> UseVariants:
    """Return the function that groups the rows of a step for the time of its forward pass."""
    return lambda plan, wanted: use(batch_rows(plan, wanted, device))


def batch_rows(plan: SchedulePlan, wanted: np.ndarray, device: torch.device) -> BatchRows | None:
    """Group the packed tokens of a plan by variant; None if all are the base's."""
    variants: dict[LoadedVariant, int] = {}
    numbers = []
    for request in plan.requests:
        variant: Any = request.variant
        numbers.append(0 if variant is None else variants.setdefault(variant, len(variants) + 1))
    if not variants:
        return None
    owners = np.repeat(numbers, [length for _, _, length, _ in plan.chunks])
    owners_wanted = owners[wanted]
    groups = [
        Group(variant, _index(owners == number, device), _index(owners_wanted == number, device))
        for variant, number in variants.items()
    ]
    return BatchRows(groups, len(owners), len(wanted))


def _index(mask: np.ndarray, device: torch.device) -> Index:
    rows = np.flatnonzero(mask)
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return to_device(rows, device)


class GroupedForward:
    """Stands in for the `forward` of one module of the base; steps of base rows alone take the base's own."""

    def __init__(self, name: str, forward: Callable[..., torch.Tensor]) -> None:
        self._name = name
        self.base = forward

    def __call__(self, given: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        """Map [1, rows, …] to [1, rows, …]."""
        rows: BatchRows | None = getattr(_current, "rows", None)
        changes = [] if rows is None else rows.changes(self._name, given.shape[1])
        if not changes:
            return self.base(given, *more, **named)
        if more or named:
            raise RuntimeError(f"{self._name} takes more than its input, so its rows cannot be grouped")
        own = [(change.own, index) for change, index in changes if change.own is not None]
        out = self._grouped(given, own) if own else self.base(given)
        for change, index in changes:
            if change.bias is not None:
                out[:, index] += change.bias.to(out.device, non_blocking=True)
            if change.low_rank is not None:
                out[:, index] += change.low_rank(given[:, index])
        return out

    def _grouped(self, given: torch.Tensor, own: Iterable[tuple[Any, Index]]) -> torch.Tensor:
        """Compute each row with its own version of the module, the rest with the base's."""
        shared = torch.ones(given.shape[1], dtype=torch.bool)
        parts = []
        with released():  # indexes come from the device
            for module, index in own:
                shared[index if isinstance(index, slice) else index.cpu()] = False
                parts.append((module, index))
            if shared.any():
                parts.append((self.base, shared.nonzero()[:, 0].to(given.device)))
        out = None
        for compute, index in parts:
            part = compute(given[:, index])
            if out is None:
                out = part.new_empty(1, given.shape[1], *part.shape[2:])
            out[:, index] = part
        assert out is not None, "a group has rows"
        return out


def group_module(name: str, module: Any) -> None:
    """Let a module of the base compute groups; done once for each module that some variant changes."""
    if not isinstance(module.__dict__.get("forward"), GroupedForward):
        module.forward = GroupedForward(name, module.forward)
