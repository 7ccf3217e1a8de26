"""Wrap the attention call in one opaque operator, so that a compiled layer stays one graph.

The operator reads the current context when it runs; nothing of a step is compiled in.
"""

from __future__ import annotations

import torch

from site_engine.model import attention_context


@torch.library.custom_op("mico::attend", mutates_args=())  # type: ignore[untyped-decorator]
def attend(  # noqa: PLR0917 - the tensors of one call
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Map query, key, value [1, heads, tokens, dim] to [1, tokens, heads, value dim]."""
    scoring = attention_context.Scoring(scale, window, softcap, sinks)
    return attention_context.current().attend(query[0], key[0], value[0], scoring)[None]


@attend.register_fake  # type: ignore[untyped-decorator]
def _(  # noqa: PLR0917 - the tensors of one call
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    del key, scale, window, softcap, sinks
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
