"""The engine core: continuous batching of requests to one model, one iteration per `step()`.

Synchronous: no threads, no sleeping, no sockets. The owner calls all methods from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from site_engine.core.chain import Chain, Variant
from site_engine.core.inbox import InboxPlace
from site_engine.core.load import LoadFigures, Meter
from site_engine.core.page_pool import PagePool
from site_engine.core.prefix_cache import PrefixTree
from site_engine.core.remaining_curve import RemainingCurve
from site_engine.core.request import (
    Finish,
    Moved,
    Output,
    RejectionReason,
    Request,
    RequestRejected,
    State,
)
from site_engine.core.request_queue import AdmissionQueue, has_place
from site_engine.core.schedule_plan import SchedulePlan
from site_engine.core.scheduler import Scheduler
from site_engine.cuda.shared_memory import shared_memory
from site_engine.engine.live_requests import LiveRequests
from site_engine.engine.load_figures import load_figures
from site_engine.engine.output_processor import OutputProcessor
from site_engine.engine.settings import EngineSettings
from site_engine.engine.sleeper import sleeper_of
from site_engine.engine.training_loop import TrainingLoop
from site_engine.engine.validate import validate_request
from site_engine.model.kv_cache import Poison
from site_engine.model.kv_inbox import KVInbox
from site_engine.model.loader import LoadedModel
from site_engine.model.logit_rules import LogitRules
from site_engine.model.received_kv import ReceivedPages
from site_engine.model.runner import NOT_FINITE, Logits, OverlappedRunner, PendingStep, Runner, StepTokens
from site_engine.model.sampler import Sampled, Sampler
from site_engine.variants.base_alone import BaseAlone
from site_engine.variants.store import VariantStore

MAX_NEW_WHILE_OVERLAPPED = 32
"""Limit on the requests that start in one overlapped step: planning more takes longer than the device."""
EXPECTED_WITHIN = 32
"""Steps for which an engine waits for an expected request that another engine is about to export."""


class SiteEngine:
    """Schedules requests, runs them through the model and turns tokens into outputs.

    `runner` computes the plans and owns the KV cache. With an `OverlappedRunner` each iteration is launched
    before the results of the previous one are read: sampled tokens stay on the device as the next inputs, so
    the host plans and publishes while the device computes. The host then learns one iteration late that a
    request has ended; the extra token that the request's row computes is discarded. Grammar masks are
    computed when the previous token has been read, while the device computes the logits. Only prompt log
    probabilities make the step synchronous for all rows.
    """

    def __init__(
        self,
        model: LoadedModel,
        runner: Runner,
        settings: EngineSettings,
        clock: Callable[[], float],
        variants: VariantStore | None = None,
    ) -> None:
        """Create an engine. Without `variants`, which `runner` must support, it serves only the base."""
        self.settings = settings
        self.runner = runner
        self._overlapped = runner if isinstance(runner, OverlappedRunner) else None
        self._kv_cache = runner.kv_cache
        self.limit_tokens = min(model.context_tokens, self._kv_cache.tokens)  # prompt and output of a request
        self._model = model
        self._variants = variants or BaseAlone()
        self._clock = clock
        poison = Poison(self._kv_cache) if settings.debug_poison else None
        self._pool = PagePool(self._kv_cache.pages, self._kv_cache.page_size, poison)
        self._token_budget = settings.token_budget_on(model.device.type)
        self._meter = Meter()
        self._received = ReceivedPages(self._kv_cache)
        self._scheduler = Scheduler(
            self._pool,
            AdmissionQueue(settings.policy.score),
            PrefixTree(self._pool) if settings.prefix_cache else None,
            self._received,
            slots=settings.slots,
            token_budget=self._token_budget,
            policy=settings.policy,
            share_prefixes=settings.share_prefixes,
            adapters=self._variants.slots,
            write_virtual=self._kv_cache.write_virtual,
            fit=self._meter.fit,
        )
        self.training = TrainingLoop(model, self._scheduler, self._meter.fit, settings.training, clock)
        self.sleeper = sleeper_of(self._kv_cache, self._scheduler, self._publish_pending)
        self.inbox = KVInbox(self._kv_cache, shared_memory)
        self._rules = LogitRules(model.eos_token_ids, model.device)
        self._sampler = Sampler(self._rules, model.device)
        self._live = LiveRequests(self._scheduler, self._kv_cache, clock)
        self._unmeasured: tuple[SchedulePlan, float, int] | None = None  # plan, start time, discarded tokens
        self._pending: PendingStep | None = None  # launched on the device, not read yet
        self._launched_s = self._published_s = 0.0  # when the newest step was launched, and tokens published
        self._expected_within = 0  # remaining steps to wait for a moved request; 0: none is expected

    def step(self) -> Sequence[Output]:
        """Run one iteration, or a slice of training when serving allows it; return the new outputs."""
        if not (self._run_slice() or self._await_move()):
            if self._overlapped is None:
                self._step_synchronous()
            else:
                self._step_overlapped(self._overlapped)
        return self._live.take_outputs()

    def _run_slice(self) -> bool:
        """Run a training slice, or publish the pending step before one; return whether either was done."""
        if not self.training.jobs or self._live.needs_step:
            return False
        self._measure_last(self._clock())
        if self._pending is None:
            return self.training.run_slice(self._published_s)
        if not self.training.is_due(self._published_s):
            return False
        self._publish_pending()
        return True

    def _await_move(self) -> bool:
        """While a moved request is expected, publish the pending step; return whether there was one.

        No further step is launched ahead: the moved request would wait for it.
        """
        if not self._expected_within:
            return False
        self._expected_within -= 1
        if self._pending is None:
            return False
        self._publish_pending()
        return True

    def _step_synchronous(self) -> None:
        """Apply control, schedule, run, sample and publish one iteration."""
        began = self._clock()
        self._measure_last(began)
        self._live.end_due(began)
        max_new = 0 if self._expected_within else None
        plan = self._scheduler.plan(began, max_new=max_new, max_prompt_tokens=self.training.prompt_tokens)
        self._run(plan, began)

    def _run(self, plan: SchedulePlan, began: float) -> None:
        """Run, sample and publish a plan whose input tokens are all known to the host."""
        if plan:
            try:
                logits = self.runner.run(plan)
                sampled = self._sampler.sample(logits.sampled, logits.rows)
            except Exception as error:  # noqa: BLE001 - one request's fault must not end the others
                discarded = self._isolate(plan, error)
            else:
                discarded = self._publish_sampled(plan, logits, sampled)
            self._unmeasured = plan, began, discarded
        if not self._live.processors:
            self._measure_last(self._clock())

    def _step_overlapped(self, runner: OverlappedRunner) -> None:
        """Apply control, schedule and launch one iteration, then publish the previous one."""
        began = self._clock()
        self._measure_last(began)
        self._live.end_due(began)
        max_new = 0 if self._expected_within else MAX_NEW_WHILE_OVERLAPPED
        plan = self._scheduler.plan(began, max_new=max_new, max_prompt_tokens=self.training.prompt_tokens)
        before, before_s = self._pending, self._launched_s
        self._pending, self._launched_s = None, began
        if any(chunk.request.needs_prompt_logprobs for chunk in plan.prefills):
            self._publish_step(before, before_s)
            self._run(plan.of(lambda request: request.row >= 0), self._clock())
            return
        if plan:
            try:
                self._pending = runner.launch(plan, self._rules)
                self._scheduler.advance(plan)
                for request in plan.sampled:
                    if request.computed - request.prompt_len + 1 >= request.max_tokens:
                        request.state = State.LAST  # the last token is being computed: no more planning
            except Exception as error:  # noqa: BLE001 - one request's fault must not end the others
                self._publish_step(before, before_s)
                before, again_s = None, self._clock()
                if left := plan.of(lambda request: request.row >= 0):  # without requests that have ended
                    discarded = self._isolate(left, error)
                    if len(left.chunks) > 1:  # a single chunk has failed and is not computed again
                        self._measure(left, self._clock() - again_s, discarded)
        self._publish_step(before, before_s)
        if self._pending is not None:
            self._pending.finish()  # grammars know the last token now; any later, the device would idle

    # ---- between iterations

    def submit(self, request: Request, moved: Moved | None = None) -> None:
        """Queue a request. Raises RequestRejected, whose message gives the reason.

        `moved` is the state of a request that another engine has begun and exported. Such a request was
        admitted there, so the limit on waiting requests does not apply.
        """
        if request.id in self._live.processors:
            raise RequestRejected(RejectionReason.INVALID, f"a request named {request.id!r} is already here")
        variants = self._variants.served
        request.sampling = request.sampling.with_defaults(self._model.sampling_defaults)
        validate_request(request, self.limit_tokens, self._model.vocab_size, variants, moved)
        if moved is None:
            self._check_place(request.tenant)
        request.answered_by(request.variant or variants.get(request.chain))
        self._begin(request)
        ends = self._model.eos_token_ids if request.variant is None else request.variant.eos_token_ids
        processor = OutputProcessor(request, self._model.vocabulary, ends)
        finish = processor.replay()
        if processor.contradicts_delivered or (request.guide is not None and request.guide.error):
            message = "what was delivered is not what was asked for"
            raise RequestRejected(RejectionReason.INVALID, message, "resume")
        self._enqueue(request, moved)
        self._live.add(processor)
        if finish is not None:
            self._live.finish(processor, finish)

    def _check_place(self, tenant: str) -> None:
        """Raise RequestRejected if the tenant may not queue another request."""
        queue, max_pending = self._scheduler.queue, self.settings.max_pending
        if not has_place(queue.waiting_of(tenant), len(queue), max_pending):
            message = f"{len(queue)} requests already wait, of {max_pending} at most"
            raise RequestRejected(RejectionReason.FULL, message)

    def _begin(self, request: Request) -> None:
        """Initialize a valid request's arrival time, token limit, grammar position and length forecast."""
        request.state = State.WAITING
        request.arrived_s = self._clock()
        sampling, room = request.sampling, self.limit_tokens - request.prompt_len
        request.max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        if request.grammar is not None:
            request.guide = self._rules.start(request.grammar, self.settings.slots, self._model.vocab_size)
        elif sampling.runs_out and request.max_tokens > 0:
            request.remaining = RemainingCurve.exactly(request.max_tokens)

    def _enqueue(self, request: Request, moved: Moved | None) -> None:
        """Queue a request; a moved one keeps its history, and its keys and values if they were received."""
        now_s = request.arrived_s
        if moved is not None:
            self._expected_within = 0
            request.take_up(moved)
            if moved.computed < len(request.tokens) and (kept := self.inbox.receive(moved)) is not None:
                self._received.put(request.id, kept)
                request.received = moved.computed
                self._scheduler.adopt(request)
                return
        self._scheduler.queue.push(request, now_s)

    def expect(self) -> None:
        """Hold back steps and starts until a moved request comes, for EXPECTED_WITHIN steps at most."""
        self._expected_within = EXPECTED_WITHIN

    def send_ahead(self, request_id: str, to: InboxPlace | None) -> bool:
        """Copy computed keys and values to a place; return whether to call again after the next step."""
        processor = self._live.processors.get(request_id)
        return processor is not None and self.inbox.send_ahead(processor.request, to)

    def export(self, request_id: str, to: InboxPlace | None = None) -> tuple[Sequence[Output], Moved | None]:
        """Remove a request so that another engine can continue it; return pending outputs and its state.

        The state is None if the request is unknown or one of the outputs ends it. The keys and values that
        were not sent ahead are copied to the place `to`, if one is given. The tenant's charge is settled to
        the tokens that were generated here.
        """
        processor = self._live.processors.get(request_id)
        computed = 0 if processor is None else self.inbox.send(processor.request, to)
        self._publish_pending()  # the copies are queued behind the pending step
        self.inbox.sent(to)
        outputs = self._live.take_outputs()
        if processor is None or request_id not in self._live.processors:
            return outputs, None
        moved = processor.request.to_move()._replace(computed=computed, place=to if computed else None)
        self._live.forget(processor.request)
        return outputs, moved

    def load_variant(self, variant: Variant) -> Callable[[], Chain]:
        """Load, check and certify a variant, on any thread; return the function that publishes it.

        This method and the returned function raise VariantRefused.
        """
        return self._variants.load(variant)

    def add_variant(self, variant: Variant) -> Chain:
        """Load a variant and publish it at once. Raises VariantRefused."""
        return self.load_variant(variant)()

    @property
    def variants(self) -> Mapping[str, Chain]:
        """The chains of the variants that accept requests, by variant id."""
        return {variant_id: each.chain for variant_id, each in self._variants.served.items()}

    def remove_variant(self, variant_id: str) -> None:
        """Refuse new requests of a variant; submitted ones finish with it. Raises VariantRefused."""
        self._variants.remove(variant_id)

    def cancel(self, request_id: str) -> None:
        """End a request in any state at the next step. Unknown ids are ignored."""
        self._live.cancel(request_id)

    def end_by_text(self, request_id: str, generated: int) -> None:
        """End a request whose text, detokenized in another process, stopped after `generated` tokens."""
        processor = self._live.processors.get(request_id)
        if processor is not None:
            self._scheduler.reservation.factors.ended(processor.request, generated)
            self._live.finish(processor, Finish.CANCELLED)  # now: a pending token may end the request as well

    def waits(self, request_id: str) -> bool:
        """Return whether a request is waiting in the queue, that is, has not started in this engine."""
        return request_id in self._scheduler.queue

    def release(self, request_ids: Iterable[str]) -> list[str]:
        """Remove the given requests that have not started, for another site to serve; return their ids."""
        released = [request_id for request_id in dict.fromkeys(request_ids) if self.waits(request_id)]
        for request_id in released:
            self._live.forget(self._live.processors[request_id].request)
        return released

    @property
    def has_work(self) -> bool:
        live = self._live
        return bool(self._pending is not None or live.processors or live.needs_step or self.training.jobs)

    def load(self) -> LoadFigures:
        """Return the load figures: running and waiting requests, free KV memory and measured speed."""
        slots, floor_s = self.settings.slots, self.settings.iteration_floor_s
        return load_figures(self._scheduler, self._meter, self.training, slots=slots, floor_s=floor_s)

    def forget_totals(self) -> None:
        """Reset the totals of tokens served; keep the measured costs."""
        self._meter.forget_totals()

    # ---- after the model ran

    def _publish_sampled(self, plan: SchedulePlan, logits: Logits, sampled: Sampled) -> int:
        self._published_s = now = self._clock()
        self._scheduler.advance(plan)
        for chunk, rows in logits.prompts:
            self._live.processors[chunk.request.id].read_prompt(chunk.start, rows)
        token_ids, broken, alternatives = sampled
        tokens = StepTokens(token_ids, dict.fromkeys(broken, NOT_FINITE), alternatives)
        return self._publish(logits.sampled, tokens, now)

    def _publish_pending(self) -> None:
        pending, self._pending = self._pending, None
        self._publish_step(pending, self._launched_s)

    def _publish_step(self, step: PendingStep | None, launched_s: float) -> None:
        """Wait for a launched step, publish its tokens and measure its duration. None is a no-op."""
        if step is None:
            return
        tokens = step.wait()
        now = self._clock()
        discarded = self._publish(step.requests, tokens, now)
        self._measure(step.plan, now - max(launched_s, self._published_s), discarded)
        self._published_s = now

    def _publish(self, requests: Sequence[Request], tokens: StepTokens, now: float) -> int:
        """Turn one token of each request into an output; return the number of discarded tokens.

        A token is discarded if its request has already ended, fails now, or asked for no tokens
        (`max_tokens` 0: only the prompt is evaluated).
        """
        token_ids, broken, alternatives = tokens
        live, outputs, discarded = self._live.processors, self._live.outputs, 0
        # rows with an error or log probabilities; all, if a token before these is not in columns
        described = range(len(requests)) if outputs.has_tokens else {*broken, *(alternatives or ())}
        for row, (request, token_id) in enumerate(zip(requests, token_ids, strict=True)):
            generated, guide = len(request.tokens) - request.prompt_len + 1, request.guide
            alone = generated < request.alone_until and token_id not in request.ends and row not in described
            if guide is not None and request.state is not State.FINISHED:
                alone &= guide.take(token_id) and not guide.ended
            if alone:
                request.tokens.append(token_id)
                outputs.request_ids.append(request.id)
                outputs.token_ids.append(token_id)
                outputs.generated.append(generated)
                continue
            if request.state is State.FINISHED:
                discarded += 1
                continue
            processor = live[request.id]
            fault = broken.get(row)
            if fault is None and guide is not None and guide.error:
                fault = f"the answer's grammar: {guide.error}"
            if fault is not None:
                self._live.fail(processor, fault)
                discarded += 1
                continue
            if request.first_token_s is None:
                self._meter.prompt_tokens_total += len(request.prompt)
            output = processor.take(token_id, now, alternatives.get(row) if alternatives else None)
            outputs.others.append(output)
            discarded += not output.token_ids
            if output.finish is not None:
                self._scheduler.reservation.factors.ended(request, request.generated)
                self._live.forget(request)
        return discarded

    def _isolate(self, plan: SchedulePlan, error: Exception) -> int:
        """Run the chunks of a failed iteration one by one; fail each request whose chunk fails again.

        Returns the number of the plan's tokens that were not sampled or were discarded.
        """
        chunks, made = plan.chunks, 0
        lost: set[int] = set()  # pages never written, which other chunks of the plan may share
        for at, chunk in enumerate(chunks):
            if not lost.isdisjoint(chunk.request.pages):
                continue  # restarted below
            alone = SchedulePlan([chunk]) if at < len(plan.decoding) else SchedulePlan([], [chunk])
            try:
                if len(chunks) == 1:
                    raise error
                logits = self.runner.run(alone)
                sampled = self._sampler.sample(logits.sampled, logits.rows)
            except Exception as reason:  # noqa: BLE001 - reported as the request's error
                lost.update(chunk.request.pages[chunk.start // self._pool.page_size :])
                self._live.fail(self._live.processors[chunk.request.id], f"{type(reason).__name__}: {reason}")
            else:
                made += alone.samples - self._publish_sampled(alone, logits, sampled)
        for request in [one for one in self._scheduler.running if not lost.isdisjoint(one.pages)]:
            self._scheduler.restart(request)
        return plan.samples - made

    def _measure_last(self, now: float) -> None:
        """Record the duration of the last synchronous iteration, up to `now`.

        While there is work, `now` is the start of the next iteration: the time that the engine's owner spends
        between two iterations counts toward the first.
        """
        if self._unmeasured is not None:
            plan, began, discarded = self._unmeasured
            self._unmeasured = None
            self._measure(plan, now - began, discarded)

    def _measure(self, plan: SchedulePlan, seconds: float, discarded: int = 0) -> None:
        self.training.served(plan, seconds)
        self._meter.iteration(
            rows=len(plan.decoding) + len(plan.prefills),
            tokens=plan.tokens,
            kv_tokens=plan.kv_tokens,
            sampled=plan.samples - discarded,
            seconds=max(seconds, self.settings.iteration_floor_s),
        )
