"""What the attention hook must know of the running iteration, per thread: models drop unknown kwargs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch


class Scoring(NamedTuple):
    """How a layer turns queries and keys into weights."""

    scale: float
    window: int | None = None  # a token sees so many, itself included
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [heads]: weight that goes to no token


class AttentionContext(Protocol):
    """One forward pass. Layers are counted as they call: their own indices differ between families."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """query [heads, tokens, dim], key and value [kv_heads, tokens, dim] -> [tokens, heads, value dim]."""
        ...


_current = threading.local()


def current() -> AttentionContext:
    context: AttentionContext | None = getattr(_current, "context", None)
    if context is None:
        raise RuntimeError("a model under the engine's attention ran outside an iteration")
    return context


@contextmanager
def use(context: AttentionContext) -> Iterator[None]:
    before = getattr(_current, "context", None)
    _current.context = context
    try:
        yield
    finally:
        _current.context = before
