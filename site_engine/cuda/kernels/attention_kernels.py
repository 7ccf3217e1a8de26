"""Triton kernels for the attention of one layer over paged keys and values: write, decode, prefill.

Pages may hold anything, NaN included: masked slots are never loaded. Strides count elements. Softmax runs in
base 2 (`scale2` = scale · log2 e), with float32 sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
FAR_BELOW = tl.constexpr(-1e30)  # finite, so that the difference of two is a number
JOINED = tl.constexpr(4)  # parts of a row whose loads are under way together


@triton.jit
def write_kv(
    key,  # [tokens, kv_heads, key_dim]
    value,  # [tokens, kv_heads, value_dim]
    keys,  # [slots, kv_heads, key_dim], as `values`
    values,
    slots,  # [tokens]: where each token goes
    key_token,
    key_head,
    value_token,
    value_head,
    KV_HEADS: tl.constexpr,
    KV_HEADS_PAD: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
):
    """Write keys and values into their slots, one program per token; skip tokens of slot 0."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot == 0:
        return
    heads = tl.arange(0, KV_HEADS_PAD)
    dims = tl.arange(0, KEY_PAD)
    keep = (heads < KV_HEADS)[:, None] & (dims < KEY_DIM)[None, :]
    new = tl.load(key + token * key_token + heads[:, None] * key_head + dims[None, :], mask=keep)
    tl.store(keys + (slot * KV_HEADS + heads[:, None]) * KEY_DIM + dims[None, :], new, mask=keep)
    dims = tl.arange(0, VALUE_PAD)
    keep = (heads < KV_HEADS)[:, None] & (dims < VALUE_DIM)[None, :]
    new = tl.load(value + token * value_token + heads[:, None] * value_head + dims[None, :], mask=keep)
    tl.store(values + (slot * KV_HEADS + heads[:, None]) * VALUE_DIM + dims[None, :], new, mask=keep)


