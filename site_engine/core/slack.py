"""Decide whether a slice of training runs before the next iteration of an engine. Pure.

Training has the device's time that serving leaves: all of it while nothing runs, and beside answers what
their time between tokens allows. "iteration" is the rule of the paper, kept to compare with: training runs
only while nothing is served, in whole micro-batches, as long as the oldest query that waits can bear another.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

KEPT_COSTS = 100
MIN_CHUNK_TOKENS = 16
"""Tokens of a new prompt for which slices leave time beside answers. Once one waits, slices stop, and the
next iteration computes more of it.
"""
NEWCOMER_SHARE = 0.25
"""The largest share of the time that the bound leaves which is kept for those tokens."""
LATE_CHUNK_TOKENS = 128
"""The least prompt tokens of an iteration where one without prompts takes longer than the bound."""
KEPT_DELAYS = 400
"""Times between tokens that are kept: all their delays but the longest fit the bound, so that of new ones
about one in 200 does not.
"""
FIRST_DELAY_SHARE, MAX_DELAY_SHARE = 0.2, 0.5
"""Shares of the bound: the delay expected at first, and the longest delay that time is left for."""
DEBT_LIMIT_S = 1.0
HALVED_AFTER_S = 5.0


class Deferral(StrEnum):
    SLICE = "slice"
    ITERATION = "iteration"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on what training may cost the requests that are served, as the operator sets them.

    `between_tokens_s`: slices of training may stretch the time between two tokens of a chat to this.
    `batch_share`: the share of the time that batches keep where no chat is served; `least_share`: the share
    that training has whatever is served. `wait_s`: the longest wait of a query by the rule "iteration".
    """

    between_tokens_s: float = 0.02
    batch_share: float = 0.5
    least_share: float = 0.0
    deferral: Deferral = Deferral.SLICE
    wait_s: float = 0.4

    def __post_init__(self) -> None:
        if not (0.0 <= self.least_share < 1.0 and 0.0 < self.batch_share < 1.0):
            raise ValueError("batch_share must be between 0 and 1, least_share 0 or between 0 and 1")
        if min(self.between_tokens_s, self.wait_s) <= 0.0:
            raise ValueError("between_tokens_s and wait_s must be positive")


class Serving(NamedTuple):
    """The requests that an engine serves between two iterations, as far as training has to wait for them.

    `chat_waits`: a chat has no slot yet, or its prompt is being read. `batch`: a line of a batch is there.
    `since_tokens_s`: since answers got their last tokens; `sliced`: a slice ran since then. `iteration_s`:
    the length of the next iteration; `newcomer_s`: what MIN_CHUNK_TOKENS add to it. `free_share`: the share
    of the slots that no chat has.
    """

    chat_waits: bool = False
    chat_decodes: bool = False
    batch: bool = False
    since_tokens_s: float = 0.0
    iteration_s: float = 0.0
    newcomer_s: float = 0.0
    oldest_wait_s: float = 0.0
    sliced: bool = False
    free_share: float = 1.0

    @property
    def active(self) -> bool:
        """Return whether any request is served."""
        return self.chat_waits or self.chat_decodes or self.batch


class NextSlice(NamedTuple):
    """The next slice of training: its seconds, those of a whole micro-batch, and whether it begins one."""

    seconds: float
    micro_batch_s: float = 0.0
    begins: bool = True


