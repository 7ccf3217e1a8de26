"""The paged attention kernels against attention written out plainly; free pages and dead slots hold NaN."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from tests.support import interpreted  # noqa: F401 - skips where there is no Triton

# isort: split
from site_engine.cuda import attention_launch
from site_engine.cuda.attention_launch import DecodeWork, PrefillWork, RotaryTable, Tile
from site_engine.model.attention_context import Scoring

pytestmark = pytest.mark.slow

ROWS = (1, 7, 33, 90, 64, 0)  # contexts of decode rows; 0 is padding
PROMPTS = ((7, 7), (5, 50), (20, 20))  # (new tokens, tokens in all)
PAGES = 400
SMALL = Tile(16, 2, 1)


class Case(NamedTuple):
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    page: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    chunk: int = 32


CASES = {
    "token pages": Case(4, 4, 16, 16, 1, chunk=16),
    "grouped heads": Case(4, 2, 16, 16, 16),
    "unequal key and value": Case(8, 2, 24, 16, 4),
    "window": Case(4, 2, 16, 16, 16, window=10),
    "softcap, odd width": Case(4, 1, 80, 80, 16, softcap=3.0),
    "window and sinks": Case(4, 2, 16, 16, 8, window=12, sinks=True, chunk=16),
    "seven heads in a group": Case(7, 1, 64, 64, 16, chunk=64),
    "page size not a power of two": Case(4, 2, 16, 16, 6, window=20, softcap=2.0, sinks=True),
}


class Scene:
    """Pages in a random order, everything unused poisoned, one packed step of decode rows and prompts."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.random = torch.Generator().manual_seed(0)
        tokens = len(ROWS) + sum(new for new, _ in PROMPTS)
        self.keys = self._normal(PAGES, case.page, case.kv_heads, case.key_dim)
        self.values = self._normal(PAGES, case.page, case.kv_heads, case.value_dim)
        self.query, self.key, self.value = (
            self._normal(1, tokens, heads, dim).transpose(1, 2)[0]
            for heads, dim in (
                (case.heads, case.key_dim),
                (case.kv_heads, case.key_dim),
                (case.kv_heads, case.value_dim),
            )
        )
        sinks = self._normal(case.heads) if case.sinks else None
        self.scoring = Scoring(case.key_dim**-0.5, case.window, case.softcap, sinks)
        self.totals = [*ROWS, *(total for _, total in PROMPTS)]
        self.table = self._table()

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random)

    def _table(self) -> torch.Tensor:
        page = self.case.page
        table = torch.zeros(len(self.totals) + 1, 100 // page + 2, dtype=torch.int32)
        order = (torch.randperm(PAGES - 1, generator=self.random) + 1).tolist()
        live = torch.zeros(PAGES, page, dtype=torch.bool)
        for row, total in enumerate(self.totals):
            for at in range(0, total, page):
                table[row, at // page] = order.pop()
                live[table[row, at // page], : total - at] = True
        self.keys[~live], self.values[~live] = float("nan"), float("nan")
        return table

    def run(self) -> torch.Tensor:
        case = self.case
        items = [
            (row, chunk, length, row)
            for row, length in enumerate(ROWS)
            for chunk in range(max(1, -(-(length - 1) // case.chunk)))
        ]
        items += [(-1, 0, 0, 0)] * 2
        arrived = torch.zeros(len(ROWS) * case.kv_heads, dtype=torch.int32)
        work = DecodeWork(torch.tensor(items, dtype=torch.int32), arrived, True, case.chunk)
        prompts = self._prompts()
        out = torch.full((self.query.shape[1], case.heads, case.value_dim), float("nan"))
        attention_launch.write(self.key, self.value, self.keys, self.values, prompts.slots)
        attention_launch.decode(
            self.query, self.key, self.value, self.keys, self.values, self.table, work, out, self.scoring,
            tile=SMALL,
        )  # fmt: skip
        attention_launch.prefill(
            self.query, self.keys, self.values, self.table, prompts.blocks, out, self.scoring, SMALL
        )
        assert not arrived.any(), "the counters are ready for the next layer"
        return out

    def _prompts(self) -> PrefillWork:
        step = attention_launch.block_tokens(self.case.heads, self.case.kv_heads)
        slots, blocks, at = torch.zeros(self.query.shape[1], dtype=torch.int32), [(0, 0, 0, 0)], len(ROWS)
        for row, (new, total) in enumerate(PROMPTS, start=len(ROWS)):
            places = torch.arange(total - new, total)
            page = self.table[row, places // self.case.page] * self.case.page
            slots[at : at + new] = page + places % self.case.page
            blocks += [
                (at + i, row, total - new + i, min(step, new - i)) for i in range(0, new, step)
            ]  # fmt: skip
            at += new
        return PrefillWork(slots, torch.zeros_like(slots), torch.tensor(blocks, dtype=torch.int32))

    def plain(self, row: int, begin: int, new: int) -> torch.Tensor:
        """Attention of `new` packed tokens from `begin` on, the last of a row's, written out."""
        case, total = self.case, self.totals[row]
        places = torch.arange(total)
        pages = self.table[row, places // case.page].long()
        group = case.heads // case.kv_heads
        keys, values = (
            of[pages, places % case.page].transpose(0, 1).repeat_interleave(group, 0)
            for of in (self.keys, self.values)
        )
        scores = self.query[:, begin : begin + new] @ keys.transpose(1, 2) * self.scoring.scale
        if case.softcap is not None:
            scores = torch.tanh(scores / case.softcap) * case.softcap
        own = places[total - new :, None]
        seen = places <= own
        if case.window is not None:
            seen &= places > own - case.window
        scores = scores.masked_fill(~seen, float("-inf"))
        if self.scoring.sinks is not None:
            sinks = self.scoring.sinks.view(-1, 1, 1).expand(case.heads, new, 1)
            scores = torch.cat([scores, sinks], -1)
        return (scores.softmax(-1)[..., :total] @ values).transpose(0, 1)


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_compute_attention(name: str) -> None:
    scene = Scene(CASES[name])
    out = scene.run()
    for row, length in enumerate(ROWS):
        if length == 0:
            assert not out[row].any()
        else:
            torch.testing.assert_close(out[row : row + 1], scene.plain(row, row, 1), atol=2e-6, rtol=1e-5)
    at = len(ROWS)
    for row, (new, _) in enumerate(PROMPTS, start=len(ROWS)):
        torch.testing.assert_close(out[at : at + new], scene.plain(row, at, new), atol=2e-6, rtol=1e-5)
        at += new


def test_queries_and_keys_are_turned_like_rotary_embeddings() -> None:
    heads, kv_heads, dim, tokens = 4, 2, 16, 5
    random = torch.Generator().manual_seed(1)
    joint = torch.randn(tokens, heads + kv_heads, dim, generator=random)
    angles = torch.randn(9, dim // 2, generator=random).repeat(1, 2)
    rotary = RotaryTable(angles.cos(), angles.sin())
    positions = torch.tensor([3, 8, 0, 5, 1], dtype=torch.int32)
    slots = torch.tensor([4, 5, 6, 7, 0], dtype=torch.int32)
    low, high = joint.chunk(2, -1)
    at = positions.long()
    wanted = joint * rotary.cosines[at][:, None] + torch.cat([-high, low], -1) * rotary.sines[at][:, None]
    wanted[4] = joint[4]  # not a prompt's token
    split = joint.transpose(0, 1)
    work = PrefillWork(slots, positions, torch.zeros(0, 4, dtype=torch.int32))
    attention_launch.rotate_in_place(split[:heads], split[heads:], work, rotary)
    torch.testing.assert_close(joint, wanted)
