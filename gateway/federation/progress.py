"""Judge from a site's messages whether the site makes progress.

A link can be up while the engine is blocked in an iteration, a thread of the site hangs, or the site accepts
work and sends nothing more. There are four signs of this, or silences: the site reports that its engine has
stalled, it sends no load report, it answers no assignment, or neither its reports nor its output show
progress. A site that answers or computes for others is not silent, however long its queue is, so a single
attempt never leads to an ejection.

Each silence is tolerated for as long as the site's work explains it, by the site's own fit of its iteration
times, so that a slow site is not taken for a dead one. A wrong verdict costs little: only attempts that
another site can take are moved at once, and the site is used again once it shows progress. This module knows
no messages and reads no clock: times are those of `AwakeClock`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gateway.domain import LoadReport

CHECK_EVERY_S = 0.25
REPORT_WITHIN_S = 3.0
"""Sites report at least once a second in a small fleet."""
ANSWER_WITHIN_S = 1.0
"""Time for an answer, in addition to one iteration, after which an engine takes new requests, and the
tokenization of the prompt.
"""
PROGRESS_WITHIN_S = 6.0
GIVE_UP_AFTER_S = 30.0
"""How long attempts that no other site can take wait for a silent native site."""
MAX_EXPLAINED_S = 60.0
"""The longest silence that work can explain, whatever the site reports."""
PROMPT_TOKENS_PER_S = 50_000
"""A lower bound of the speed of tokenizers."""
ITERATION_TOKENS = 2_048
"""The most new tokens assumed for one iteration of a site that does not report its longest iteration."""


class AwakeClock:
    """Counts the seconds in which this process ran. A longer gap between two ticks, from a stalled event loop
    or a suspended machine, counts as two check intervals, as the sites' messages could not be read.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now_s = 0.0
        self._clock = clock
        self._ticked_s = clock()

    def tick(self) -> None:
        now_s = self._clock()
        self.now_s += min(now_s - self._ticked_s, 2 * CHECK_EVERY_S)
        self._ticked_s = now_s


class EngineReport(NamedTuple):
    """The part of a load report that shows the engine's progress. `counters` change with any work."""

    stalled_s: float
    longest_iteration_s: float
    counters: tuple[int, ...]


class Silence(NamedTuple):
    """A sign that a site makes no progress: what it is, and how long it lasts beyond what work explains."""

    what: str
    lasts_s: float
    only_unanswered: bool = False  # concerns only attempts that the site has not answered
    needs_trial: bool = False  # only new work can show that it is over


class Progress:
    """The last signs of work of one site."""

    def __init__(self, now_s: float) -> None:
        self.reported_s = now_s
        self._report = EngineReport(0.0, 0.0, ())
        self._answered_s = now_s
        self._moved_s = now_s
        self._unanswered: dict[str, float] = {}  # time of assignment by attempt id, oldest first
        self._accepted: set[str] = set()

    def assigned(self, attempt_id: str, now_s: float) -> None:
        self._unanswered[attempt_id] = now_s

    def answered(self, attempt_id: str, now_s: float, *, accepted: bool) -> None:
        self._answered_s = now_s
        self._unanswered.pop(attempt_id, None)
        if accepted:
            if not self._accepted:
                self._moved_s = now_s  # the site was idle until now
            self._accepted.add(attempt_id)

    def held(self, attempt_id: str, now_s: float) -> None:
        """Record that an attempt waits for its model to wake, so that no answer is expected."""
        self._answered_s = now_s
        self._unanswered.pop(attempt_id, None)

    def forget(self, attempt_id: str) -> None:
        self._unanswered.pop(attempt_id, None)
        self._accepted.discard(attempt_id)

    def is_unanswered(self, attempt_id: str) -> bool:
        return attempt_id in self._unanswered

    def reported(self, report: EngineReport, now_s: float) -> None:
        if report.counters != self._report.counters and not report.stalled_s:
            self._moved_s = now_s
        self.reported_s, self._report = now_s, report

    def output(self, now_s: float) -> None:
        self._moved_s = now_s

    def silence(
        self, load: LoadReport, prompt_tokens: float, now_s: float, *, native: bool
    ) -> Silence | None:
        """Return the silence of a site, None if it makes progress or is idle.

        `prompt_tokens`: those of the attempts that no report covers yet. `native`: whether the site's reports
        show each iteration. The server behind a remote site may compute for minutes without a sign, which the
        remote site judges itself.
        """
        if self._report.stalled_s:
            waited_s = now_s - self.reported_s
            return Silence("its engine has not moved", self._report.stalled_s + waited_s)
        if not (self._unanswered or self._accepted):
            return None
        iteration_s = self._longest_iteration_s(load, prompt_tokens)
        explained_s = min(MAX_EXPLAINED_S, 2 * iteration_s)
        if (lasts_s := now_s - self.reported_s - explained_s) > REPORT_WITHIN_S + load.quiet_s:
            return Silence("it has reported no load", lasts_s)
        oldest_s = next(iter(self._unanswered.values()), now_s)
        reading_s = min(MAX_EXPLAINED_S, iteration_s + prompt_tokens / PROMPT_TOKENS_PER_S)
        if (lasts_s := now_s - max(oldest_s, self._answered_s) - reading_s) > ANSWER_WITHIN_S:
            return Silence("it has answered no assignment", lasts_s, only_unanswered=True, needs_trial=True)
        if native and self._accepted and (lasts_s := now_s - self._moved_s - explained_s) > PROGRESS_WITHIN_S:
            return Silence("it has made no progress", lasts_s, needs_trial=True)
        return None

    def _longest_iteration_s(self, load: LoadReport, prompt_tokens: float) -> float:
        """Return the longest duration of one iteration in seconds, as reported or by the site's fit."""
        if self._report.longest_iteration_s:
            return self._report.longest_iteration_s
        unread = min(load.unread_tokens + load.pending_prompt_tokens + prompt_tokens, ITERATION_TOKENS)
        rows = load.running + load.pending
        return max(load.seconds_per_iteration, load.iteration.seconds(rows, rows + unread, 0))
