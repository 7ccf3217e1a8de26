"""Choose how many prompt tokens of batches an iteration computes beside the decoding rows.

An iteration has a fixed time, mostly to read all weights, during which a few more tokens cost less than they
would alone; any prompt also adds a small constant time. Tiny chunks therefore make many iterations longer,
and one large chunk leaves the fixed time of the other iterations unused. A chunk that takes about as long as
the fixed time costs least, if the saving outweighs the constant and decoding rows leave that time unused.
"""

from __future__ import annotations

from math import inf

from site_engine.core.load import CostFit
from site_engine.core.request import Lane

FILLED_SHARE = 0.5
"""If decoding rows use more than this share of the fixed time, prompts are not paced."""
READ_EVERY = 16
"""Calls between two readings of the fit."""
BESIDE_CHATS = 4.0
"""Limit on the time of batch prompts in an iteration beside chats, in multiples of the fixed time. A new
chat waits for the iteration to end; smaller chunks cost throughput if no row decodes beside them.
"""
MIN_BESIDE_CHATS = 256
CHATS_GONE_S = 60.0
"""Seconds without a chat after which the limits beside chats no longer apply."""


class Pace:
    """Computes the prompt tokens per iteration from the fitted cost of iterations."""

    def __init__(self, fit: CostFit) -> None:
        self._fit = fit
        self._asked = 0
        self._fixed = 0  # tokens that take as long as the fixed part of an iteration; 0: unknown
        self._piece = 0  # chunk size with the least cost per token; 0: no limit

    def prompt_tokens(self, rows: int, budget: int) -> int:
        """Return the prompt tokens, at most `budget`, for the next iteration, in which `rows` rows decode."""
        self._read()
        return min(budget, self._piece) if rows < FILLED_SHARE * self._piece else budget

    def beside_chats(self, budget: int) -> int:
        """Return the batch prompt tokens, at most `budget`, for an iteration that may delay a chat."""
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
    """The prompt tokens that requests may compute in an iteration, with limits on batch lines."""

    def __init__(self, fit: CostFit) -> None:
        self.beside_chats = False  # whether chats are present, or were in the last CHATS_GONE_S
        self._pace = Pace(fit)
        self._chat_s = -inf  # when a chat was last present
        self._all = self._batch = self._paced = 0  # tokens left for any request, batch lines, paced lines

    def begin(self, now: float, rows: int, budget: int, has_chats: bool, paced: bool) -> None:
        """Begin an iteration of `budget` prompt tokens in which `rows` rows decode.

        `paced`: prefill-heavy lines are paced in this iteration.
        """
        self._chat_s = now if has_chats else self._chat_s
        self.beside_chats = now - self._chat_s < CHATS_GONE_S
        self._all, pace = budget, self._pace
        self._paced = pace.prompt_tokens(rows, budget) if paced else budget
        self._batch = pace.beside_chats(budget) if self.beside_chats else budget

    def left(self, lane: Lane, paced: bool) -> int:
        """Return the prompt tokens that a request of a lane may still compute; `paced` if it is paced."""
        of_lane = self._batch if lane is Lane.BATCH else self._all
        return min(of_lane, self._paced) if paced else of_lane

    def take(self, tokens: int, lane: Lane, paced: bool) -> None:
        """Deduct planned prompt tokens."""
        self._all -= tokens
        self._batch -= tokens if lane is Lane.BATCH else 0
        self._paced -= tokens if paced else 0
