"""Sample the rows of a launched step whose requests have rules that the sampling kernel does not know.

All of it is queued behind the step, so that rows without such rules do not wait for the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from site_engine.core.request import Request
from site_engine.cuda.cuda_graph import IN_PROMPT, Step
from site_engine.model.logit_rules import LogitRules, is_penalised, to_device
from site_engine.model.sampler import Alternatives, Ranking


class Ranked:
    """Log probabilities of some rows of a step, on their way to the host."""

    def __init__(self, rows: Sequence[int], ranking: Ranking) -> None:
        self._rows = rows
        self._ranking = ranking

    def read(self) -> dict[int, Alternatives]:
        """Return them by row. The step must have been waited for."""
        return dict(zip(self._rows, self._ranking.read(), strict=True))


class RuledRows:
    """Keeps on the device how often the response of each slot has each token, for penalties."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._slots = slots
        self._device = device
        self._counts = torch.empty(0)  # [slots + 1, vocabulary] from the first use on
        self._counted: dict[int, tuple[Request, int]] = {}  # by slot: whose tokens, and how many of them

    def sample(
        self,
        step: Step,
        rows: Sequence[int],
        requests: Sequence[Request],
        ends: Sequence[int],
        rules: LogitRules,
    ) -> Ranked | None:
        """Replace the tokens of sampled `rows`, which belong to `requests`, by those that their rules give.

        `ends` has the tokens of each request before the one that is sampled; the last of them may be known
        to the device alone. Return the log probabilities of the rows that want them, before any rule.
        """
        assert step.logits is not None
        with torch.inference_mode():
            penalties = self._penalties(rows, requests, ends, step.logits.shape[1])
            logits = step.penalised(penalties, self._counts)
            at = penalties[0].long()
            wanted = [row for row, request in enumerate(requests) if request.sampling.logprobs is not None]
            places = at[to_device(np.array(wanted), self._device)] if wanted else None
            raw = torch.log_softmax(step.logits[places].float(), dim=-1) if places is not None else None
            if rules.apply(requests, logits, ends, penalised=True):
                step.sample_again(at, logits)
            if raw is None or places is None:
                return None
            chosen = step.chosen[places].long().clamp(min=0)
            counts = [requests[row].sampling.logprobs or 0 for row in wanted]
            return Ranked([rows[row] for row in wanted], Ranking(raw, chosen, counts))

    def _penalties(
        self, rows: Sequence[int], requests: Sequence[Request], ends: Sequence[int], vocabulary: int
    ) -> torch.Tensor:
        """Return what `penalise_rows` needs to know of each row, on the device."""
        if not len(self._counts):
            self._counts = torch.zeros(self._slots + 1, vocabulary, dtype=torch.int16, device=self._device)
        numbers = np.zeros((5, len(rows)), dtype=np.int32)
        numbers[0] = rows
        floats = numbers.view(np.float32)
        floats[4] = 1.0
        for place, (request, end) in enumerate(zip(requests, ends, strict=True)):
            if is_penalised(request):
                one = request.sampling
                numbers[1, place] = self._count(request, end)
                floats[2:, place] = one.presence_penalty, one.frequency_penalty, one.repetition_penalty
        return to_device(numbers, self._device)

    def _count(self, request: Request, end: int) -> bool:
        """Return whether the counts of a request lack its last token alone; count the others if need be."""
        counted, self._counted[request.row] = self._counted.get(request.row), (request, end)
        if counted is not None and counted[0] is request and counted[1] == end - 1:
            return True
        times = Counter(request.tokens[request.prompt_len : end])
        seen = {token_id: min(count, IN_PROMPT - 1) for token_id, count in times.items()}
        seen |= {token_id: seen.get(token_id, 0) | IN_PROMPT for token_id in request.prompt}
        its = self._counts[request.row].zero_()
        its[to_device(np.fromiter(seen, np.int64, len(seen)), self._device)] = to_device(
            np.fromiter(seen.values(), np.int16, len(seen)), self._device
        )
        return end > len(request.tokens)
