"""Apply rules that the sampling kernel does not support to rows of a launched step.

All work is queued after the step, so that rows without such rules do not wait for the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from site_engine.core.request import Request
from site_engine.cuda.batch_layout import Numbers
from site_engine.cuda.cuda_graph import Step
from site_engine.cuda.rule_graphs import IN_PROMPT, RuledRow, RuleGraphs
from site_engine.model.host_copies import to_device
from site_engine.model.logit_rules import NO_EDITS, LogitRules, is_penalised
from site_engine.model.sampler import Alternatives


class Ranked:
    """Log probabilities of some rows of a step, whose copy to the host is queued."""

    def __init__(self, wanted: Mapping[int, int], queued: Sequence[torch.Tensor]) -> None:
        """`wanted` has the number of best tokens by row; `queued` is the result of `RuleGraphs.rank`."""
        self._wanted = wanted
        self._queued = queued

    def read(self) -> dict[int, Alternatives]:
        """Return the log probabilities by row. The caller must have waited for the step."""
        found = (row for numbers in self._queued for row in numbers.tolist())
        return {
            row: Alternatives(
                logprobs[0], [int(each) for each in ids[1 : 1 + count]], logprobs[1 : 1 + count]
            )
            for (row, count), (ids, logprobs) in zip(self._wanted.items(), found, strict=True)
        }


class Ruled(NamedTuple):
    """The sampled rows of a step whose requests have rules."""

    rows: Sequence[int]
    requests: Sequence[Request]  # may have ended or released their slots since
    slots: Sequence[int]
    ends: Sequence[int]  # number of tokens before the sampled one
    draws: Numbers  # [RULES, rows]: sampling parameters, as in `SlotRules`


class RuledRows:
    """Sample rows by their rules. Keeps token counts of each slot's response, for penalties."""

    def __init__(self, newest: torch.Tensor) -> None:
        """`newest` [slots + 1] has the last token of each slot, which sampling overwrites."""
        self._newest = newest
        self._graphs: RuleGraphs | None = None  # created on first use
        self._counted: dict[int, tuple[Request, int]] = {}  # by slot: request, tokens counted

    def prepare(self, logits: torch.Tensor) -> RuleGraphs:
        """Compile and capture the kernels for logits like `logits` [any, vocabulary], unless already done."""
        if self._graphs is None:
            self._graphs = RuleGraphs(self._newest, logits)
        return self._graphs

    def sample(self, step: Step, ruled: Ruled, rules: LogitRules) -> Ranked | None:
        """Replace the tokens of ruled rows with tokens sampled by their rules.

        Return the log probabilities, before any rule, of the rows that request them. None: no row does.
        """
        assert step.logits is not None
        with torch.inference_mode():
            graphs = self.prepare(step.logits)
            graphs.begin()
            changed = self._changed(ruled, rules, graphs)
            if changed:
                graphs.sample(step.addresses, changed, ruled.draws)
            pairs = zip(ruled.rows, ruled.requests, strict=True)
            wanted = {row: n for row, request in pairs if (n := request.sampling.logprobs) is not None}
            if not wanted:
                return None
            return Ranked(wanted, graphs.rank(step.addresses, list(wanted), max(wanted.values())))

    def _changed(self, ruled: Ruled, rules: LogitRules, graphs: RuleGraphs) -> list[RuledRow]:
        """Return the rows whose logits are changed by rules."""
        allowed = rules.allowed(ruled.requests, ruled.slots)
        edits = rules.edits(ruled.requests, ruled.ends, ruled.slots)
        changed = []
        for place, (request, slot) in enumerate(zip(ruled.requests, ruled.slots, strict=True)):
            penalties, counting, one = None, False, request.sampling
            if is_penalised(request):
                penalties = one.presence_penalty, one.frequency_penalty, one.repetition_penalty
                counting = self._count(request, slot, ruled.ends[place], graphs.counts)
            elif place not in allowed and place not in edits:
                continue
            its = allowed.get(place), edits.get(place, NO_EDITS)
            changed.append(RuledRow(place, ruled.rows[place], slot, penalties, counting, *its))
        return changed

    def _count(self, request: Request, slot: int, end: int, counts: torch.Tensor) -> bool:
        """Return whether a request's counts lack only its last token. Recount first if they are outdated."""
        counted, self._counted[slot] = self._counted.get(slot), (request, end)
        if counted is not None and counted[0] is request and counted[1] == end - 1:
            return True
        times = Counter(request.tokens[request.prompt_len : end])
        seen = {token_id: min(count, IN_PROMPT - 1) for token_id, count in times.items()}
        seen |= {token_id: seen.get(token_id, 0) | IN_PROMPT for token_id in request.prompt}
        its = counts[slot].zero_()
        its[to_device(np.fromiter(seen, np.int64, len(seen)), its.device)] = to_device(
            np.fromiter(seen.values(), np.int16, len(seen)), its.device
        )
        return end > len(request.tokens)
