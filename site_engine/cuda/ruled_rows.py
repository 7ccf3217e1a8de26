"""Sample the rows of a launched step whose requests have rules that the sampling kernel does not know.

All of it is queued behind the step, so that rows without such rules do not wait for the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from site_engine.core.request import Request
from site_engine.cuda.cuda_graph import Step
from site_engine.model.logit_rules import LogitRules, to_device
from site_engine.model.sampler import Alternatives, Ranking


class Ranked:
    """Log probabilities of some rows of a step, on their way to the host."""

    def __init__(self, rows: Sequence[int], ranking: Ranking) -> None:
        self._rows = rows
        self._ranking = ranking

    def read(self) -> dict[int, Alternatives]:
        """Return them by row. The step must have been waited for."""
        return dict(zip(self._rows, self._ranking.read(), strict=True))


def sample_ruled(
    step: Step, rows: Sequence[int], requests: Sequence[Request], ends: Sequence[int], rules: LogitRules
) -> Ranked | None:
    """Replace the tokens of sampled `rows`, which belong to `requests`, by those that their rules give.

    `ends` has the tokens of each request before the one that is sampled. Return the log probabilities of
    the rows that want them, before any rule.
    """
    assert step.logits is not None
    device = step.logits.device
    with torch.inference_mode():
        at = to_device(np.array(rows), device)
        logits = step.logits[at].float()
        wanted = [row for row, request in enumerate(requests) if request.sampling.logprobs is not None]
        places = to_device(np.array(wanted), device) if wanted else None
        raw = torch.log_softmax(logits[places], dim=-1) if places is not None else None
        if rules.apply(requests, logits, ends, step.newest(at)):
            step.sample_again(at, logits)
        if raw is None or places is None:
            return None
        chosen = step.chosen[at[places]].long().clamp(min=0)
        counts = [requests[row].sampling.logprobs or 0 for row in wanted]
        return Ranked([rows[row] for row in wanted], Ranking(raw, chosen, counts))
