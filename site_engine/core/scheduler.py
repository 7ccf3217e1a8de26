"""Plan one iteration: running requests first, then new ones, within the token budget and the KV pages.

Runs and samples nothing, and holds no tensors.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from site_engine.core.adapter_slots import AdapterSlots
from site_engine.core.kv_cache_manager import KVCacheManager
from site_engine.core.load import CostFit
from site_engine.core.pacing import PromptBudget
from site_engine.core.page_pool import PagePool, ReceivedKV
from site_engine.core.prefix_cache import PrefixTree
from site_engine.core.request import Lane, Request, State
from site_engine.core.request_queue import DEFAULT_POLICY, AdmissionQueue, Policy
from site_engine.core.reserve import Reservation
from site_engine.core.schedule_plan import ScheduledChunk, SchedulePlan


class Scheduler:
    """Owns the waiting queue, the running and preempted requests, and their pages.

    A running request holds a row and pages. A waiting or preempted request holds neither.
    """

    def __init__(
        self,
        pool: PagePool,
        queue: AdmissionQueue,
        prefixes: PrefixTree | None = None,
        received: ReceivedKV | None = None,
        *,
        slots: int,
        token_budget: int,
        policy: Policy = DEFAULT_POLICY,
        share_prefixes: bool = False,
        adapters: AdapterSlots | None = None,
        write_virtual: Callable[[Request, int], None] = lambda request, first: None,
        fit: CostFit | None = None,
    ) -> None:
        """Create a scheduler with `slots` rows and at most `token_budget` tokens per iteration.

        With `share_prefixes` tenants share the prefix cache. `adapters` limits the adapters that run at once;
        None sets no limit. `write_virtual(request, first)` writes the keys and values of the request's
        virtual tokens from index `first` on. `fit` is the fitted cost of iterations.
        """
        self.kv_cache_manager = KVCacheManager(pool, prefixes, received, share_prefixes=share_prefixes)
        self.queue = queue
        self.running: list[Request] = []  # by lane (chats first), then start order; preempted from the end
        self.preempted: list[Request] = []
        self.reservation = Reservation(pool, policy.remaining, lambda: self.token_budget - len(self.running))
        self.token_budget = token_budget
        self.prompt_budget = PromptBudget(CostFit() if fit is None else fit)
        self._policy = policy
        self._adapters = adapters
        self._write_virtual = write_virtual
        self._slots = slots
        self._rows = list(range(slots - 1, -1, -1))
        self._order: dict[str, tuple[int, int]] = {}
        self._started = 0
        # running decode-heavy batch lines by tenant: while there are any, its prefill-heavy lines are paced
        self._decode_heavy: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.preempted or self.queue)

    @property
    def free_slots(self) -> int:
        return len(self._rows)

    @property
    def resident_adapters(self) -> frozenset[str]:
        """Fingerprints of the variants whose adapters are loaded in slots."""
        return frozenset() if self._adapters is None else self._adapters.resident

    def plan(
        self, now: float, max_new: int | None = None, max_prompt_tokens: int | None = None
    ) -> SchedulePlan:
        """Plan the next iteration: allocate pages, preempt, and start waiting or preempted requests.

        At most `max_new` requests start, which bounds the planning time while a device computes. At most
        `max_prompt_tokens` prompt tokens are planned. None sets no limit.
        """
        plan = SchedulePlan()
        self.reservation.iteration += 1
        preempted_before = len(self.preempted)
        self._preempt_for(now)
        budget = self._plan_decodes(plan)
        if max_prompt_tokens is not None:
            budget = min(budget, max_prompt_tokens)
        has_chats = self.queue.has_lane(Lane.CHAT) or any(one.lane is Lane.CHAT for one in self.running[:1])
        self.prompt_budget.begin(now, len(plan.decoding), budget, has_chats, bool(self._decode_heavy))
        budget = self._plan_prefills(plan, budget)
        # prefills may hold every page, so that none can grow; a request in State.LAST is about to free pages
        if not plan and self.running and all(one.state is State.PREFILL for one in self.running):
            self._preempt(self.running[-1])
            self._plan_prefills(plan, budget)
        # a request preempted in this iteration must not restart in it, since its newest token may be unknown
        # to the host; nor does any other request of its lane or a lower lane start
        preempted_lanes = [one.lane for one in self.preempted[preempted_before:]]
        self._admit(plan, budget, now, max_new, min(preempted_lanes, default=len(Lane)))
        return plan

    def advance(self, plan: SchedulePlan) -> None:
        """Mark a plan's tokens as computed: their keys and values are in the pages, or are being written."""
        for request, start in zip(plan.decoding, plan.starts, strict=True):
            request.computed = start + 1
        for request, start, length, samples in plan.prefills:
            request.computed = start + length
            if samples:
                request.state = State.DECODE

    def restart(self, request: Request) -> None:
        """Preempt a request and discard its keys and values: all of its tokens are recomputed."""
        self.kv_cache_manager.invalidate(request)
        self._preempt(request)

    def release(self, request: Request) -> None:
        """Remove a request in any state, free its pages and row, and settle its tenant's charge."""
        if request.charged:
            self.queue.settle(request)
        if request.row >= 0:
            self._leave(request)
        elif request in self.preempted:
            self.preempted.remove(request)
            self.kv_cache_manager.drop_received(request)
        else:
            self.queue.remove(request.id)
        request.state, request.alone_until = State.FINISHED, 0

    def preempt_beyond(self, page: int) -> None:
        """Preempt the running requests that hold a page numbered above `page`."""
        for request in [one for one in self.running if max(one.pages, default=0) > page]:
            self._preempt(request)

    def adopt(self, request: Request) -> None:
        """Accept a request that another engine has begun and whose keys and values wait in `received`.

        The request is scheduled like a preempted one. Its tenant is charged the expected remaining tokens.
        """
        self.queue.charge(request)
        self.preempted.append(request)

    # ---- running requests

    def _plan_decodes(self, plan: SchedulePlan) -> int:
        decoding, starts, state = plan.decoding, plan.starts, State.DECODE
        page_size = self.kv_cache_manager.pool.page_size
        for request in list(self.running):
            if request.state is not state or request.row < 0:  # preempted by an earlier row of this plan
                continue
            start = request.computed
            if start < len(request.pages) * page_size or self._grow_or_preempt(request, plan):
                decoding.append(request)
                starts.append(start)
        return self.token_budget - len(decoding)

    def _plan_prefills(self, plan: SchedulePlan, budget: int) -> int:
        for request in self.running:
            if budget <= 0:
                break
            if request.state is State.PREFILL:
                budget -= self._plan_chunk(plan, request, budget)
        return budget

    def _plan_chunk(self, plan: SchedulePlan, request: Request, budget: int) -> int:
        """Plan as many of a request's uncomputed tokens as budget and pages allow; return their number."""
        kv, paced = self.kv_cache_manager, self._is_paced(request)
        budget = min(budget, self.prompt_budget.left(request.lane, paced))
        held = len(request.pages)
        shared = kv.share_prefix(request)
        request.cached_tokens += 0 if request.reads_again else shared
        self.reservation.shares(request, held)
        begun = request.computed
        if begun < request.virtual_tokens:
            if not kv.grow(request, request.virtual_tokens):
                return 0
            self._write_virtual(request, begun)
            request.computed = request.virtual_tokens
        missing = len(request.tokens) - request.computed
        reachable = (len(request.pages) + kv.pool.available) * kv.pool.page_size - request.computed
        length = min(missing, budget, reachable)
        if length <= 0:
            return 0
        kv.grow(request, request.computed + length)
        if kv.prefixes is not None:
            kv.insert_prefix(request, request.computed + length)
            page_size = kv.pool.page_size
            after = (request.computed + length) // page_size
            self.reservation.computes(request, begun // page_size, after)
        self.prompt_budget.take(length, request.lane, paced)
        plan.prefills.append(ScheduledChunk(request, request.computed, length, length == missing))
        return length

    def _grow_or_preempt(self, request: Request, plan: SchedulePlan) -> bool:
        """Allocate a page for a request's next token, preempting the latest running requests not in the plan
        while pages are short. Return False if the request itself was preempted.
        """
        while not self.kv_cache_manager.grow(request, request.computed + 1):
            planned = set(plan.decoding)
            victim = next(one for one in reversed(self.running) if one not in planned)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    # ---- starting and preempting

    def _admit(self, plan: SchedulePlan, budget: int, now: float, max_new: int | None, before: int) -> None:
        """Start requests of the lanes ahead of `before` while budget, rows, pages and `max_new` allow it."""
        if self._policy.static and self.running:
            return
        started = self._started
        while budget > 0 and self._rows and (max_new is None or self._started - started < max_new):
            candidates = (one for one in self._candidates(now) if one.lane < before)
            request = next(filter(self._claim_prefix, candidates), None)
            if request is None:
                return
            self._start(request, now)
            budget -= self._plan_chunk(plan, request, budget)

    def _candidates(self, now: float) -> Iterator[Request]:
        """Yield the next request; then, of the batch lines that may overtake it, the first that fits and the
        first prefill-heavy one.

        Shorter lines use the memory that the longest answers need only later. Beside chats they may not
        overtake: they would take every page that a chat frees, and the longest lines would start last.
        """
        for first in self._next_to_start(now):
            yield first
            if not self._has_slot(first):
                continue
            lines = self.queue.overtaking(first)
            paced = bisect_left(lines, True, key=attrgetter("prefill_heavy"))
            if not self.prompt_budget.beside_chats:  # lines are in descending length, so bisect by fit
                fitting = bisect_left(lines, True, hi=paced, key=self.reservation.fits)
                yield from lines[fitting : min(fitting + 1, paced)]
            yield from lines[paced : paced + 1]

    def _claim_prefix(self, request: Request) -> bool:
        """Return whether a request can start now; if so, attach its pages from the prefix cache."""
        if self.reservation.refused(request) or not self._has_slot(request):
            return False
        if self.prompt_budget.left(request.lane, self._is_paced(request)) <= 0:
            return False
        self.kv_cache_manager.share_prefix(request)
        if self.reservation.fits(request):
            return True
        self.kv_cache_manager.free(request)
        return False

    def _is_paced(self, request: Request) -> bool:
        return request.prefill_heavy and self._decode_heavy[request.tenant] > 0

    def _preempt_for(self, now: float) -> None:
        """Preempt running requests of a lower lane until the next request has a row, pages and adapter slot.

        Several may be preempted in one iteration: where many small batch lines fill the memory, preempting
        one per iteration would delay the request by several iterations.
        """
        for first in self._next_to_start(now):
            preempted = False
            while (victim := self._victim_for(first)) is not None:
                self._preempt(victim)
                preempted = True
            if preempted:
                return

    def _victim_for(self, first: Request) -> Request | None:
        """Return the running request of a lower lane to preempt for `first`, or None."""
        if not self.running or self._policy.static or first.lane >= self.running[-1].lane:
            return None
        if self._adapters is not None and not self._adapters.fits(first):
            kept = {one.variant for one in self.running if one.lane <= first.lane}
            holders = (one for one in reversed(self.running) if self._adapters.share_slots(one, first))
            return next((one for one in holders if one.variant not in kept), None)
        if not self.reservation.has_room(first) or (self._rows and self.reservation.has_pages(first)):
            return None
        return self.running[-1]

    def _next_to_start(self, now: float) -> Iterator[Request]:
        """Yield the request to start next. While it lacks an adapter slot, also yield the next request that
        may overtake all those yielded before it.
        """
        may_overtake: Callable[[Request], bool] | None = None  # true for those that may overtake all of these
        first = _earlier(self.queue.first(now), self.preempted)
        while first is not None:
            yield first
            if self._adapters is None or self._adapters.fits(first):
                return
            may_overtake = _both(may_overtake, self._adapters.may_overtake(first, now))
            first = _earlier(self.queue.first_of(may_overtake), filter(may_overtake, self.preempted))

    def _start(self, request: Request, now: float) -> None:
        if request in self.preempted:
            self.preempted.remove(request)
        else:
            self.queue.take(request)
        request.row = self._rows.pop()
        request.state = State.PREFILL
        request.started_s = now if request.started_s is None else request.started_s
        if not request.reads_again and request.received <= request.computed:
            request.cached_tokens = request.computed
        if self._adapters is not None:
            self._adapters.hold(request, self.queue, self._slots)
        self._started += 1
        self._order[request.id] = (request.lane, self._started)
        if request.any_order and not request.prefill_heavy:
            self._decode_heavy[request.tenant] += 1
        insort(self.running, request, key=lambda one: self._order[one.id])
        self.reservation.start(request)
        self.kv_cache_manager.take_received(request)

    def _preempt(self, request: Request) -> None:
        """Take a running request's row and pages. It restarts before new requests of its lane, and tokens no
        longer in the prefix cache are computed again.
        """
        self._leave(request)
        request.preemptions += 1
        request.state, request.alone_until = State.WAITING, 0
        self.preempted.append(request)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        del self._order[request.id]
        if request.any_order and not request.prefill_heavy:
            self._decode_heavy -= Counter([request.tenant])
        self.reservation.leave(request)
        if self._adapters is not None:
            self._adapters.leave(request)
        self.kv_cache_manager.insert_prefix(request, request.computed)
        self.kv_cache_manager.free(request)
        self._rows.append(request.row)
        request.row = -1

    def _has_slot(self, request: Request) -> bool:
        return self._adapters is None or self._adapters.fits(request)


def _both(
    one: Callable[[Request], bool] | None, other: Callable[[Request], bool]
) -> Callable[[Request], bool]:
    return other if one is None else lambda request: one(request) and other(request)


def _earlier(new: Request | None, preempted: Iterable[Request]) -> Request | None:
    """Return the request that starts first: by lane, and preempted before new within a lane."""
    oldest = min(preempted, key=attrgetter("lane"), default=None)
    return new if oldest is None or (new is not None and new.lane < oldest.lane) else oldest