class Slack:
    """Shares the time of one engine between those that are served and training.

    Time that training took and that serving took while both wanted the device is counted, so that the shares
    hold over a second, not in each iteration. Beside answers slices and prompts fill `aim_s`, which is the
    bound less what tokens were lately delayed by: slices and iterations that took longer than foreseen.
    Slices have less of it as slots fill, since chats that answer more slowly keep theirs from those to come:
    with no slot free, one slice between two tokens.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        first_s = FIRST_DELAY_SHARE * bounds.between_tokens_s
        self._delays_s = deque([first_s], maxlen=KEPT_DELAYS)
        self.aim_s = bounds.between_tokens_s - first_s
        self._foreseen_s: float | None = None  # time between tokens, with the last slice beside answers
        self._batch_s = 0.0  # beyond training's, by the shares: start-time fair
        self._debt_s = 0.0  # that training was promised and did not get

    def takes(self, serving: Serving, following: NextSlice) -> bool:
        """Return whether the slice runs now, before the next iteration."""
        bounds = self.bounds
        if bounds.deferral is Deferral.ITERATION:
            if not following.begins:
                return True
            if serving.chat_decodes or not serving.active:
                return not serving.active
            return serving.oldest_wait_s + following.micro_batch_s <= bounds.wait_s
        if not serving.active:
            return True
        if serving.chat_waits:
            return False
        if 0.0 < self._debt_s >= following.seconds:
            return True
        if serving.chat_decodes:
            whole_s = self.aim_s - serving.iteration_s
            kept_s = min(serving.newcomer_s, whole_s * NEWCOMER_SHARE)  # a fit may be far off at first
            share = serving.free_share if serving.sliced else 1.0
            return following.seconds <= share * whole_s - kept_s - serving.since_tokens_s
        return self._batch_s > 0.0

    def trained(self, seconds: float, serving: Serving, following: NextSlice) -> None:
        """Count a slice that ran, as `following` foresaw it."""
        foreseen_s = serving.since_tokens_s + following.seconds + serving.iteration_s
        self._foreseen_s = foreseen_s if serving.chat_decodes else None
        self._debt_s = max(0.0, self._debt_s - (1.0 - self.bounds.least_share) * seconds)
        if serving.batch and not serving.chat_decodes:
            share = self.bounds.batch_share
            self._batch_s = max(-DEBT_LIMIT_S, self._batch_s - seconds * share / (1.0 - share))

    def published(self, between_s: float) -> None:
        """Count the time between two tokens of answers; without slices training delayed nothing."""
        bound_s, delay_s = self.bounds.between_tokens_s, 0.0
        if self._foreseen_s is not None:
            delay_s = max(0.0, between_s - max(self._foreseen_s, self.aim_s))
        self._foreseen_s = None
        self._delays_s.append(min(delay_s, MAX_DELAY_SHARE * bound_s))
        left_out = len(self._delays_s) // KEPT_DELAYS
        self.aim_s = bound_s - sorted(self._delays_s)[-1 - left_out]

    def served(self, seconds: float, *, batch_alone: bool) -> None:
        """Count an iteration that ran while training had work."""
        self._debt_s = min(DEBT_LIMIT_S, self._debt_s + self.bounds.least_share * seconds)
        if batch_alone:
            self._batch_s = min(DEBT_LIMIT_S, self._batch_s + seconds)

    def chunk_tokens(self, serving: Serving, base_s: float, per_token_s: float) -> int | None:
        """Return the prompt tokens beside answers that decode; None: as many as without training.

        `base_s`: of an iteration without prompts. The prompts get what `aim_s` leaves after the slices
        since the last tokens.
        """
        if not serving.chat_decodes or self.bounds.deferral is Deferral.ITERATION or per_token_s <= 0.0:
            return None
        least = MIN_CHUNK_TOKENS if base_s < self.bounds.between_tokens_s else LATE_CHUNK_TOKENS
        return max(least, int((self.aim_s - base_s - serving.since_tokens_s) / per_token_s))


class SliceCosts:
    """The times that slices took lately, of which the next one's is foreseen.

    Kept by kind and size, in tokens: the launches of a small slice take as long as those of a large one. The
    first of each, which allocates, is not counted. Of the others a tenth is left out, and at least the
    longest of several: those of a collection of garbage. All count half for every HALVED_AFTER_S in which no
    slice ran: one slow slice must not keep training from ever running beside answers.
    """

    def __init__(self) -> None:
        self._taken: dict[tuple[str, int], deque[float]] = {}
        self._usual_s: dict[str, dict[int, float]] = {}  # by kind and size
        self._observed_s = 0.0  # when the last slice ended

    def observe(self, kind: str, size: int, seconds: float, now_s: float) -> None:
        self._observed_s = now_s
        taken = self._taken.get((kind, size))
        if taken is None:
            self._taken[kind, size] = deque(maxlen=KEPT_COSTS)
            return
        taken.append(seconds)
        self._usual_s.setdefault(kind, {})[size] = sorted(taken)[-1 - max(len(taken) > 1, len(taken) // 10)]

    def knows(self, kind: str, size: int) -> bool:
        return size in self._usual_s.get(kind, ())

    def adopt(self, rehearsed: SliceCosts) -> None:
        """Take the least that slices of new kinds and sizes took in a rehearsal, beside anything."""
        for (kind, size), taken in rehearsed._taken.items():
            if taken and (kind, size) not in self._taken:
                self._taken[kind, size] = deque([min(taken)], maxlen=KEPT_COSTS)
                self._usual_s.setdefault(kind, {})[size] = min(taken)
        self._observed_s = max(self._observed_s, rehearsed._observed_s)

    def seconds(self, kind: str, size: int, now_s: float) -> float:
        """Return what a slice of a kind and size takes; 0 if there was none of the kind.

        Of a size that was not seen the next larger one's is an upper bound; beyond the largest it grows.
        """
        usual_s = self._usual_s.get(kind)
        if usual_s is None:
            return 0.0
        nearest = min(usual_s, key=lambda each: (each < size, abs(each - size)))
        grown_s = usual_s[nearest] * max(1.0, size / nearest if nearest else 1.0)
        return float(grown_s * 0.5 ** ((now_s - self._observed_s) / HALVED_AFTER_S))
