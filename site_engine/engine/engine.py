"""The engine: one model, many requests at once, one iteration at a time.

Plain and synchronous: no threads, no sleeping, no sockets. Whoever owns it calls everything from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from site_engine.core.load import LoadFigures, Meter, condense
from site_engine.core.page_pool import PagePool
from site_engine.core.prefix_cache import PrefixTree
from site_engine.core.request import (
    Admission,
    Finish,
    Grammar,
    Output,
    RejectionReason,
    RemainingCurve,
    Request,
    RequestRejected,
    State,
)
from site_engine.core.request_queue import DEFAULT_POLICY, AdmissionQueue, Policy, has_place
from site_engine.core.scheduler import SchedulePlan, Scheduler
from site_engine.engine import validate
from site_engine.engine.output_processor import Answer
from site_engine.model.kv_cache import KVCache, Poison, affordable_tokens
from site_engine.model.kv_swap import HostSwap, copy_seconds_per_token
from site_engine.model.loader import LoadedModel
from site_engine.model.runner import Logits, PackedRunner, Runner
from site_engine.model.sampler import Sampled, Sampler

TOKEN_BUDGETS = {"cpu": 512, "cuda": 8192}
"""Tokens computed per iteration unless told otherwise: 8,192 is what was measured on an H200
(bench/results/gpu.md); on a CPU longer chunks only keep those waiting who decode.
"""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    slots: int = 32  # requests that run at once
    token_budget: int | None = None  # tokens computed per iteration; None: by the device
    page_size: int = 16
    kv_tokens: int | None = None  # room for keys and values; None: measured from the memory that is free
    max_pending: int = 1024
    iteration_floor_s: float = (
        0.0  # an iteration lasts at least so long; its owner waits, the engine only counts it
    )
    prefix_cache: bool = True
    share_prefixes: bool = False  # also between tenants, who can then tell by the time what others have asked
    swap_tokens: int = 0  # room in the computer's memory for preempted requests; 0: they compute again
    policy: Policy = DEFAULT_POLICY
    debug_poison: bool = False  # freed pages hold NaN

    def __post_init__(self) -> None:
        if min(self.slots, self.page_size, self.max_pending) < 1:
            raise ValueError("slots, page_size and max_pending must be at least 1")
        if self.token_budget is not None and self.token_budget < self.slots:
            raise ValueError(
                f"token_budget ({self.token_budget}) must cover one token of each of {self.slots} slots"
            )


class SiteEngine:
    """`paged`: keys and values lie in pages; else a runner keeps them, and pages are promises alone."""

    def __init__(
        self,
        model: LoadedModel,
        settings: EngineSettings,
        clock: Callable[[], float],
        *,
        paged: bool = True,
    ) -> None:
        self.settings = settings
        self._model = model
        self._clock = clock
        self._limit_tokens, self._pool, self._arena = _memory(model, settings, paged=paged)
        self._token_budget = settings.token_budget or max(
            TOKEN_BUDGETS.get(model.device.type, 512), settings.slots
        )
        self._meter = Meter()
        self._going_on: tuple[SchedulePlan, float] | None = (
            None  # the iteration that lasts, and when it began
        )
        self._scheduler = Scheduler(
            self._pool,
            AdmissionQueue(settings.policy.score),
            PrefixTree(self._pool) if settings.prefix_cache else None,
            self._swap_space() if settings.swap_tokens else None,
            slots=settings.slots,
            token_budget=self._token_budget,
            policy=settings.policy,
            share_prefixes=settings.share_prefixes,
        )
        self._runner: Runner = PackedRunner(
            model.forward,
            self._arena,
            slots=settings.slots,
            pages_per_row=self._pool.pages_for(self._limit_tokens),
        )
        self._sampler = Sampler(model.eos_token_ids, model.device)
        self._answers: dict[str, Answer] = {}
        self._cancelled: list[str] = []
        self._deadlines: list[tuple[float, str]] = []
        self._outputs: list[Output] = []

    def step(self) -> list[Output]:
        """One iteration: apply control, schedule, run, sample, publish. Nothing when idle."""
        began = self._clock()
        self._end_iteration(began)
        self._apply_control(began)
        plan = self._scheduler.plan(began)
        if plan:
            try:
                if self._sampler.masks is not None:
                    self._sampler.masks.begin(entry.request for entry in plan.entries if entry.samples)
                logits = self._runner.run(plan)
                sampled = self._sampler.sample(logits.sampled, logits.rows)
            except Exception as error:  # noqa: BLE001 - one request's fault must not end the others
                self._isolate(plan, error)
            else:
                self._publish(plan, logits, sampled)
            self._going_on = plan, began
        if not self._answers:
            self._end_iteration(self._clock())
        outputs, self._outputs = self._outputs, []
        return outputs

    # ---- between iterations

    def submit(self, request: Request) -> Admission:
        """Take a request, or raise RequestRejected with a reason a person can act on."""
        if request.id in self._answers:
            raise RequestRejected(RejectionReason.INVALID, f"a request named {request.id!r} is already here")
        validate.check(request, limit_tokens=self._limit_tokens, vocab_size=self._model.vocab_size)
        queue, most = self._scheduler.queue, self.settings.max_pending
        if not has_place(queue.waiting_of(request.tenant), len(queue), most):
            raise RequestRejected(
                RejectionReason.FULL, f"{len(queue)} requests already wait, of {most} at most"
            )
        request.state = State.WAITING
        request.arrived_s = self._clock()
        room = self._limit_tokens - len(request.prompt)
        wanted = request.sampling.max_tokens
        request.max_tokens = room if wanted is None else min(wanted, room)
        if request.sampling.runs_out and request.grammar is None and request.max_tokens > 0:
            request.remaining = RemainingCurve.exactly(request.max_tokens)
        position = len(self._scheduler.queue)
        if request.grammar is not None:
            self._guide(request, request.grammar)
        answer = Answer(request, self._model.vocabulary, self._model.eos_token_ids)
        finish = answer.replay()
        if request.guide is not None and request.guide.error:
            raise RequestRejected(
                RejectionReason.INVALID, "what was delivered is not what was asked for", "resume"
            )
        self._answers[request.id] = answer
        self._scheduler.queue.push(request)
        if finish is not None:
            self._finish(answer, finish)
        elif request.deadline_s is not None:
            self._watch(request.deadline_s, request.id)
        return Admission(position, request.max_tokens)

    def _guide(self, request: Request, grammar: Grammar) -> None:
        """From the beginning, also when it is taken again: the answer replays what there is of it."""
        if self._sampler.masks is None:
            from site_engine.model.grammar_bitmask import Masks  # only where grammars are used

            self._sampler.masks = Masks(self.settings.slots, self._model.vocab_size, self._model.device)
        request.guide = grammar.start()

    def cancel(self, request_id: str) -> None:
        """End a request in any state with the next step; an unknown id is nobody's concern."""
        self._cancelled.append(request_id)

    def release(self, request_ids: Iterable[str]) -> list[str]:
        """Give up those that have not started, so that another site may take them; exactly which."""
        released = [
            request_id for request_id in dict.fromkeys(request_ids) if request_id in self._scheduler.queue
        ]
        for request_id in released:
            self._forget(self._answers[request_id].request)
        return released

    @property
    def has_work(self) -> bool:
        return bool(self._answers or self._outputs or self._cancelled)

    def load(self) -> LoadFigures:
        scheduler, queue = self._scheduler, self._scheduler.queue
        remaining = [request.expected_remaining() for request in scheduler.running]
        # at least one each: an engine that runs ahead counts a token as computed before it is there
        unread = sum(max(1, len(each.tokens) - each.computed) for each in scheduler.running)
        back = [(len(request.tokens), request.expected_remaining()) for request in scheduler.preempted]
        values, weight = condense(remaining)
        prompt_tokens = queue.prompt_tokens + sum(tokens for tokens, _ in back)
        response_tokens = queue.response_tokens + sum(expected for _, expected in back)
        return LoadFigures(
            running=len(scheduler.running),
            pending=len(queue) + len(back),
            token_load=sum(remaining) + unread + prompt_tokens + response_tokens,
            kv_free_tokens=self._pool.available * self._pool.page_size,
            kv_reserved_tokens=scheduler.reserved_pages * self._pool.page_size,
            tokens_per_s=self._meter.tokens_per_s,
            seconds_per_iteration=self._meter.seconds_per_iteration,
            iteration=self._meter.fit.cost(),
            running_remaining=values,
            running_weight=weight,
            pending_prompt_tokens=prompt_tokens,
            pending_response_tokens=response_tokens,
            tokens_total=self._meter.tokens_total,
            prompt_tokens_total=self._meter.prompt_tokens_total,
            unread_tokens=unread,
        )

    def forget_totals(self) -> None:
        """What was computed so far does not count as served; what it cost is remembered."""
        self._meter.tokens_total = self._meter.prompt_tokens_total = 0

    def _swap_space(self) -> HostSwap:
        copy_s = copy_seconds_per_token(self._arena, self._clock)

        def worth(tokens: int) -> bool:
            """Both ways over, against computing all tokens again in chunks that read what came before."""
            cost = self._meter.fit.cost()
            again_s = tokens * (cost.per_token_s + cost.per_kv_token_s * tokens / (2 * self._token_budget))
            return 2 * tokens * copy_s < again_s

        return HostSwap(self._arena, self.settings.swap_tokens, worth)

    def _apply_control(self, now: float) -> None:
        cancelled, self._cancelled = self._cancelled, []
        for request_id in cancelled:
            if request_id in self._answers:
                self._finish(self._answers[request_id], Finish.CANCELLED)
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline_s, request_id = heappop(self._deadlines)
            answer = self._answers.get(request_id)
            if answer is not None and answer.request.deadline_s == deadline_s:
                self._finish(answer, Finish.FAILED, "its deadline passed before it was done")

    def _watch(self, deadline_s: float, request_id: str) -> None:
        if len(self._deadlines) > 2 * len(self._answers) + 64:  # most belong to answers that ended in time
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._answers]
            heapify(self._deadlines)
        heappush(self._deadlines, (deadline_s, request_id))

    # ---- after the model ran

    def _publish(self, plan: SchedulePlan, logits: Logits, sampled: Sampled) -> None:
        now = self._clock()
        self._scheduler.advance(plan)
        for entry, places in logits.prompts:
            self._answers[entry.request.id].read_prompt(entry.start, places)
        broken = set(sampled.broken)
        answers, outputs, alternatives = self._answers, self._outputs, sampled.alternatives
        for row, (request, token_id) in enumerate(zip(logits.sampled, sampled.token_ids, strict=True)):
            answer = answers[request.id]
            if row in broken:
                self._fail(answer, "the model's output was not finite")
                continue
            if request.guide is not None and request.guide.error:
                self._fail(answer, f"the answer's grammar: {request.guide.error}")
                continue
            if request.first_token_s is None:
                self._meter.prompt_tokens_total += request.prompt_len
            output = answer.take(token_id, now, alternatives.get(row) if alternatives else None)
            outputs.append(output)
            if output.finish is not None:
                self._forget(request)

    def _isolate(self, plan: SchedulePlan, error: Exception) -> None:
        """The iteration failed as a whole: compute its entries one by one, and fail those that fail alone."""
        entries = plan.entries
        lost: set[int] = set()  # pages that hold nothing, which others of the plan may have meant to read
        for entry in entries:
            if not lost.isdisjoint(entry.request.pages):
                self._scheduler.restart(entry.request)
                continue
            alone = SchedulePlan([entry]) if entry in plan.decodes else SchedulePlan([], [entry])
            try:
                if len(entries) == 1:
                    raise error
                logits = self._runner.run(alone)
                sampled = self._sampler.sample(logits.sampled, logits.rows)
            except Exception as reason:  # noqa: BLE001 - it becomes the request's own error
                lost.update(entry.request.pages)
                self._fail(self._answers[entry.request.id], f"{type(reason).__name__}: {reason}")
            else:
                self._publish(alone, logits, sampled)

    def _fail(self, answer: Answer, error: str) -> None:
        self._scheduler.invalidate(answer.request)
        self._arena.zero_pages([page for page in answer.request.pages if self._pool.references(page) == 1])
        self._finish(answer, Finish.FAILED, error)

    def _finish(self, answer: Answer, finish: Finish, error: str = "") -> None:
        self._outputs.append(answer.end(finish, self._clock(), error))
        self._forget(answer.request)

    def _forget(self, request: Request) -> None:
        self._scheduler.release(request)
        del self._answers[request.id]

    def _end_iteration(self, now: float) -> None:
        """An iteration lasts until the next begins, if there is more to do: what its owner does between the
        two counts. From end to end, the wait after a short one would count for the next.
        """
        if self._going_on is not None:
            plan, began = self._going_on
            self._going_on = None
            self._measure(plan, now - began)

    def _measure(self, plan: SchedulePlan, seconds: float, unread: int = 0) -> None:
        """`unread`: of the tokens it gave, those of answers that had ended."""
        decodes, prefills = plan.decodes, plan.prefills
        read = sum([start for _, start, _, _ in decodes]) + len(decodes)
        self._meter.iteration(
            rows=len(decodes) + len(prefills),
            tokens=plan.tokens,
            kv_tokens=read + sum([start + length for _, start, length, _ in prefills]),
            sampled=len(decodes) + sum([samples for _, _, _, samples in prefills]) - unread,
            seconds=max(seconds, self.settings.iteration_floor_s),
        )


def _memory(model: LoadedModel, settings: EngineSettings, *, paged: bool) -> tuple[int, PagePool, KVCache]:
    """The most tokens one request may have, the page pool and the memory behind it."""
    tokens = settings.kv_tokens
    if tokens is None:
        affordable = affordable_tokens(model.layers, model.dtype, model.device)
        tokens = min(affordable, settings.slots * model.context_tokens)
    pages = tokens // settings.page_size
    if pages < 1:
        raise ValueError(f"there is room for {tokens} tokens of keys and values, not for one page")
    layers = model.layers if paged else []
    arena = KVCache(layers, pages, settings.page_size, model.dtype, model.device)
    pool = PagePool(pages, settings.page_size, Poison(arena) if settings.debug_poison else None)
    return min(model.context_tokens, pages * settings.page_size), pool, arena
