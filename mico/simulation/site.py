"""A site whose iterations are counted, not computed, with the rows, slots, KV and queue of the engine.

Between two changes of the set of rows all iterations are alike, so that they pass as one event. The queue is
the engine's own. Until it ends, a request needs KV for its prompt and the 90% quantile of its forecast, as at
most servers; the engine's scheduler counts on the room of those that end before. Tokens are counted one by
one; pages exist only for the prefix cache, in `cache.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import ceil, sqrt
from typing import NamedTuple, cast

from mico.simulation.cache import SiteCache
from mico.simulation.clock import Clock
from mico.simulation.row import Row
from mico.simulation.specification import SiteSpec
from site_engine.core.load import condense
from site_engine.core.request import Lane
from site_engine.core.request_queue import AdmissionQueue, Score

TOKEN_BUDGET = 2048
"""Tokens of one iteration: a row that decodes takes one, prefills share the rest."""


class Stretch(NamedTuple):
    """`length` iterations from `start_s`: the first takes `first_s`, each further one `growth_s` longer."""

    start_s: float
    first_s: float
    growth_s: float
    length: int
    chunk: int
    training_s: float = 0.0  # of each iteration

    def seconds(self, iterations: float) -> float:
        return self.first_s * iterations + self.growth_s * iterations * (iterations - 1) / 2

    def iterations_by(self, now_s: float) -> int:
        """Return how many iterations begin before `now_s`."""
        passed = now_s - self.start_s
        if self.growth_s <= 0:
            return ceil(passed / self.first_s - 1e-9)
        b = self.first_s - self.growth_s / 2
        return ceil((sqrt(b * b + 2 * self.growth_s * passed) - b) / self.growth_s - 1e-9)


class SimulatedSite:
    """A simulated site. `on_first_token` and `on_end` are called with a row at its first and last token."""

    def __init__(
        self,
        spec: SiteSpec,
        clock: Clock,
        *,
        score: Score,
        starving_after_s: float,
        on_first_token: Callable[[Row], None],
        on_end: Callable[[Row], None],
        on_change: Callable[[SimulatedSite], None],
        block_tokens: int = 0,
    ) -> None:
        """Create an idle site. `block_tokens`: of the blocks whose ids rows have; 0: it caches no prefix."""
        self.spec = spec
        self.block_tokens = block_tokens
        self.queue = AdmissionQueue(score, starving_after_s)
        self.running: dict[str, Row] = {}  # in order of start
        self.iterations = 0
        self.computed_tokens = 0
        self.kv_used = 0
        self.preemptions = 0
        self.busy_s = 0.0
        self.trained_s = 0.0  # of these, beside what is served
        self.cache = self._empty_cache()
        self._clock = clock
        self._on_first_token, self._on_end, self._on_change = on_first_token, on_end, on_change
        self._decoding: list[tuple[int, int, Row]] = []
        self._rows_decoding = 0
        self._batch_rows = 0
        self._prefilling: list[Row] = []
        self._preempted: list[Row] = []
        self._stretch: Stretch | None = None
        self._version = 0
        self._sequence = 0

    # ---- requests of a gateway

    def submit(self, row: Row) -> None:
        row.arrived_s = self._clock.now_s
        self.queue.push(row)
        if self._stretch is None:
            self._plan_stretch()
        elif not self._is_full or self._stretch.training_s or self._preemptible_below(row) is not None:
            self._cut_short()
        self._on_change(self)

    def release(self, request_id: str) -> bool:
        """Remove a pending request; return whether it had not started."""
        return self.queue.remove(request_id) is not None

    def cancel_all(self) -> None:
        """Drop every request: the site is lost."""
        for row in list(self.queue):
            self.queue.remove(row.id)
        self.running, self._decoding, self._prefilling, self._preempted = {}, [], [], []
        self._rows_decoding = self._batch_rows = self.kv_used = 0
        self.cache = self._empty_cache()
        self._stretch = None
        self._version += 1

    def _empty_cache(self) -> SiteCache | None:
        return SiteCache(self.spec.kv_tokens, self.block_tokens) if self.block_tokens else None

    # ---- figures of a load report

    @property
    def pending(self) -> int:
        return len(self.queue) + len(self._preempted)

    @property
    def kv_free(self) -> int:
        """Tokens of KV that no row holds; pages that several rows share count once."""
        shared = self.cache.shared_tokens if self.cache is not None else 0
        return self.spec.kv_tokens - self.kv_used + shared

    def settle_rows(self) -> int:
        """Update `produced` of every running row to the completed iterations.

        Returns the tokens of KV that are reserved for running rows and not yet in use.
        """
        passed, reserved_tokens = self.iterations, 0
        if self._stretch is not None and self._stretch.chunk == 0:
            passed += min(self._stretch.length, max(0, self._stretch.iterations_by(self._clock.now_s) - 1))
        for row in self.running.values():
            if row.ends_at:
                row.produced = row.response_tokens + passed - row.ends_at
            if row.to_prefill:
                reserved_tokens += row.reserved - self._kv_tokens_of(row)
                continue
            kv_tokens = row.prompt_len + row.produced
            if kv_tokens >= row.reserved:
                row.reserved = kv_tokens + row.p90_remaining()
            reserved_tokens += row.reserved - kv_tokens
        return reserved_tokens

    def remaining(self) -> tuple[tuple[int, ...], int]:
        """Return the condensed remaining tokens of the running rows, as of the last `settle_rows`."""
        return condense([row.expected_remaining() for row in self.running.values()])

    @property
    def unread_tokens(self) -> int:
        """Uncomputed tokens, as in the engine: the rest of started prompts, and each answer's newest."""
        return self._rows_decoding + sum(row.to_prefill for row in self._prefilling)

    @property
    def training_s_per_iteration(self) -> float:
        """What training adds to an iteration now, or would."""
        if self._stretch is not None:
            return self._stretch.training_s
        return max(0.0, self.spec.trains_between_s - self.spec.cost.seconds(1, 1, 0))

    @staticmethod
    def _kv_tokens_of(row: Row) -> int:
        return len(row.tokens) - row.to_prefill if row.to_prefill else row.prompt_len + row.produced

    # ---- iterations

    def _plan_stretch(self) -> None:
        """Plan the stretch of iterations that begins now."""
        self._admit()
        decoding, now_s = self._rows_decoding, self._clock.now_s
        if not self.running:
            self._stretch = None
            return
        chunk = min(self._prefill_budget, sum(row.to_prefill for row in self._prefilling))
        cost, count = self.spec.cost, 1
        rows = decoding + len(self._prefilling)
        first_s = cost.seconds(rows, decoding + chunk, self.kv_used)
        if chunk == 0:
            self._preempt_to_fit()
            decoding = self._rows_decoding
            first_s = cost.seconds(decoding, decoding, self.kv_used)
            count = self._decoding[0][0] - self.iterations
            if len(self.running) > 1:
                count = max(1, min(count, self.kv_free // decoding))
        growth_s, training_s = cost.per_kv_token_s * decoding, 0.0
        if chunk == 0 and not self.pending and first_s < self.spec.trains_between_s:
            training_s = self.spec.trains_between_s - first_s
            first_s, growth_s = self.spec.trains_between_s, 0.0
        self._stretch = Stretch(now_s, first_s, growth_s, count, chunk, training_s)
        self._schedule_end()

    def _schedule_end(self) -> None:
        assert self._stretch is not None
        self._version += 1
        end_s = self._stretch.start_s + self._stretch.seconds(self._stretch.length)
        self._clock.at(end_s, self._finish_stretch, self._version)

    def _cut_short(self) -> None:
        """End the stretch at the next iteration, where a new request may start."""
        stretch = self._stretch
        assert stretch is not None
        begun = max(1, stretch.iterations_by(self._clock.now_s))
        if begun < stretch.length:
            self._stretch = stretch._replace(length=begun)
            self._schedule_end()

    def _finish_stretch(self, version: int) -> None:
        if version != self._version or self._stretch is None:
            return
        stretch, self._stretch = self._stretch, None
        self.iterations += stretch.length
        computed = self._rows_decoding * stretch.length + stretch.chunk
        self.kv_used += computed
        self.computed_tokens += computed
        self.busy_s += self._clock.now_s - stretch.start_s
        self.trained_s += stretch.training_s * stretch.length
        changed = self._finish_decoded()
        changed |= self._advance_prefills(stretch.chunk)
        if self.cache is not None:
            self.cache.make_room(self.kv_used)
        pending = self.pending
        self._plan_stretch()
        if changed or self.pending != pending:
            self._on_change(self)

    def _finish_decoded(self) -> bool:
        changed = False
        while self._decoding and self._decoding[0][0] <= self.iterations:
            row = heappop(self._decoding)[2]
            if row.ends_at == 0 or row.id not in self.running:
                continue
            self._finish(row)
            changed = True
        return changed

    def _advance_prefills(self, chunk: int) -> bool:
        """Give the chunk to rows in the order of their start; a row's last part yields its next token."""
        done = 0
        for row in self._prefilling:
            part = min(chunk, row.to_prefill)
            row.to_prefill -= part
            chunk -= part
            if row.to_prefill:
                break
            done += 1
            self._begin_decoding(row)
        del self._prefilling[:done]
        return done > 0

    def _begin_decoding(self, row: Row) -> None:
        first = row.first_token_s is None
        row.produced += 1
        row.first_token_s = self._clock.now_s if first else row.first_token_s
        row.ends_at = self.iterations + row.response_tokens - row.produced
        self.kv_used += 1
        self._rows_decoding += 1
        if first:
            self._on_first_token(row)
        if row.ends_at <= self.iterations:
            self._finish(row)
        else:
            self._sequence += 1
            heappush(self._decoding, (row.ends_at, self._sequence, row))

    def _finish(self, row: Row) -> None:
        row.produced = row.response_tokens
        self.queue.settle(row)
        self._remove_running(row)
        self._on_end(row)

    def _remove_running(self, row: Row) -> None:
        if self.cache is not None:
            self.cache.extend(row, self._kv_tokens_of(row) - 1)
            self.cache.drop(row)
        del self.running[row.id]
        self._batch_rows -= row.lane is Lane.BATCH
        self.kv_used -= self._kv_tokens_of(row)
        row.ends_at = 0
        self._rows_decoding -= 1

    # ---- admission and preemption

    def _admit(self) -> None:
        """Start requests while slots, KV and this iteration's tokens allow.

        A request of a better lane does not wait for lines of batches: the last of them is preempted and
        resumes later. The engine preempts one an iteration, the simulation as many as needed. A request whose
        prompt would get none of this iteration's tokens stays in the queue, where the order still applies.
        """
        budget = self._prefill_budget
        for begun in self._prefilling:
            budget -= self._plan_prefill(begun, budget)
        if not (self.queue or self._preempted) or (self._is_full and not self._batch_rows) or budget <= 0:
            return
        free = self.kv_free - self.settle_rows()
        while budget > 0 and (row := self._next_candidate()) is not None:
            need = len(row.tokens) + row.p90_remaining()
            shared = self._share(row) if not self._is_full else 0
            if not self._is_full and (not self.running or need <= free + shared):
                self._start(row, need)
                free += shared - need
                budget -= self._plan_prefill(row, budget)
            elif (victim := self._preemptible_below(row)) is not None:
                self._unshare(row)
                free += victim.reserved
                self._preempt(victim)
            else:
                self._unshare(row)
                return

    def _share(self, row: Row) -> int:
        """Take the cached prefix of a request that may start; return how many of its tokens others hold."""
        if self.cache is None:
            return 0
        before = self.cache.shared_tokens
        self.cache.share(row, 0)
        return self.cache.shared_tokens - before

    def _unshare(self, row: Row) -> None:
        if self.cache is not None:
            self.cache.drop(row)

    def _plan_prefill(self, row: Row, budget: int) -> int:
        """Cache what the next iteration computes of a prompt within the budget; return its missing tokens."""
        if self.cache is not None:
            computed = len(row.tokens) - row.to_prefill
            cached = self.cache.share(row, computed)
            self._skip(row, cached)
            self.cache.extend(row, computed + cached + max(0, min(budget, row.to_prefill)))
        return row.to_prefill

    def _skip(self, row: Row, cached: int) -> None:
        """Count tokens of a prompt that are in the cache as computed."""
        if row.first_token_s is None:
            row.cached_tokens += cached
        row.to_prefill -= cached
        self.kv_used += cached

    @property
    def _prefill_budget(self) -> int:
        """Prompt tokens of the next iteration."""
        return max(1, TOKEN_BUDGET - self._rows_decoding)

    @property
    def _is_full(self) -> bool:
        return len(self.running) >= self.spec.slots

    def _next_candidate(self) -> Row | None:
        """Return the next request to start; a preempted one comes before new ones of its lane."""
        queued = cast("Row | None", self.queue.first(self._clock.now_s))
        preempted = min(self._preempted, key=lambda row: row.lane, default=None)
        if preempted is None or (queued is not None and queued.lane < preempted.lane):
            return queued
        return preempted

    def _preemptible_below(self, row: Row) -> Row | None:
        """Return the row of a worse lane that decodes and started last, or None."""
        if not self._batch_rows:
            return None
        lines = (each for each in reversed(self.running.values()) if each.lane > row.lane and each.ends_at)
        return next(lines, None)

    def _start(self, row: Row, need: int) -> None:
        if row in self._preempted:
            self._preempted.remove(row)
        else:
            self.queue.take(row)
        row.to_prefill, row.reserved = len(row.tokens), need
        self._skip(row, len(row.pages) * self.block_tokens)
        row.started_s = self._clock.now_s if row.started_s is None else row.started_s
        self.running[row.id] = row
        self._batch_rows += row.lane is Lane.BATCH
        self._prefilling.append(row)

    def _preempt_to_fit(self) -> None:
        """Preempt the rows that started last until the next tokens of the others fit."""
        while len(self.running) > 1 and self.kv_free < self._rows_decoding:
            self._preempt(next(reversed(self.running.values())))

    def _preempt(self, row: Row) -> None:
        """Preempt a decoding row: it frees its KV and computes all its tokens again later."""
        row.produced = row.response_tokens + self.iterations - row.ends_at
        self._decoding = [entry for entry in self._decoding if entry[2] is not row]
        self._decoding.sort()
        self._remove_running(row)
        row.reset_tokens()
        self._preempted.append(row)
        self.preemptions += 1
