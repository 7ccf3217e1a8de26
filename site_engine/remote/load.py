"""Load figures of a site in front of a server: from the server's metrics, or estimated from its streams."""

from __future__ import annotations

from site_engine.core.load import CostFit, LoadFigures, condense
from site_engine.remote.prometheus import ServerLoad
from site_engine.remote.queue import RemoteQueue

FADE_S = 3.0
SMOOTH = 0.1
"""Share of the newest answer in the learned seconds per token."""
FOREIGN_TOKENS = 200.0
"""Expected tokens of a request that others run at the server, while none of ours runs to compare with."""


class Throughput:
    """The server's speed, learned from its answers. Times count only while it is busy."""

    def __init__(self, now: float) -> None:
        self.tokens_total = 0
        self.prompt_tokens_total = 0
        self.seconds_per_token = 0.0
        self.fit = CostFit()
        self._seconds = 0.0
        self._tokens = 0.0
        self._counted: int | None = None
        self._by_server = False
        self._sampled_s = now

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def sample(self, now: float, counter: int | None, *, working: bool) -> None:
        """Update the rate. `counter`: the server's of generated tokens; it falls when the server restarts."""
        counted = self.tokens_total if counter is None else counter
        same = self._counted is not None and self._by_server is (counter is not None)
        tokens = counted - (self._counted or 0) if same else 0
        self._counted, self._by_server = counted, counter is not None
        seconds, self._sampled_s = now - self._sampled_s, now
        if working and seconds > 0 and tokens >= 0:
            fade: float = 0.5 ** (seconds / FADE_S)
            self._seconds = self._seconds * fade + seconds
            self._tokens = self._tokens * fade + tokens

    def observe_prefill(self, *, rows: int, prompt_tokens: int, kv_tokens: int, seconds: float) -> None:
        """Learn from a first token: a prompt was computed beside `rows` others."""
        self.fit.observe(rows, prompt_tokens + rows, kv_tokens, seconds)

    def observe_decode(self, *, rows: int, kv_tokens: int, tokens: int, seconds: float) -> None:
        """Learn from a complete answer: its tokens after the first took `seconds` beside `rows` others."""
        if tokens < 2:
            return
        gap = seconds / (tokens - 1)
        share = SMOOTH if self.seconds_per_token else 1.0
        self.seconds_per_token += (gap - self.seconds_per_token) * share
        self.fit.observe(rows, rows, kv_tokens, gap)


def load_figures(
    queue: RemoteQueue, server: ServerLoad | None, throughput: Throughput, kv_capacity_tokens: int
) -> LoadFigures:
    """Combine the own queue with the server's load; None: the server exports none.

    Others may use the server too: requests there beyond ours count as if they were like ours. Ours count even
    if the server's metrics, which are a little older, do not show them yet.
    """
    ours = len(queue.sent)
    there = ours if server is None else max(ours, server.running + (server.waiting or 0))
    waiting_there = 0 if server is None else min(there, server.waiting or 0)
    remaining = [each.expected_remaining() for each in queue.sent]
    mean = sum(remaining) / ours if ours else FOREIGN_TOKENS
    running = [*remaining, *[mean] * (there - ours)][: there - waiting_there]
    running_remaining, weight = condense(running)
    pending_prompt = sum(each.prompt_tokens for each in queue.pending)
    pending_response = sum(each.expected_remaining() for each in queue.pending) + mean * waiting_there
    if server is not None and server.kv_usage is not None:
        kv_free = round(kv_capacity_tokens * (1.0 - server.kv_usage))
    else:
        kv_free = max(0, kv_capacity_tokens - queue.sent_tokens)
    return LoadFigures(
        running=len(running),
        pending=len(queue.pending) + waiting_there,
        token_load=sum(running) + pending_prompt + pending_response,
        kv_free_tokens=kv_free,
        kv_reserved_tokens=round(sum(each.p90_remaining() for each in queue.sent)),
        tokens_per_s=throughput.tokens_per_s,
        seconds_per_iteration=throughput.seconds_per_token,
        iteration=throughput.fit.cost(),
        running_remaining=running_remaining,
        running_weight=weight,
        pending_prompt_tokens=pending_prompt,
        pending_response_tokens=pending_response,
        tokens_total=throughput.tokens_total,
        prompt_tokens_total=throughput.prompt_tokens_total,
        unread_tokens=sum(each.prompt_tokens if each.first_s is None else 1 for each in queue.sent),
    )
