"""Measure the load of an engine and fit the cost of an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

REMAINING_VALUES = 64
Floats = NDArray[np.float64]


class IterationCost(NamedTuple):
    """Coefficients of seconds = base + per_row x rows + per_token x new tokens + per_kv_token x KV tokens."""

    base_s: float
    per_row_s: float
    per_token_s: float
    per_kv_token_s: float

    def seconds(self, rows: int, tokens: int, kv_tokens: int) -> float:
        return (
            self.base_s + self.per_row_s * rows + self.per_token_s * tokens + self.per_kv_token_s * kv_tokens
        )


NO_COST = IterationCost(0.0, 0.0, 0.0, 0.0)
"""The cost before any iteration was measured."""


class DeviceFigures(NamedTuple):
    """The load of one device of a site with several. `lost`: its engine is restarting. `moved_in` and
    `losses` count since the site's start.
    """

    device: str
    lost: bool
    slots: int
    running: int
    pending: int
    kv_tokens: int
    kv_free_tokens: int
    tokens_per_s: float
    moved_in: int  # requests moved here from other devices
    losses: int  # engines lost on this device


class LoadFigures(NamedTuple):
    """One load report: requests, expected tokens, free KV memory, speed."""

    running: int
    pending: int
    token_load: float  # predicted tokens still to process: the M_k of the MICO paper (section 3.3)
    kv_free_tokens: int
    kv_reserved_tokens: int  # that running requests will need at their peak beyond those held now
    tokens_per_s: float
    seconds_per_iteration: float
    iteration: IterationCost
    running_remaining: tuple[int, ...]  # expected remaining tokens, ascending, at most 64 values
    running_weight: int  # requests that each value represents, rounded up
    pending_prompt_tokens: int
    pending_response_tokens: float
    tokens_total: int
    prompt_tokens_total: int
    unread_tokens: int  # of running requests: uncomputed prompt tokens, and the newest token of each
    longest_iteration_s: float = 0.0  # fitted time of a full batch; 0: unknown
    devices: tuple[DeviceFigures, ...] = ()  # of a site with several devices
    training: int = 0  # running training jobs
    training_s_per_iteration: float = 0.0  # that training adds to an iteration's fitted cost
    kv_extra_tokens: int = 0  # capacity beyond the engine's own memory, from bases that sleep
    computed_tokens_total: int = 0  # uncached prompt tokens and response tokens; 0: unknown
    resident: frozenset[str] = frozenset()  # fingerprints of the variants whose adapters are in slots


class CostFit:
    """Non-negative least squares with exponential forgetting over (1, rows, tokens, KV tokens).

    Iterations are grouped into kinds by their number of prompt tokens, in powers of two, and each kind is
    forgotten separately. Otherwise minutes of decodes alone would erase the cost of a prompt token, and
    iterations with equally long prompts would erase all else.
    """

    FORGET = 0.995  # per iteration of its kind: an average over the last few hundred
    SCALE = (1.0, 1 / 64, 1 / 512, 1 / 65536)  # scales the features to about 1
    RIDGE = 1e-4
    KINDS = 24
    FEW = 8  # with fewer iterations of a kind, its fit is not trusted

    def __init__(self) -> None:
        self._kinds = [_Sums() for _ in range(self.KINDS)]
        self._cost = NO_COST
        self._seen = self._unread = 0  # iterations in total, and since the last solution

    def observe(self, rows: int, tokens: int, kv_tokens: int, seconds: float) -> None:
        """Add one iteration. Plain Python is several times faster than numpy for four numbers."""
        _, per_row, per_token, per_kv = self.SCALE
        features = (1.0, rows * per_row, tokens * per_token, kv_tokens * per_kv)
        self._kinds[self._kind(tokens - rows)].add(features, seconds, self.FORGET)
        self._seen += 1
        self._unread += 1

    def cost(self) -> IterationCost:
        """Return the fitted cost. It may lag by up to FEW iterations."""
        if self._unread > min(self.FEW, self._seen / self.FEW):
            self._unread, self._cost = 0, self._solve()
        return self._cost

    def _solve(self) -> IterationCost:
        """Fit, dropping the most negative coefficient until none is negative: load never lowers the cost."""
        squares, products = self._sum(0)
        active = [0, 1, 2, 3]
        solved = np.zeros(4)
        while active:
            found = np.linalg.solve(squares[np.ix_(active, active)], products[active])
            if found.min() >= 0:
                solved[active] = found
                break
            del active[int(found.argmin())]
        base, row, token, kv = (solved * np.array(self.SCALE)).tolist()
        return IterationCost(base, row, token, kv)

    def saved_s(self, tokens: int) -> float:
        """Return the seconds saved by spreading prompts over one more iteration of at least `tokens` each.

        Positive if prompts use time that an iteration takes anyway, negative if any prompt in an iteration
        costs more than that. inf if too few iterations of so many tokens were measured.
        """
        kind = self._kind(tokens)
        if self._kinds[kind].squares[0][0] < self.FEW:
            return inf
        decodes, prompts = self._kinds[0], self._sum(kind)
        squares, products = np.zeros((5, 5)), np.zeros(5)
        squares[:4, :4], products[:4] = prompts[0] + decodes.squares, prompts[1] + decodes.products
        squares[4, :4] = squares[:4, 4] = prompts[0][0]  # a fifth feature: 1 where there are prompts
        squares[4, 4], products[4] = prompts[0][0, 0] + self.RIDGE, prompts[1][0]
        return -float(np.linalg.solve(squares, products)[4])

    def _kind(self, prompt_tokens: int) -> int:
        return min(self.KINDS - 1, prompt_tokens.bit_length())

    def _sum(self, first: int) -> tuple[Floats, Floats]:
        """Return the sums over kind `first` and all kinds with more prompt tokens."""
        kinds = self._kinds[first:]
        squares: Floats = np.array([each.squares for each in kinds]).sum(axis=0) + np.eye(4) * self.RIDGE
        products: Floats = np.array([each.products for each in kinds]).sum(axis=0)
        return squares, products


class _Sums:
    """The sums of squares and products of past iterations from which least squares are solved."""

    def __init__(self) -> None:
        self.squares = [[0.0] * 4 for _ in range(4)]
        self.products = [0.0] * 4

    def add(self, features: tuple[float, float, float, float], seconds: float, forget: float) -> None:
        for squares, one in zip(self.squares, features, strict=True):
            for at, other in enumerate(features):
                squares[at] = squares[at] * forget + one * other
        for at, one in enumerate(features):
            self.products[at] = self.products[at] * forget + one * seconds


class Meter:
    """Counts tokens and iterations. Rates are averages that fade over the last busy seconds."""

    FADE_S = 3.0

    def __init__(self) -> None:
        self.fit = CostFit()
        self.forget_totals()
        self._seconds = 0.0
        self._tokens = 0.0
        self._iterations = 0.0

    def forget_totals(self) -> None:
        self.tokens_total = self.prompt_tokens_total = self.computed_tokens_total = 0

    def iteration(self, *, rows: int, tokens: int, kv_tokens: int, sampled: int, seconds: float) -> None:
        fade = 0.5 ** (seconds / self.FADE_S)
        self._seconds = self._seconds * fade + seconds
        self._tokens = self._tokens * fade + sampled
        self._iterations = self._iterations * fade + 1
        self.tokens_total += sampled
        self.computed_tokens_total += tokens
        self.fit.observe(rows, tokens, kv_tokens, seconds)

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    @property
    def seconds_per_iteration(self) -> float:
        return self._seconds / self._iterations if self._iterations else 0.0


def condense(remaining: Sequence[float]) -> tuple[tuple[int, ...], int]:
    """Return at most 64 ascending values, each the mean of a group of requests, and the size of a group."""
    ordered = sorted(remaining)
    weight = max(1, -(-len(ordered) // REMAINING_VALUES))
    if weight == 1:
        return tuple(map(round, ordered)), 1
    groups = (ordered[at : at + weight] for at in range(0, len(ordered), weight))
    return tuple(round(sum(group) / len(group)) for group in groups), weight
