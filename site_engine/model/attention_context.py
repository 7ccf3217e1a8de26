"""Hold the attention context of the running iteration, per thread: models drop unknown keyword arguments."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch


class Scoring(NamedTuple):
    """The parameters with which an attention layer turns queries and keys into weights."""

    scale: float
    window: int | None = None  # tokens that a token attends to, including itself
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [heads]: logits of attention sinks, whose weight goes to no token


class AttentionContext(Protocol):
    """One forward pass. Layers are numbered by the order of calls, since model families index them
    differently.
    """

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Store key and value [kv_heads, tokens, dim] and attend query [heads, tokens, dim] to the context.

        Returns [tokens, heads, value dim].
        """
        ...


_current = threading.local()


def current() -> AttentionContext:
    """Return the running iteration's context. Raises RuntimeError outside an iteration."""
    context: AttentionContext | None = getattr(_current, "context", None)
    if context is None:
        raise RuntimeError("a model under the engine's attention ran outside an iteration")
    return context


@contextmanager
def use(context: AttentionContext) -> Iterator[None]:
    """Make `context` current on this thread."""
    before = getattr(_current, "context", None)
    _current.context = context
    try:
        yield
    finally:
        _current.context = before
