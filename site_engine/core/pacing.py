"""Choose how many prompt tokens of batches an iteration computes beside its decode rows.

An iteration has a fixed time, mainly for reading all weights, during which some tokens are computed almost
for free; any prompt makes the iteration a little longer. Very small pieces of prompts therefore lengthen many
iterations, and whole prompts at once leave the fixed time of other iterations unused. A piece that takes
about as long as the fixed part costs least, if the decode rows leave that time unused.
"""

from __future__ import annotations

from math import inf

from site_engine.core.load import CostFit
from site_engine.core.request import Lane

FILLED_SHARE = 0.5
"""If decode rows take more than this share of the fixed time, prompts are not split."""
READ_EVERY = 16
"""Calls between two reads of the fitted cost."""
BESIDE_CHATS = 4.0
"""Time for batch prompts in an iteration beside chats, as a multiple of its fixed part: a new chat waits for
the end of the iteration. Smaller pieces cost throughput when no row decodes beside them.
"""
MIN_BESIDE_CHATS = 256
CHATS_GONE_S = 60.0
"""Seconds without a chat after which batches may use the whole iteration."""


class Pace:
    """The number of prompt tokens of an iteration, from the fitted cost of past iterations."""

    def __init__(self, fit: CostFit) -> None:
        self._fit = fit
        self._asked = 0
        self._fixed = 0  # tokens that take as long as the fixed part of an iteration; 0: unknown
        self._piece = 0  # tokens of the cheapest piece; 0: no limit

    def prompt_tokens(self, rows: int, budget: int) -> int:
        """Return the prompt tokens, of `budget` at most, for the next iteration, in which `rows` decode."""
        self._read()
        return min(budget, self._piece) if rows < FILLED_SHARE * self._piece else budget

    def beside_chats(self, budget: int) -> int:
        """Return the prompt tokens of batches, of `budget` at most, for an iteration that chats wait for."""
        self._read()
        most = max(MIN_BESIDE_CHATS, int(BESIDE_CHATS * self._fixed))
        return min(budget, most) if self._fixed else budget

    def _read(self) -> None:
        if self._asked % READ_EVERY == 0:
            cost = self._fit.cost()
            self._fixed = int(cost.base_s / cost.per_token_s) if cost.per_token_s else 0
            self._piece = self._fixed if self._fit.saved_s(self._fixed) > 0 else 0
        self._asked += 1


class PromptBudget:
    """The prompt tokens that requests may compute in an iteration. Batch lines are limited."""

    def __init__(self, fit: CostFit) -> None:
        self.beside_chats = False  # or shortly after one
        self._pace = Pace(fit)
        self._chat_s = -inf  # last time with a chat
        self._all = self._batch = self._paced = 0  # tokens left: of any request, of batches, of paced lines

    def begin(self, now: float, rows: int, budget: int, has_chats: bool, paced: bool) -> None:
        """Start an iteration of `budget` prompt tokens and `rows` decode rows; `paced`: limit paced lines."""
        self._chat_s = now if has_chats else self._chat_s
        self.beside_chats = now - self._chat_s < CHATS_GONE_S
        self._all, pace = budget, self._pace
        self._paced = pace.prompt_tokens(rows, budget) if paced else budget
        self._batch = pace.beside_chats(budget) if self.beside_chats else budget

    def left(self, lane: Lane, paced: bool) -> int:
        """Return the tokens that a request of a lane may compute, a paced line or another."""
        of_lane = self._batch if lane is Lane.BATCH else self._all
        return min(of_lane, self._paced) if paced else of_lane

    def take(self, tokens: int, lane: Lane, paced: bool) -> None:
        """Count tokens that are computed."""
        self._all -= tokens
        self._batch -= tokens if lane is Lane.BATCH else 0
        self._paced -= tokens if paced else 0
