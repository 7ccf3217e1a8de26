"""Launch the kernels that sample the next token of each row."""

from __future__ import annotations

import torch

from site_engine.cuda.attention_launch import pdl_kwargs
from site_engine.cuda.kernels import layer_kernels, sampling_kernels

ARGMAX_SPAN = 8192
SAMPLE_SPAN = 8192


def sample(
    logits: torch.Tensor,
    rules: torch.Tensor,
    owner: torch.Tensor,
    newest: torch.Tensor,
    chosen: torch.Tensor,
    *,
    pdl: bool,
) -> None:
    """Sample a token per row of logits [rows, vocabulary] into `chosen` [rows] and its slot's `newest`.

    `rules` [RULES, rows] is filled by `SlotRules`; `owner` [rows] has the slots. For rows with non-finite
    logits, `chosen` is negative.
    """
    rows, vocabulary = logits.shape
    spans = -(-vocabulary // ARGMAX_SPAN)
    tops = torch.empty(rows, spans, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, spans, dtype=torch.int32, device=logits.device)
    layer_kernels.best_of_span[(rows, spans)](
        logits, tops, places, vocabulary, logits.stride(0), SPAN=ARGMAX_SPAN, num_warps=8,
        PDL=pdl, **pdl_kwargs(pdl),
    )  # fmt: skip
    layer_kernels.best_of_row[(rows,)](
        tops, places, owner, newest, chosen, spans,
        SPANS_PAD=1 << (spans - 1).bit_length(), num_warps=1, PDL=pdl, **pdl_kwargs(pdl),
    )  # fmt: skip
    sampling_kernels.sample_rows[(rows,)](
        logits, rules, owner, newest, chosen, vocabulary, logits.stride(0), rows,
        SPAN=SAMPLE_SPAN, SPANS_PAD=1 << (-(-vocabulary // SAMPLE_SPAN) - 1).bit_length(),
        BITS=8 * logits.element_size(), num_warps=16, PDL=pdl, **pdl_kwargs(pdl),
    )  # fmt: skip
