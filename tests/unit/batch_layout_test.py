"""Shapes of steps: which kernels a plan needs."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from functools import partial

from site_engine.core.request import Request, Sampling
from site_engine.core.schedule_plan import ScheduledChunk, SchedulePlan
from site_engine.cuda.attention_launch import chunk_tokens
from site_engine.cuda.batch_layout import (
    MIXED_TOKENS,
    Packer,
    PageTables,
    Shape,
    decode_shapes,
    row_buckets,
)

SLOTS, PAGE, KV_HEADS, LONGEST = 64, 16, 2, 2048


def plan(rows: int, context: int, prompt: int) -> SchedulePlan:
    """A plan of `rows` answers after `context` tokens, beside one prompt."""
    decodes = []
    for row in range(rows):
        request = Request(f"answer {row}", (1,) * context, Sampling())
        request.row = row
        decodes.append(ScheduledChunk(request, context, 1, True))
    asked = Request("prompt", (1,) * prompt, Sampling())
    asked.row = rows
    return SchedulePlan(decodes, [ScheduledChunk(asked, 0, prompt, True)] if prompt else [])


def shape_of(packer: Packer, made: SchedulePlan) -> Shape:
    return packer.shape(made, packer.decode_rows(made), patches=0)


@pytest.fixture
def packer() -> Packer:
    tables = PageTables(SLOTS, LONGEST // PAGE, PAGE)
    chunks = partial(chunk_tokens, kv_heads=KV_HEADS)
    return Packer(tables, slots=SLOTS, page_size=PAGE, block_tokens=16, chunk_tokens=chunks)


@pytest.mark.parametrize("context", [8, 100, 700])
@pytest.mark.parametrize("rows", [1, 3, 17, 40, 63])
def test_an_eager_step_takes_decode_kernels_that_mixed_graphs_have(
    packer: Packer, rows: int, context: int
) -> None:
    graphs = [shape for tokens in MIXED_TOKENS for shape in packer.mixed_shapes(tokens, LONGEST)]
    eager = shape_of(packer, plan(rows, context, MIXED_TOKENS[-1] + 1))
    assert not eager.graph
    few = chunk_tokens(1, KV_HEADS)  # compiled by the answers that a start computes beside a long prompt
    known = {(chunk_tokens(shape.samples, KV_HEADS), shape.split) for shape in graphs} | {(few, True)}
    assert (chunk_tokens(eager.samples, KV_HEADS), eager.split) in known


@pytest.mark.parametrize("context", [8, 300, 1_000])
def test_steps_of_equal_contexts_within_half_of_the_longest_have_a_graph_from_the_start(
    packer: Packer, context: int
) -> None:
    made = {
        shape
        for rows in row_buckets(SLOTS)
        for shape in decode_shapes(rows, -(-LONGEST // chunk_tokens(rows, KV_HEADS)))
    }
    missing = [rows for rows in range(1, SLOTS + 1) if shape_of(packer, plan(rows, context, 0)) not in made]
    assert missing == []
