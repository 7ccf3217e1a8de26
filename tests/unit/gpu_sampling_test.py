"""The device draws the tokens that the sampler on the host draws, of the same logits, rules and numbers."""

from __future__ import annotations

import pytest
import torch

from tests.support import interpreted  # noqa: F401 - skips where there is no Triton

# isort: split
import numpy as np

from site_engine.core.request import Request, Sampling
from site_engine.cuda.kernels import sampling_kernels
from site_engine.cuda.sampling import RULES, SlotRules
from site_engine.model.logit_rules import LogitRules
from site_engine.model.sampler import Sampler

pytestmark = pytest.mark.slow

VOCAB = 300
RULED = {
    "temperature": {},
    "hot": {"temperature": 3.0},
    "top k": {"top_k": 5},
    "more than there are": {"top_k": 1000},
    "top p": {"top_p": 0.7},
    "the best alone": {"top_p": 1e-6},
    "all": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    "min p": {"min_p": 0.1},
}


def drawn(requests: list[Request], logits: torch.Tensor, span: int = 128) -> list[int]:
    count = len(requests)
    table = SlotRules(count)
    for row, request in enumerate(requests):
        request.row = row
        table.set(request)
    rules = np.zeros((RULES, count), dtype=np.int32)
    table.fill(rules, np.arange(count, dtype=np.int32), [len(request.tokens) for request in requests])
    chosen = logits.float().argmax(-1).int()
    newest = torch.full((count,), -1, dtype=torch.int32)
    sampling_kernels.sample_rows[(count,)](
        logits, torch.from_numpy(rules).flatten(), torch.arange(count, dtype=torch.int32), newest, chosen,
        VOCAB, logits.stride(0), count, SPAN=span, SPANS_PAD=4, BITS=8 * logits.element_size(), PDL=False,
    )  # fmt: skip
    ruled = [row for row, request in enumerate(requests) if not request.sampling.greedy]
    assert newest[ruled].tolist() == chosen[ruled].tolist()
    return chosen.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULED)
def test_both_draw_the_same(name: str, dtype: torch.dtype) -> None:
    logits = (torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    rules = {"temperature": 1.0} | RULED[name]
    requests = [Request(f"{name} {row}", [1] * (row + 1), Sampling(seed=row, **rules)) for row in range(3)]
    cpu = torch.device("cpu")
    wanted = Sampler(LogitRules((), cpu), cpu).sample(requests, logits.float()).token_ids
    assert drawn(requests, logits) == wanted


def test_greedy_rows_and_rows_that_are_not_finite_are_left_alone() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(4))
    requests = [Request("greedy", [1], Sampling(temperature=0.0)), Request("random", [1], Sampling(seed=1))]
    assert drawn(requests, logits)[0] == logits[0].argmax()


def test_what_is_drawn_follows_the_chances() -> None:
    logits = torch.zeros(100, VOCAB)
    logits[:, 7], logits[:, 200] = 9.0, 9.0 + float(np.log(3.0))
    got = drawn([Request(f"r{one}", [1], Sampling(seed=one)) for one in range(100)], logits, 512)
    assert 60 <= got.count(200) <= 90 and 10 <= got.count(7) <= 40
