"""Compiles every Triton kernel for a GPU architecture without a GPU: `python
tests/support/kernel_compile.py 90`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[2]))
from site_engine.cuda.kernels import (
    adapted_gemm_kernels,
    adapter_kernels,
    attention_kernels,
    layer_kernels,
    page_kernels,
    rank_kernels,
    sampling_kernels,
    skinny_gemm_kernels,
    training_kernels,
)

FLOATS = {
    "query", "key", "value", "keys", "values", "out", "logits", "sinks", "cosines", "sines",
    "added", "residual", "weight", "embedding", "gate", "up", "down", "heads", "x", "bias", "biases", "both",
    "total", "inbox", "gradient", "beside", "gate_inner", "up_inner", "gate_factor", "up_factor",
}  # fmt: skip
FLOAT32 = {"parts", "tops", "sums", "shrunk", "scales", "more", "losses", "hits"}
LONGS = {
    "own", "ids", "positions", "wanted_out", "targets", "distances", "rooms", "starts", "pages", "packed",
}  # fmt: skip
PLAIN_FLOATS = {"scale2", "softcap", "epsilon", "factor"}
SCALARS = {"tokens", "samples", "patches", "vocabulary", "row_stride", "spans", "table_row",
    "width", "gate_row", "up_row", "token_stride", "rows", "columns", "depth", "part_depth", "part_stride",
    "slot_stride", "scale_stride", "bias_stride", "count", "inner_row", "shrunk_part_depth", "part_count",
    "first_end", "second_end", "down_stride", "up_stride", "own_stride", "counters", "capacity", "size",
    "offset",
}  # fmt: skip
ALIGNED = ("_token", "_head", "_row", "_stride", "depth", "columns")
LLAMA = {
    "KV_HEADS": 8,
    "GROUP": 4,
    "GROUP_PAD": 16,
    "KEY_DIM": 128,
    "KEY_PAD": 128,
    "VALUE_DIM": 128,
    "VALUE_PAD": 128,
}
QWEN = {
    "KV_HEADS": 2,
    "GROUP": 7,
    "GROUP_PAD": 16,
    "KEY_DIM": 64,
    "KEY_PAD": 64,
    "VALUE_DIM": 64,
    "VALUE_PAD": 64,
}
PAGED = {"PAGE": 16, "WHOLE_PAGES": True, "BLOCK": 64, "WINDOW": 0, "SOFTCAP": False, "SINKS": False}
ODD = {"PAGE": 1, "WHOLE_PAGES": False, "BLOCK": 64, "WINDOW": 100, "SOFTCAP": True, "SINKS": True}
DECODE_OPTIONS = {"num_warps": 2, "num_stages": 4}


def cases(pdl: bool) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    thin = {
        "ROWS_PAD": 16,
        "COLUMNS": 64,
        "DEPTH": 128,
        "BIAS": False,
        "EVEN": True,
        "PDL": pdl,
        "PREFETCH": 2,
    }
    base = thin | {"ROWS": 16, "MORE": 0, "WEIGHT_FIRST": True, "SPLIT": False, "GATED": False}
    adapted = {
        "RANKS": 64, "GROUPS": 1, "SHRUNK_PARTS": 4, "PARTS_PAD": 4, "EXPAND_STAGES": 4, "FEW": True,
        "GATED": False, "BIASED": False, "SPLIT": False, "OWN": False, "TOGETHER": 1,
    }  # fmt: skip
    own = {"OWN": True}
    adapted_rows = adapted_gemm_kernels.adapted_gemm_rows
    decode = [
        (
            attention_kernels.decode_rows,
            {**model, **paged, "CHUNK": 256, "SPLIT": split, "ROTARY": split, "PDL": pdl},
            DECODE_OPTIONS,
        )
        for model, paged, split in ((LLAMA, PAGED, True), (QWEN, PAGED, False), (QWEN, ODD, True))
    ]
    prefill = [
        (attention_kernels.prefill_blocks, {**model, **paged, "ROWS": 128}, {"num_warps": 8, "num_stages": 3})
        for model, paged in ((LLAMA, PAGED), (QWEN, ODD))
    ]
    adapters = [
        (kernel, {"RANK": rank, "WIDTH": more.get("TOGETHER", 1) * rank, **more}, {"num_warps": 4})
        for rank in (16, 64)
        for kernel, more in (
            (adapter_kernels.shrink_rows, {"DEPTH": 128, "GROUPS": 3, "TOGETHER": 1}),
            (adapter_kernels.expand_rows, {"PARTS": 4, "COLUMNS": 128, "BIASED": False}),
            (adapter_kernels.expand_rows, {"PARTS": 1, "COLUMNS": 128, "BIASED": True}),
            (
                adapted_rows,
                thin | adapted | {"GROUPS": 3, "BIASED": True, "COLUMNS": 32},
            ),
            (adapted_rows, thin | adapted | {"SPLIT": True, "ROWS_PAD": 64, "FEW": False}),
            (adapted_rows, thin | adapted | {"GROUPS": 2, "TOGETHER": 2, "GATED": True}),
            (adapted_rows, thin | adapted | {"SPLIT": True} | own),
            (adapted_rows, thin | adapted | {"GROUPS": 2, "GATED": True} | own),
        )
    ]
    large = {"SIZE": 4096, "SIZE_PAD": 4096}
    training = [
        *(
            (training_kernels.sum_norm, {**large, "ADDED": added}, {"num_warps": 8})
            for added in (False, True)
        ),
        *(
            (training_kernels.norm_backward, {**large, "BESIDE": beside}, {"num_warps": 8})
            for beside in (False, True)
        ),
        (training_kernels.rotate, {"SIGN": -1, "HEADS_PAD": 32, "HALF": 64, "HALF_PAD": 64}, {}),
        *(
            (kernel, {"RANK": rank, "RANK_PAD": pad, "ROWS": 32, "COLUMNS": 128}, {})
            for kernel in (training_kernels.gate_forward, training_kernels.gate_backward)
            for rank, pad in ((0, 16), (16, 16), (64, 64))
        ),
        (training_kernels.cross_entropy, {"BACKWARD": True, "BLOCK": 4096}, {"num_warps": 8}),
    ]
    return [
        *decode,
        *prefill,
        *adapters,
        *training,
        (attention_kernels.write_kv, {**LLAMA, "KV_HEADS_PAD": 8}, {"num_warps": 4}),
        (adapter_kernels.prepare_rows, {"COUNT_PAD": 64, "COUNTERS_PAD": 128, "FEW": True}, {"num_warps": 4}),
        (
            adapted_gemm_kernels.owned_gemm_rows,
            {"ROWS_PAD": 64, "COLUMNS": 128, "DEPTH": 64, "BIAS": True, "EVEN": True},
            {"num_warps": 4, "num_stages": 3},
        ),
        (layer_kernels.embed_norm, {"SIZE": 896, "SIZE_PAD": 1024, "OWN": True}, {"num_warps": 4}),
        (layer_kernels.add_norm, {"SIZE": 4096, "SIZE_PAD": 4096, "OWN": False}, {"num_warps": 8}),
        (layer_kernels.silu_times, {"BLOCK": 1024}, {}),
        (attention_kernels.rotate_heads, {"HEADS": 40, "HEADS_PAD": 64, "DIM": 128, "HALF_PAD": 64}, {}),
        (layer_kernels.prepare_inputs, {"BLOCK": 256}, {}),
        *((page_kernels.copy_pages, {"PACK": pack, "BLOCK": 1024}, {}) for pack in (True, False)),
        (layer_kernels.best_of_span, {"SPAN": 8192, "PDL": pdl}, {"num_warps": 8}),
        (layer_kernels.best_of_row, {"SPANS_PAD": 32, "PDL": pdl}, {"num_warps": 1}),
        (
            sampling_kernels.sample_rows,
            {"SPAN": 8192, "SPANS_PAD": 32, "BITS": 16, "PDL": pdl},
            {"num_warps": 16},
        ),
        (skinny_gemm_kernels.skinny_gemm_rows, base | {"SPLIT": True}, {"num_stages": 5}),
        (skinny_gemm_kernels.skinny_gemm_rows, base | {"GATED": True, "ROWS": 64, "MORE": 32}, {}),
        (
            skinny_gemm_kernels.skinny_gemm_rows,
            base | {"BIAS": True, "COLUMNS": 16, "WEIGHT_FIRST": False},
            {},
        ),
        (
            skinny_gemm_kernels.add_parts_norm,
            {"SIZE": 896, "SIZE_PAD": 1024, "PARTS": 4, "OWN": True, "PDL": pdl},
            {"num_warps": 4},
        ),
        (
            rank_kernels.exchange_parts_norm,
            {**large, "RANK": 1, "RANKS": 2, "PARTS": 4, "PDL": pdl},
            {"num_warps": 8},
        ),
    ]


def _type(name: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name in PLAIN_FLOATS:
        return "fp32"
    if name in SCALARS or name.endswith(("_token", "_head")):
        return "i32"
    if name in FLOATS:
        return "*bf16"
    return "*fp32" if name in FLOAT32 else "*i64" if name in LONGS else "*i32"


def compile_all(architecture: int) -> list[str]:
    done = []
    for kernel, given, options in cases(pdl=architecture >= 90):
        constants = {name: given[name] for name in kernel.arg_names if name in given}
        signature = {name: _type(name, constants) for name in kernel.arg_names}
        aligned = {
            (at,): [["tt.divisibility", 16]]
            for at, name in enumerate(kernel.arg_names)
            if signature[name].startswith("*") or name.endswith(ALIGNED)
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        done.append(f"{kernel.__name__}: {len(made.asm['cubin'])} bytes, {made.metadata.shared} shared")
    return done


if __name__ == "__main__":
    print("\n".join(compile_all(int(sys.argv[1]))))
