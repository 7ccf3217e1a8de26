"""The engine's own scheduler over iterations that are counted, not computed: only lengths are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import product
from time import process_time

from site_engine.core.adapter_slots import AdapterSlots
from site_engine.core.load import CostFit
from site_engine.core.page_pool import PagePool
from site_engine.core.prefix_cache import PrefixTree
from site_engine.core.request import Request
from site_engine.core.request_queue import DEFAULT_POLICY, AdmissionQueue, Policy
from site_engine.core.schedule_plan import ScheduledChunk, SchedulePlan
from site_engine.core.scheduler import Scheduler

ANY_TOKEN = 7


@dataclass(slots=True)
class Counts:
    """What a run took. `cached` and `asked` are prompt tokens, `plan_s` processor time of the scheduler."""

    seconds: float = 0.0
    plan_s: float = 0.0
    iterations: int = 0
    output: int = 0
    computed: int = 0
    cached: int = 0
    asked: int = 0
    preemptions: int = 0
    most_running: int = 0
    first_token_s: dict[str, float] = field(default_factory=dict)


def alike(rows: int, prompt: int) -> SchedulePlan:
    """Return an iteration of a site's warm-up, with prompts of so many tokens or, if none, decodes."""
    request = Request("warm-up", range(max(prompt, 1)))
    chunks = [ScheduledChunk(request, 0 if prompt else 32, prompt or 1, True)] * rows
    return SchedulePlan([], chunks) if prompt else SchedulePlan(chunks)


class CountedEngine:
    """Runs requests until each has as many tokens as `lengths` says; `seconds` is what an iteration costs.

    The scheduler knows of that what a fit finds, as in the engine, or what `fit` says from the start.
    """

    def __init__(
        self,
        lengths: dict[str, int],
        seconds: Callable[[SchedulePlan], float],
        *,
        kv_tokens: int,
        slots: int,
        token_budget: int,
        page_size: int = 16,
        policy: Policy = DEFAULT_POLICY,
        queue: AdmissionQueue | None = None,
        fit: CostFit | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.counts = Counts()
        self._fit = CostFit()
        self.pool = PagePool(kv_tokens // page_size, page_size)
        self.scheduler = Scheduler(
            self.pool,
            AdmissionQueue(policy.score) if queue is None else queue,
            PrefixTree(self.pool),
            slots=slots,
            token_budget=token_budget,
            policy=policy,
            fit=self._fit if fit is None else fit,
            adapters=adapters,
        )
        self._lengths, self._seconds = lengths, seconds
        for rows, prompt in product((1, slots), (32, 0, 0, 0, 0, 0, 0, 0)):
            self._measure(alike(rows, prompt))

    def _measure(self, plan: SchedulePlan) -> float:
        took_s = self._seconds(plan)
        self._fit.observe(len(plan.chunks), plan.tokens, plan.kv_tokens, took_s)
        return took_s

    def submit(self, request: Request) -> None:
        request.max_tokens = self._lengths[request.id] if request.sampling.runs_out else 1 << 20
        request.arrived_s = self.counts.seconds
        self.scheduler.queue.push(request)

    def step(self) -> list[Request]:
        """Count one iteration and return the requests that ended with it."""
        counts, scheduler = self.counts, self.scheduler
        began = process_time()
        plan = scheduler.plan(counts.seconds)
        counts.plan_s += process_time() - began
        plan.sort_decodes()  # as runners do: those that end together are released so
        scheduler.advance(plan)
        counts.iterations += 1
        counts.seconds += self._measure(plan)
        counts.computed += plan.tokens
        counts.most_running = max(counts.most_running, len(scheduler.running))
        ended = []
        for request, _, _, samples in plan.chunks:
            if samples:
                request.tokens.append(ANY_TOKEN)
                if request.first_token_s is None:
                    request.first_token_s = counts.first_token_s[request.id] = counts.seconds
                if request.generated >= self._lengths[request.id]:
                    ended.append(request)
        for request in ended:
            counts.cached += request.cached_tokens
            counts.asked += request.prompt_len
            counts.preemptions += request.preemptions
            counts.output += request.generated
            scheduler.reservation.factors.ended(request, request.generated)
            scheduler.release(request)
        return ended

    def run(self, requests: Iterable[Request] = ()) -> Counts:
        for request in requests:
            self.submit(request)
        while self.scheduler.has_work:
            self.step()
        assert self.pool.available == self.pool.capacity
        return self.counts
