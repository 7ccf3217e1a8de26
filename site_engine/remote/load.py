"""Load figures of a site whose engine is a server: its own word if it gives it, else what passes by."""

from __future__ import annotations

from site_engine.core.load import CostFit, LoadFigures, condense
from site_engine.remote.prometheus import Busy
from site_engine.remote.queue import Holding

FADE_S = 3.0
SMOOTH = 0.1
"""Share of the newest answer in the learned seconds per token."""
OTHERS_TOKENS = 200.0
"""Expected of what others run at the server while nothing of ours does."""


class Pace:
    """How fast the server is, learned from what it does. Times only count while it is busy."""

    def __init__(self, now: float) -> None:
        self.tokens_total = 0
        self.prompt_tokens_total = 0
        self.seconds_per_token = 0.0
        self.fit = CostFit()
        self._seconds = 0.0
        self._tokens = 0.0
        self._counted: int | None = None
        self._by_server = False
        self._looked_s = now

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def look(self, now: float, counter: int | None, *, working: bool) -> None:
        """`counter` is the server's of generated tokens; it falls when the server starts again."""
        counted = self.tokens_total if counter is None else counter
        same = self._counted is not None and self._by_server is (counter is not None)
        tokens = counted - (self._counted or 0) if same else 0
        self._counted, self._by_server = counted, counter is not None
        seconds, self._looked_s = now - self._looked_s, now
        if working and seconds > 0 and tokens >= 0:
            fade: float = 0.5 ** (seconds / FADE_S)
            self._seconds = self._seconds * fade + seconds
            self._tokens = self._tokens * fade + tokens

    def began(self, *, rows: int, prompt_tokens: int, kv_tokens: int, seconds: float) -> None:
        """A first token came: a prompt was read beside so many rows."""
        self.fit.observe(rows, prompt_tokens + rows, kv_tokens, seconds)

    def ended(self, *, rows: int, kv_tokens: int, tokens: int, seconds: float) -> None:
        """An answer is complete: its tokens after the first took so long beside so many rows."""
        if tokens < 2:
            return
        gap = seconds / (tokens - 1)
        share = SMOOTH if self.seconds_per_token else 1.0
        self.seconds_per_token += (gap - self.seconds_per_token) * share
        self.fit.observe(rows, rows, kv_tokens, gap)


def figures(holding: Holding, busy: Busy | None, pace: Pace, kv_capacity_tokens: int) -> LoadFigures:
    """Others may use the server too: what runs there beyond ours counts as if it were like ours.

    What we have in the server counts even if its page, which is a little older, does not show it yet.
    """
    ours = len(holding.sent)
    there = ours if busy is None else max(ours, busy.running + (busy.waiting or 0))
    waiting_there = 0 if busy is None else min(there, busy.waiting or 0)
    remaining = [held.expected_remaining() for held in holding.sent]
    mean = sum(remaining) / ours if ours else OTHERS_TOKENS
    running = [*remaining, *[mean] * (there - ours)][: there - waiting_there]
    running_remaining, weight = condense(running)
    pending_prompt = sum(held.prompt_tokens for held in holding.pending)
    pending_response = sum(held.expected_remaining() for held in holding.pending) + mean * waiting_there
    unread = sum(held.prompt_tokens if held.first_s is None else 1 for held in holding.sent)
    return LoadFigures(
        running=len(running),
        pending=len(holding.pending) + waiting_there,
        token_load=sum(running) + pending_prompt + pending_response,
        kv_free_tokens=_kv_free(holding, busy, kv_capacity_tokens),
        kv_reserved_tokens=round(sum(held.p90_remaining() for held in holding.sent)),
        tokens_per_s=pace.tokens_per_s,
        seconds_per_iteration=pace.seconds_per_token,
        iteration=pace.fit.cost(),
        running_remaining=running_remaining,
        running_weight=weight,
        pending_prompt_tokens=pending_prompt,
        pending_response_tokens=pending_response,
        tokens_total=pace.tokens_total,
        prompt_tokens_total=pace.prompt_tokens_total,
        unread_tokens=unread,
    )


def _kv_free(holding: Holding, busy: Busy | None, capacity: int) -> int:
    if busy is not None and busy.kv_usage is not None:
        return round(capacity * (1.0 - busy.kv_usage))
    return max(0, capacity - sum(held.tokens for held in holding.sent))
