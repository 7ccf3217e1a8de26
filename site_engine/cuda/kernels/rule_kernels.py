"""Triton kernels that change and sample again the logits of some rows of a step, as `logit_rules.py` does.

Where a step's tensors lie is told by numbers in memory, so that one graph serves all steps.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rule_rows(
    addresses,  # [6], int64: of a step's logits, chosen tokens, token ids, and places of sampled tokens
    of_rows,  # [6, ROWS], 32 bits each: sampled row or -1, slot, flags, presence, frequency, repetition
    like,  # [1], of the type of the logits
    counts,  # [slots, vocabulary], int16: times that a response has a token; IN_PROMPT: the prompt has it
    allowed,  # [ROWS, words]: bits of the tokens that a row with MASKED may have
    changed,  # [ROWS, vocabulary], float32: the result
    vocabulary,
    words,
    ROWS: tl.constexpr,
    PENALISED: tl.constexpr,
    COUNTING: tl.constexpr,
    MASKED: tl.constexpr,
    IN_PROMPT: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Write one span of the logits of each row with its penalties, and -inf where its grammar forbids.

    Where a row is COUNTING, its last token is counted before.
    """
    row = tl.program_id(0)
    sampled = tl.load(of_rows + row).to(tl.int64)
    if sampled >= 0:
        flags = tl.load(of_rows + 2 * ROWS + row)
        place = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
        here = place < vocabulary
        logits = tl.load(addresses).to(like.dtype)
        values = tl.load(logits + sampled * vocabulary + place, mask=here, other=0.0).to(tl.float32)
        if (flags & PENALISED) != 0:
            wanted = tl.load(addresses + 3).to(addresses.dtype)
            newest = tl.load(tl.load(addresses + 2).to(addresses.dtype) + tl.load(wanted + sampled))
            its = counts + tl.load(of_rows + ROWS + row).to(tl.int64) * vocabulary + place
            count = tl.load(its, mask=here, other=0).to(tl.int32)
            new = here & (place == newest) & ((flags & COUNTING) != 0)
            new &= (count & (IN_PROMPT - 1)) < IN_PROMPT - 1
            count += new.to(tl.int32)
            tl.store(its, count.to(tl.int16), mask=new)
            times = (count & (IN_PROMPT - 1)).to(tl.float32)
            repetition = tl.load(of_rows + 5 * ROWS + row).to(tl.float32, bitcast=True)
            repeated = tl.where(values > 0, values / repetition, values * repetition)
            values = tl.where(count != 0, repeated, values)
            values -= tl.load(of_rows + 4 * ROWS + row).to(tl.float32, bitcast=True) * times
            presence = tl.load(of_rows + 3 * ROWS + row).to(tl.float32, bitcast=True)
            values -= tl.where(times > 0, presence, 0.0)
        if (flags & MASKED) != 0:
            word = tl.load(allowed + row * words + place // 32, mask=here, other=0)
            values = tl.where(((word >> (place % 32)) & 1) != 0, values, float("-inf"))
        tl.store(changed + row.to(tl.int64) * vocabulary + place, values, mask=here)


@triton.jit
def edit_logits(
    addresses,  # as of `rule_rows`; behind them how many edits there are
    edits,  # [edits, 3], 32 bits each: row, token, what is added; no pair of a row and a token twice
    changed,  # [ROWS, vocabulary], float32
    vocabulary,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Add to single logits."""
    count = tl.load(addresses + 4).to(tl.int32)
    for first in range(tl.program_id(0) * BLOCK, count, PROGRAMS * BLOCK):
        at = first + tl.arange(0, BLOCK)
        here = at < count
        row = tl.load(edits + 3 * at, mask=here, other=0).to(tl.int64)
        its = changed + row * vocabulary + tl.load(edits + 3 * at + 1, mask=here, other=0)
        added = tl.load(edits + 3 * at + 2, mask=here, other=0).to(tl.float32, bitcast=True)
        tl.store(its, tl.load(its, mask=here, other=0.0) + added, mask=here)


@triton.jit
def settle_rows(
    addresses,  # as of `rule_rows`, as `of_rows`
    of_rows,
    chosen,  # [ROWS]: the tokens sampled from changed logits
    ROWS: tl.constexpr,
):
    """Give each row its new token, but for those whose unchanged logits were not finite."""
    row = tl.arange(0, ROWS)
    sampled = tl.load(of_rows + row)
    here = sampled >= 0
    to = tl.load(addresses + 1).to(chosen.dtype) + sampled
    first = tl.load(to, mask=here, other=0)
    tl.store(to, tl.load(chosen + row), mask=here & (first >= 0))
