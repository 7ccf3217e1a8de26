"""Decides which kind of line joins those of a blended batch that run, and how many run at once. Pure.

Lines with long prompts take computing, the others memory; sites have some of both as long as there are both.
The longest answer takes an iteration a token whatever runs beside it. Where that is longer than the others
need, they run in few rows until its end rather than in all rows at first: an iteration of 256 rows takes more
than twice as long as one of 50, and one of 50 hardly more than one of 5.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final, NamedTuple

from gateway.batches.order import prefill_heavy
from gateway.batches.values import Line

PREFILL_SHARE: Final = 0.2
"""Of the lines at sites, those with long prompts while there are others: a site always has some of both."""
SPARE: Final = 1.25
"""Lines that run, times those with which all would end with the longest answer: forecasts are wrong, and a
line that ends is replaced only with the next round.
"""

Lines = deque[Line]


class _Answer(NamedTuple):
    """A line that runs: its expected tokens, and the work that was left of the batch when it began."""

    tokens: float
    work_left: float


class Blend:
    """The lines of a batch that run, of both kinds."""

    def __init__(self) -> None:
        self._prefill_heavy = set[int]()
        self._others: dict[int, _Answer] = {}
        self._longest = _Answer(0.0, 0.0)

    def next_end(self, others: Lines, prefill_heavy: Lines, at_sites: int, waiting: int) -> Lines:
        """Return the lines of which the first is next; none if no line should be sent now.

        `at_sites`: the number of lines that all sites take. A share of that is for either kind, and all of it
        for one of which alone there are lines left. `waiting`: those at sites that have not begun there.
        """
        if prefill_heavy and (not others or len(self._prefill_heavy) < PREFILL_SHARE * at_sites):
            return prefill_heavy
        wait_for_memory = waiting > len(self._prefill_heavy)
        return others if wait_for_memory or len(self._others) < self._most_others() else deque()

    def started(self, line: Line, work_left: float) -> None:
        """Enter a line; `work_left`: of the lines without an outcome, this one included."""
        number, response_tokens = line.number, line.response_tokens
        if prefill_heavy(line.prompt_tokens, response_tokens):
            self._prefill_heavy.add(number)
            return
        answer = self._others[number] = _Answer(response_tokens, work_left)
        self._longest = max(self._longest, answer)

    def ended(self, number: int) -> None:
        """Forget a line, whatever its outcome."""
        self._prefill_heavy.discard(number)
        if self._others.pop(number, None) == self._longest:
            self._longest = max(self._others.values(), default=_Answer(0.0, 0.0))

    def _most_others(self) -> float:
        tokens, work_left = self._longest
        return SPARE * work_left / tokens if tokens > 0 else inf
