"""The device changes logits by rules and samples again as the host does, for any number of rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support import interpreted  # noqa: F401 - skips where there is no Triton

# isort: split
import numpy as np
import torch
import triton

from site_engine.core.request import MAX_LOGPROBS, Request, Sampling
from site_engine.cuda import rule_graphs
from site_engine.cuda.rule_graphs import IN_PROMPT, RuledRow, RuleGraphs, StepAddresses
from site_engine.cuda.sampling import RULES
from site_engine.model.logit_rules import NO_EDITS, Edits, LogitRules, is_penalised

pytestmark = pytest.mark.slow

VOCAB = 75  # no multiple of a word's bits
CPU = torch.device("cpu")
HERE = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")  # where kernels run
GREEDY = np.zeros((RULES, 70), dtype=np.int32)
KINDS: tuple[Sampling, ...] = (
    Sampling(presence_penalty=0.8, frequency_penalty=0.6),
    Sampling(repetition_penalty=1.7),
    Sampling(logit_bias={3: 9.0, 70: -4.0}),
    Sampling(min_tokens=9, stop_token_ids=(3, 4), logit_bias={3: 50.0}),
    Sampling(frequency_penalty=-0.5, logit_bias={8: 2.0}, min_tokens=9),
)


class OfStep:
    """The tensors of a step of some rows, the first of which belong to nobody with rules."""

    def __init__(self, rows: int, dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(rows)
        self.logits = (2 * torch.randn(rows, VOCAB, generator=draw)).to(HERE, dtype)
        self.chosen = self.logits.float().argmax(-1).int()
        self.ids = torch.randint(VOCAB, (rows,), generator=draw).to(HERE)
        self.wanted = torch.arange(rows, device=HERE)
        self.newest = torch.full((rows + 1,), -1, dtype=torch.int32, device=HERE)

    @property
    def addresses(self) -> StepAddresses:
        return StepAddresses(*(each.data_ptr() for each in (self.logits, self.chosen, self.ids, self.wanted)))


def asked(rows: int, step: OfStep) -> list[Request]:
    """Return requests of all kinds, the last token of each being that of the step."""
    found = []
    for row in range(rows):
        prompt, output = [row % VOCAB, 5], [9, 9, 7, int(step.ids[row])]
        request = Request(f"r{row}", prompt, KINDS[row % len(KINDS)], resumed=output)
        request.row = row
        found.append(request)
    return found


def ruled(requests: Sequence[Request], rules: LogitRules, graphs: RuleGraphs, skipped: int) -> list[RuledRow]:
    """Return the rows from `skipped` on, whose last token the counts of their slots lack."""
    slots = range(len(requests))
    found, edits = [], rules.edits(requests, [len(each.tokens) for each in requests], slots)
    for row, request in list(enumerate(requests))[skipped:]:
        for token_id in request.output[:-1]:
            graphs.counts[row, token_id] += 1
        for token_id in set(request.prompt):
            graphs.counts[row, token_id] |= IN_PROMPT
        one = request.sampling
        penalties = one.presence_penalty, one.frequency_penalty, one.repetition_penalty
        its = (penalties, True) if is_penalised(request) else (None, False)
        found.append(RuledRow(row, row, row, *its, None, edits.get(row, NO_EDITS)))
    return found


@pytest.mark.parametrize(("rows", "dtype"), [(3, torch.float32), (9, torch.bfloat16), (70, torch.float32)])
def test_rows_of_any_number_have_the_tokens_of_the_host(rows: int, dtype: torch.dtype) -> None:
    step, rules = OfStep(rows, dtype), LogitRules((4,), CPU)
    requests, graphs = asked(rows, step), RuleGraphs(step.newest, step.logits)
    changed, before = step.logits.float().cpu().clone(), step.chosen.clone()
    rules.apply(requests, changed)
    graphs.sample(step.addresses, ruled(requests, rules, graphs, 1), GREEDY)
    assert step.chosen[0] == before[0] and step.newest[0] == -1, "a row without rules was touched"
    assert step.chosen[1:].tolist() == changed.argmax(-1)[1:].tolist()
    assert step.newest[1:rows].tolist() == step.chosen[1:].tolist()
    assert (step.chosen != before).any()


def test_a_row_is_counted_once_a_step_and_no_further_than_the_counts_reach() -> None:
    step = OfStep(2)
    graphs = RuleGraphs(step.newest, step.logits)
    graphs.counts[1, int(step.ids[1])] = IN_PROMPT - 2
    rows = [RuledRow(row, row, row, (0.0, 0.1, 1.0), True, None, NO_EDITS) for row in range(2)]
    for _ in range(3):
        graphs.sample(step.addresses, rows, GREEDY)
    assert graphs.counts[0].sum() == graphs.counts[0, int(step.ids[0])] == 3
    assert graphs.counts[1].sum() == IN_PROMPT - 1
    graphs.sample(step.addresses, [each._replace(counting=False) for each in rows], GREEDY)
    assert graphs.counts[0].sum() == 3


def test_what_a_grammar_forbids_is_not_taken_and_rows_of_others_may_have_it() -> None:
    step = OfStep(3)
    graphs, best = RuleGraphs(step.newest, step.logits), step.chosen.tolist()
    bits = np.full(-(-VOCAB // 32), -1, dtype=np.int32)
    bits[best[1] // 32] &= np.int32(~np.uint32(1 << best[1] % 32).view(np.int32))
    bits[best[2] // 32] &= np.int32(~np.uint32(1 << best[2] % 32).view(np.int32))
    free = RuledRow(0, 0, 0, None, counting=False, allowed=None, edits=Edits.of({best[0]: 1.0}))
    graphs.sample(
        step.addresses,
        [free, *(free._replace(row=row, slot=row, allowed=bits, edits=NO_EDITS) for row in (1, 2))],
        GREEDY,
    )
    assert step.chosen[0] == best[0]
    for row in (1, 2):
        left = step.logits[row].clone()
        left[[best[1], best[2]]] = float("-inf")
        assert step.chosen[row] == left.argmax()


def test_more_edits_than_a_graph_holds_take_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_graphs, "MAX_EDITS", 3)
    step, rules = OfStep(9), LogitRules((4,), CPU)
    requests, graphs = asked(9, step), RuleGraphs(step.newest, step.logits)
    changed = step.logits.cpu().clone()
    rules.apply(requests, changed)
    graphs.sample(step.addresses, ruled(requests, rules, graphs, 0), GREEDY)
    assert step.chosen.tolist() == changed.argmax(-1).tolist()


def test_a_row_that_was_not_finite_keeps_its_mark() -> None:
    step = OfStep(2)
    step.chosen[1] = -7
    graphs = RuleGraphs(step.newest, step.logits)
    row = RuledRow(1, 1, 1, None, counting=False, allowed=None, edits=Edits.of({5: 99.0}))
    graphs.sample(step.addresses, [row._replace(row=0, slot=0), row], GREEDY)
    assert step.chosen.tolist() == [5, -7]


@pytest.mark.parametrize("best", [0, 3, MAX_LOGPROBS, 2 * MAX_LOGPROBS])
@pytest.mark.parametrize("span", [16, rule_graphs.SPAN])
def test_any_number_of_rows_is_ranked_by_what_the_model_said(
    best: int, span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule_graphs, "SPAN", span)
    step = OfStep(70)
    graphs = RuleGraphs(step.newest, step.logits)
    step.chosen[3] = -1 - step.chosen[3]  # its logits were not finite: what it ranks is not read
    rows = [row for row in range(70) if row != 1]
    queued, best = graphs.rank(step.addresses, rows, best), min(best, MAX_LOGPROBS)
    if HERE.type == "cuda":
        torch.cuda.synchronize()
    found = [each for some in queued for each in some.tolist()]
    logprobs = torch.log_softmax(step.logits, dim=-1).cpu()
    for row, (ids, numbers) in zip(rows, found, strict=True):
        chosen, known = max(int(step.chosen[row]), 0), logprobs[row].topk(best)
        assert ids[: 1 + best] == [chosen, *known.indices.tolist()]
        expected = [float(logprobs[row, chosen]), *known.values.tolist()]
        assert numbers[: 1 + best] == pytest.approx(expected, abs=1e-5)


def test_one_row_may_have_more_edits_than_rows_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_graphs, "MAX_EDITS", 3)
    monkeypatch.setattr(rule_graphs, "ROWS", (4,))
    step, rules = OfStep(1), LogitRules((), CPU)
    biases = {token_id: -50.0 for token_id in range(VOCAB) if token_id != 60}
    request = Request("much", [1], Sampling(logit_bias=biases))
    graphs = RuleGraphs(step.newest, step.logits)
    graphs.sample(step.addresses, ruled([request], rules, graphs, 0), GREEDY)
    assert step.chosen.tolist() == [60]
