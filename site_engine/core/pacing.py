"""Choose how many prompt tokens of batches an iteration computes beside the rows that decode.

An iteration takes a fixed time, above all to read all weights, in which it computes a few tokens besides for
less than they cost alone; with any prompt it takes a little longer. So prompts cost most in tiny pieces,
which make many iterations longer, and all at once they use none of the time that passes anyway. A piece that
takes about as long as the fixed part costs least, where the one outweighs the other and rows have left that
time unused.
"""

from __future__ import annotations

from math import inf

from site_engine.core.load import CostFit
from site_engine.core.request import Lane

FILLED_SHARE = 0.5
"""Rows that take more than this share of the fixed time leave too little of it: prompts then run at once."""
READ_EVERY = 16
"""Questions between two readings of the fit."""
BESIDE_CHATS = 4.0
"""The time that prompts of batches take in an iteration beside chats, times its fixed part: a chat that comes
meanwhile waits for its end. Smaller pieces cost throughput where no row decodes beside them.
"""
MIN_BESIDE_CHATS = 256
CHATS_GONE_S = 60.0
"""Seconds without a chat after which batches have a site for themselves."""


class Pace:
    """The prompt tokens of each iteration, by what iterations have taken so far."""

    def __init__(self, fit: CostFit) -> None:
        self._fit = fit
        self._asked = 0
        self._fixed = 0  # tokens that take as long as the fixed part of an iteration; 0: unknown
        self._piece = 0  # tokens that cost least together; 0: as many as there are

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
    """The prompt tokens that requests may compute in an iteration: those of batches are limited."""

    def __init__(self, fit: CostFit) -> None:
        self.beside_chats = False  # or shortly after one
        self._pace = Pace(fit)
        self._chat_s = -inf  # when a chat was last here
        self._all = self._batch = self._paced = 0  # tokens left: of any request, of batches, of paced lines

    def begin(self, now: float, rows: int, budget: int, has_chats: bool, paced: bool) -> None:
        """Begin an iteration of `budget` prompt tokens, in which `rows` decode; `paced`: lines are."""
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