@triton.jit
def rotate_heads(
    heads,  # [tokens, HEADS, DIM], in place
    positions,  # [tokens]
    slots,  # [tokens]; 0: leave this one
    cosines,  # [positions, DIM]
    sines,
    token_stride,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """Rotate queries and keys that lie side by side, in place."""
    token = tl.program_id(0).to(tl.int64)
    if tl.load(slots + token) == 0:
        return
    place = tl.load(positions + token).to(tl.int64) * DIM
    head = tl.arange(0, HEADS_PAD)[:, None]
    dim = tl.arange(0, HALF_PAD)[None, :]
    half: tl.constexpr = DIM // 2
    seen = dim < half
    here = (head < HEADS) & seen
    at = heads + token * token_stride + head * DIM + dim
    low = tl.load(at, mask=here, other=0.0).to(tl.float32)
    high = tl.load(at + half, mask=here, other=0.0).to(tl.float32)
    cos_low = tl.load(cosines + place + dim, mask=seen, other=0.0).to(tl.float32)
    cos_high = tl.load(cosines + place + half + dim, mask=seen, other=0.0).to(tl.float32)
    sin_low = tl.load(sines + place + dim, mask=seen, other=0.0).to(tl.float32)
    sin_high = tl.load(sines + place + half + dim, mask=seen, other=0.0).to(tl.float32)
    tl.store(at, (low * cos_low - high * sin_low).to(heads.dtype.element_ty), mask=here)
    tl.store(at + half, (high * cos_high + low * sin_high).to(heads.dtype.element_ty), mask=here)


@triton.jit
def decode_rows(
    query,  # [tokens, heads, key_dim]; row i is token i
    key,
    value,
    keys,
    values,
    table,  # [rows of the table, pages]
    items,  # [work, 4]: row, chunk, tokens of the row with the new one, its row of the table; see DecodeWork
    out,  # [tokens, heads, value_dim], contiguous
    parts,  # [work, heads, value_dim], float32; with `tops` and `sums` [work, heads] only if SPLIT
    tops,
    sums,
    arrived,  # [rows, kv_heads], zeros before and after
    sinks,  # [heads]
    cosines,  # [positions, key_dim], as `sines`; only if ROTARY
    sines,
    scale2,
    softcap,
    query_token,
    query_head,
    key_token,
    key_head,
    value_token,
    value_head,
    table_row,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    WHOLE_PAGES: tl.constexpr,  # a block of keys is a whole number of pages
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROTARY: tl.constexpr,  # query and key come without their rotary embedding; it is applied here
    PDL: tl.constexpr,  # programmatic dependent launch: wait for the kernel before here
):
    """Attend decode rows, one program per chunk of a row's context and KV head.

    The heads of a group are the rows of a program's matrices. The KV heads of a chunk are adjacent programs,
    so they run together and read the same pages.

    Chunks begin at multiples of CHUNK, so a row's sums do not depend on its neighbours. The first takes the
    new token from registers and writes it to its page. The last of a row's chunks to arrive joins them.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    work = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    item = items + work * 4
    row = tl.load(item)
    chunk = tl.load(item + 1)
    length = tl.load(item + 2)
    of_table = tl.load(item + 3).to(tl.int64)
    if row < 0:
        return
    group = tl.arange(0, GROUP_PAD)
    in_group = group < GROUP
    heads = head * GROUP + group
    kdim = tl.arange(0, KEY_PAD)
    vdim = tl.arange(0, VALUE_PAD)
    in_key = kdim < KEY_DIM
    in_value = vdim < VALUE_DIM
    out_at = (row.to(tl.int64) * KV_HEADS * GROUP + heads[:, None]) * VALUE_DIM + vdim[None, :]
    out_keep = in_group[:, None] & in_value[None, :]
    if length == 0:
        tl.store(out + out_at, tl.zeros([GROUP_PAD, VALUE_PAD], out.dtype.element_ty), mask=out_keep)
        return
    row64 = row.to(tl.int64)
    pages = table + of_table * table_row
    q = tl.load(
        query + row64 * query_token + heads[:, None] * query_head + kdim[None, :],
        mask=in_group[:, None] & in_key[None, :],
        other=0.0,
    )
    old = length - 1
    if ROTARY:
        half = (kdim + KEY_DIM // 2) % KEY_DIM
        sign = tl.where(kdim < KEY_DIM // 2, -1.0, 1.0)
        cosine = tl.load(cosines + old * KEY_DIM + kdim, mask=in_key, other=0.0).to(tl.float32)
        sine = tl.load(sines + old * KEY_DIM + kdim, mask=in_key, other=0.0).to(tl.float32) * sign
        q_half = tl.load(
            query + row64 * query_token + heads[:, None] * query_head + half[None, :],
            mask=in_group[:, None] & in_key[None, :],
            other=0.0,
        )
        turned = q.to(tl.float32) * cosine[None, :] + q_half.to(tl.float32) * sine[None, :]
        q = turned.to(q.dtype)
    new_k = tl.load(key + row64 * key_token + head * key_head + kdim, mask=in_key, other=0.0)
    if ROTARY:
        k_half = tl.load(key + row64 * key_token + head * key_head + half, mask=in_key, other=0.0)
        turned_k = new_k.to(tl.float32) * cosine + k_half.to(tl.float32) * sine
        new_k = turned_k.to(new_k.dtype)
    new_v = tl.load(value + row64 * value_token + head * value_head + vdim, mask=in_value, other=0.0)
    newest = chunk == 0  # its sums include the new token, still in registers
    score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale2
    if SOFTCAP:
        score = softcap * LOG2_E * (2.0 * tl.sigmoid(2.0 * score / (softcap * LOG2_E)) - 1.0)
    score = tl.where(newest, score, FAR_BELOW)
    top = score
    total = tl.where(newest, tl.full([GROUP_PAD], 1.0, tl.float32), 0.0)
    if SINKS:
        sink = tl.load(sinks + heads, mask=in_group & newest, other=FAR_BELOW).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
        total = tl.where(newest, tl.exp2(score - top) + tl.exp2(sink - top), 0.0)
    weight = tl.where(newest, tl.exp2(score - top), 0.0)
    acc = weight[:, None] * new_v.to(tl.float32)[None, :]
    first = chunk * CHUNK
    last = old
    if SPLIT:
        last = tl.minimum(old, first + CHUNK)
    if WINDOW > 0:
        first = tl.maximum(first, (length - WINDOW) // BLOCK * BLOCK)
    for at in range(first, last, BLOCK):
        places = at + tl.arange(0, BLOCK)
        seen = places < last
        if WINDOW > 0:
            seen = seen & (places >= length - WINDOW)
        if WHOLE_PAGES:
            which = at // PAGE + tl.arange(0, BLOCK // PAGE)
            page = tl.load(pages + which, mask=which * PAGE < last, other=0).to(tl.int64) * PAGE
            slots = tl.reshape(page[:, None] + tl.arange(0, PAGE)[None, :], [BLOCK])
        else:
            page = tl.load(pages + places // PAGE, mask=seen, other=0).to(tl.int64)
            slots = page * PAGE + places % PAGE
        keep_k = seen[None, :]
        if KEY_DIM < KEY_PAD:
            keep_k = keep_k & in_key[:, None]
        keep_v = seen[:, None]
        if VALUE_DIM < VALUE_PAD:
            keep_v = keep_v & in_value[None, :]
        k = tl.load(
            keys + (slots[None, :] * KV_HEADS + head) * KEY_DIM + kdim[:, None], mask=keep_k, other=0.0
        )
        v = tl.load(
            values + (slots[:, None] * KV_HEADS + head) * VALUE_DIM + vdim[None, :], mask=keep_v, other=0.0
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale2
        if SOFTCAP:
            scores = softcap * LOG2_E * (2.0 * tl.sigmoid(2.0 * scores / (softcap * LOG2_E)) - 1.0)
        scores = tl.where(seen[None, :], scores, FAR_BELOW)
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        if WINDOW > 0:  # else a chunk has a key to see, and what it may not see is far below it
            weights = tl.where(seen[None, :], weights, 0.0)
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher
    if newest:  # last, so that no load waits for it; no program reads it in this step
        slot = tl.load(pages + old // PAGE).to(tl.int64) * PAGE + old % PAGE
        tl.store(keys + (slot * KV_HEADS + head) * KEY_DIM + kdim, new_k, mask=in_key)
        tl.store(values + (slot * KV_HEADS + head) * VALUE_DIM + vdim, new_v, mask=in_value)
    if not SPLIT:
        tl.store(out + out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=out_keep)
    else:
        chunks = tl.maximum(1, (old + CHUNK - 1) // CHUNK)
        if chunks == 1:
            tl.store(out + out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=out_keep)
            return
        part = (work.to(tl.int64) * KV_HEADS * GROUP) + heads
        tl.store(parts + part[:, None] * VALUE_DIM + vdim[None, :], acc, mask=out_keep)
        tl.store(tops + part, top, mask=in_group)
        tl.store(sums + part, total, mask=in_group)
        tl.debug_barrier()  # every thread's stores come before the counter
        counter = arrived + row * KV_HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel") < chunks - 1:
            return
        tl.store(counter, 0)
        top = tl.full([GROUP_PAD], FAR_BELOW, tl.float32)
        total = tl.zeros([GROUP_PAD], tl.float32)
        acc = tl.zeros([GROUP_PAD, VALUE_PAD], tl.float32)
        for some in range(0, chunks, JOINED):
            for near in tl.static_range(JOINED):
                there = some + near < chunks
                part = (work - chunk + some + near).to(tl.int64) * KV_HEADS * GROUP + heads
                keep = in_group & there
                its_top = tl.load(tops + part, mask=keep, other=FAR_BELOW, cache_modifier=".cg")
                its_sum = tl.load(sums + part, mask=keep, other=1.0, cache_modifier=".cg")
                its_acc = tl.load(
                    parts + part[:, None] * VALUE_DIM + vdim[None, :],
                    mask=out_keep & there,
                    other=0.0,
                    cache_modifier=".cg",
                )
                higher = tl.maximum(top, its_top)
                fade = tl.exp2(top - higher)
                weight = tl.exp2(its_top - higher)
                total = total * fade + its_sum * weight
                acc = acc * fade[:, None] + its_acc * weight[:, None]
                top = higher
        tl.store(out + out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=out_keep)


@triton.jit
def prefill_blocks(
    query,  # [tokens, heads, key_dim]
    keys,
    values,
    table,
    blocks,  # [blocks, 4]: first token, row of the table, position of that token, tokens; 0: none
    out,  # [tokens, heads, value_dim], contiguous
    sinks,
    scale2,
    softcap,
    query_token,
    query_head,
    table_row,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    WHOLE_PAGES: tl.constexpr,
    ROWS: tl.constexpr,  # tokens of a block times heads of the group, at most
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Attend prefill chunks, one program per block of tokens and KV head; all keys are read from pages.

    A block with a position below 0 is padding: it attends to nothing and writes zeros.
    """
    block = blocks + tl.program_id(0) * 4
    head = tl.program_id(1)
    count = tl.load(block + 3)
    if count == 0:
        return
    token = tl.load(block).to(tl.int64)
    pages = table + tl.load(block + 1).to(tl.int64) * table_row
    place = tl.load(block + 2)
    rows = tl.arange(0, ROWS)
    mine = rows // GROUP
    heads = head * GROUP + rows % GROUP
    real = mine < count
    places = place + mine
    kdim = tl.arange(0, KEY_PAD)
    vdim = tl.arange(0, VALUE_PAD)
    in_key = kdim < KEY_DIM
    in_value = vdim < VALUE_DIM
    q = tl.load(
        query + (token + mine)[:, None] * query_token + heads[:, None] * query_head + kdim[None, :],
        mask=real[:, None] & in_key[None, :],
        other=0.0,
    )
    top = tl.full([ROWS], FAR_BELOW, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    if SINKS:
        top = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32) * LOG2_E
        total = tl.full([ROWS], 1.0, tl.float32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(0, place - WINDOW + 1) // BLOCK * BLOCK
    end = place + count
    for at in range(first, end, BLOCK):
        theirs = at + tl.arange(0, BLOCK)
        exists = theirs < end
        if WHOLE_PAGES:
            which = at // PAGE + tl.arange(0, BLOCK // PAGE)
            page = tl.load(pages + which, mask=which * PAGE < end, other=0).to(tl.int64) * PAGE
            slots = tl.reshape(page[:, None] + tl.arange(0, PAGE)[None, :], [BLOCK])
        else:
            page = tl.load(pages + theirs // PAGE, mask=exists, other=0).to(tl.int64)
            slots = page * PAGE + theirs % PAGE
        keep_k = exists[None, :]
        if KEY_DIM < KEY_PAD:
            keep_k = keep_k & in_key[:, None]
        keep_v = exists[:, None]
        if VALUE_DIM < VALUE_PAD:
            keep_v = keep_v & in_value[None, :]
        k = tl.load(
            keys + (slots[None, :] * KV_HEADS + head) * KEY_DIM + kdim[:, None], mask=keep_k, other=0.0
        )
        v = tl.load(
            values + (slots[:, None] * KV_HEADS + head) * VALUE_DIM + vdim[None, :], mask=keep_v, other=0.0
        )
        seen = exists[None, :] & (theirs[None, :] <= places[:, None])
        if WINDOW > 0:
            seen = seen & (theirs[None, :] > places[:, None] - WINDOW)
        scores = tl.dot(q, k, input_precision="ieee") * scale2
        if SOFTCAP:
            scores = softcap * LOG2_E * (2.0 * tl.sigmoid(2.0 * scores / (softcap * LOG2_E)) - 1.0)
        scores = tl.where(seen, scores, FAR_BELOW)
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0)
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher
    answer = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out + ((token + mine)[:, None] * KV_HEADS * GROUP + heads[:, None]) * VALUE_DIM + vdim[None, :],
        answer.to(out.dtype.element_ty),
        mask=real[:, None] & in_value[None, :],
    )
