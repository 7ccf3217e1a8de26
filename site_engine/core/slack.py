"""Decide whether a slice of training runs before the next iteration of an engine. Pure.

Training uses the device time that serving leaves: all of it while nothing is served, and beside decoding
chats what their limit on the time between tokens allows. The rule "iteration" is the paper's, kept for
comparison: training runs only while no chat decodes, in whole micro-batches, while the wait of the oldest
query and another micro-batch stay within a limit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

KEPT_COSTS = 100
MIN_CHUNK_TOKENS = 16
"""Prompt tokens of a new request for which slices leave time beside answers. Once a request waits, slices
stop and the next iteration computes more of its prompt.
"""
NEWCOMER_SHARE = 0.25
"""Largest share of the time that the bound leaves beside an iteration that is reserved for those tokens."""
LATE_CHUNK_TOKENS = 128
"""Least prompt tokens of an iteration if an iteration without prompts already exceeds the bound."""
KEPT_DELAYS = 400
"""Delays that are remembered. All but the longest fit the bound, so about one in 200 new ones exceeds it."""
FIRST_DELAY_SHARE, MAX_DELAY_SHARE = 0.2, 0.5
"""Shares of the bound: the initial expected delay, and the longest delay that time is reserved for."""
ENOUGH_ITERATIONS = 4.0
"""Iterations that slices between two tokens may last in any case: training then has 0.8 of the device's time.
More adds little to training and delays each chat as much.
"""
SCARCE_POWER = 4
"""Slices longer than that get this power of the share of free slots."""
DEBT_LIMIT_S = 1.0
HALVED_AFTER_S = 5.0


class Deferral(StrEnum):
    SLICE = "slice"
    ITERATION = "iteration"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The operator's limits on the cost of training to served requests.

    `between_tokens_s`: the time between two tokens of a chat that training slices may cause, at most.
    `batch_share`: the share of time that batches keep while no chat is served. `least_share`: the share that
    training gets in any case. `wait_s`: the longest wait of a query under the rule "iteration".
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
    """The state of serving between two iterations, as far as it decides about training.

    `chat_waits`: a chat waits or is in prefill. `batch`: a batch line waits or runs. `since_tokens_s`:
    seconds since answers got their last tokens; `sliced`: a slice ran since then. `iteration_s`: expected
    length of the next iteration; `newcomer_s`: seconds that MIN_CHUNK_TOKENS add to it. `free_share`: the
    share of slots without a chat.
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
    """The next training slice: its seconds, those of its micro-batch, and whether it begins a micro-batch."""

    seconds: float
    micro_batch_s: float = 0.0
    begins: bool = True


class Slack:
    """Shares the time of one engine between serving and training.

    The time of each is accounted while both want the device, so that the shares hold over about a second, not
    in each iteration. Beside answers, slices and prompts fill `aim_s`: the bound less the recent delays of
    tokens, from slices and iterations that took longer than expected. Slices get less of it as slots fill,
    since slower chats hold their slots longer: the share of free slots, or less if slices are much longer
    than iterations. With no slot free, one slice runs between two tokens.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        first_s = FIRST_DELAY_SHARE * bounds.between_tokens_s
        self._delays_s = deque([first_s], maxlen=KEPT_DELAYS)
        self.aim_s = bounds.between_tokens_s - first_s
        self._foreseen_s: float | None = None  # expected time between tokens, if a slice ran beside answers
        self._batch_s = 0.0  # time of batches beyond training's, weighted by the shares (start-time fair)
        self._debt_s = 0.0  # time that `least_share` promised to training and that is still due

    def takes(self, serving: Serving, following: NextSlice) -> bool:
        """Return whether the slice may run now, before the next iteration."""
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
            kept_s = min(serving.newcomer_s, whole_s * NEWCOMER_SHARE)  # an early fit may be far off
            slices_s = self._slices_s(serving, whole_s) if serving.sliced else whole_s
            return following.seconds <= slices_s - kept_s - serving.since_tokens_s
        return self._batch_s > 0.0

    def _slices_s(self, serving: Serving, whole_s: float) -> float:
        """Return the part of `whole_s`, the time beside an iteration, that slices may fill."""
        enough_s = ENOUGH_ITERATIONS * serving.iteration_s
        longer_s = serving.free_share**SCARCE_POWER * whole_s
        return min(serving.free_share * whole_s, max(enough_s, longer_s))

    def trained(self, seconds: float, serving: Serving, following: NextSlice) -> None:
        """Count a slice that took `seconds`; `following` is its forecast."""
        foreseen_s = serving.since_tokens_s + following.seconds + serving.iteration_s
        self._foreseen_s = foreseen_s if serving.chat_decodes else None
        self._debt_s = max(0.0, self._debt_s - (1.0 - self.bounds.least_share) * seconds)
        if serving.batch and not serving.chat_decodes:
            share = self.bounds.batch_share
            self._batch_s = max(-DEBT_LIMIT_S, self._batch_s - seconds * share / (1.0 - share))

    def published(self, between_s: float) -> None:
        """Count the time between two tokens of answers. Without slices the delay is 0."""
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
        """Return the limit on prompt tokens of an iteration beside decoding chats; None: no limit.

        `base_s`: seconds of an iteration without prompts. Prompts get the rest of `aim_s` after the slices
        since the last tokens.
        """
        if not serving.chat_decodes or self.bounds.deferral is Deferral.ITERATION or per_token_s <= 0.0:
            return None
        least = MIN_CHUNK_TOKENS if base_s < self.bounds.between_tokens_s else LATE_CHUNK_TOKENS
        return max(least, int((self.aim_s - base_s - serving.since_tokens_s) / per_token_s))


class SliceCosts:
    """Recent durations of slices, from which the next slice's duration is predicted.

    Kept by kind and size in tokens, since time is not proportional to size: a small slice has as many
    launches as a large one. The first slice of each, which allocates memory, is not counted. Of the others
    the longest tenth, and at least the longest of several, is left out, such as those with garbage
    collection. All predictions halve for every HALVED_AFTER_S without a slice, so that one slow slice cannot
    keep training from ever running beside answers.
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

    def least_s(self, kind: str, size: int) -> float:
        """Return the shortest duration of slices of a kind and size; 0 if none was measured."""
        return min(self._taken.get((kind, size), ()), default=0.0)

    def adopt(self, rehearsed: SliceCosts) -> None:
        """Adopt, for kinds and sizes not seen yet, the shortest durations of a rehearsal."""
        for (kind, size), taken in rehearsed._taken.items():
            if taken and (kind, size) not in self._taken:
                self._taken[kind, size] = deque([min(taken)], maxlen=KEPT_COSTS)
                self._usual_s.setdefault(kind, {})[size] = min(taken)
        self._observed_s = max(self._observed_s, rehearsed._observed_s)

    def seconds(self, kind: str, size: int, now_s: float) -> float:
        """Return the predicted seconds of a slice; 0 if no slice of the kind was measured.

        An unknown size takes the next larger known size's time, or scales the largest size's in proportion.
        """
        usual_s = self._usual_s.get(kind)
        if usual_s is None:
            return 0.0
        nearest = min(usual_s, key=lambda each: (each < size, abs(each - size)))
        grown_s = usual_s[nearest] * max(1.0, size / nearest if nearest else 1.0)
        return float(grown_s * 0.5 ** ((now_s - self._observed_s) / HALVED_AFTER_S))
