"""Choose how many prompt tokens of batches an iteration computes beside the rows that decode.

An iteration takes a fixed time, above all to read all weights, in which it computes a few tokens besides for
less than they cost alone; with any prompt it takes a little longer. So prompts cost most in tiny pieces,
which make many iterations longer, and all at once they use none of the time that passes anyway. A piece that
takes about as long as the fixed part costs least, where the one outweighs the other and rows have left that
time unused.
"""

from __future__ import annotations

from site_engine.core.load import CostFit

FILLED_SHARE = 0.5
"""Rows that take more than this share of the fixed time leave too little of it: prompts then run at once."""
READ_EVERY = 16
"""Iterations between two readings of the fit."""


class Pace:
    """The prompt tokens of each iteration, by what iterations have taken so far."""

    def __init__(self, fit: CostFit) -> None:
        self._fit = fit
        self._iterations = 0
        self._piece = 0  # tokens that cost least together; 0: as many as there are

    def prompt_tokens(self, rows: int, budget: int) -> int:
        """Return the prompt tokens, of `budget` at most, for the next iteration, in which `rows` decode."""
        if self._iterations % READ_EVERY == 0:
            self._piece = best_piece(self._fit)
        self._iterations += 1
        return min(budget, self._piece) if rows < FILLED_SHARE * self._piece else budget


def best_piece(fit: CostFit) -> int:
    """Return the prompt tokens that cost least in one iteration, 0 if more of them cost less."""
    cost = fit.cost()
    if not cost.per_token_s:
        return 0
    piece = int(cost.base_s / cost.per_token_s)
    return piece if fit.saved_s(piece) > 0 else 0
