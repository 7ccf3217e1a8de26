"""The engine of a site: iteration-level batching of many requests on one model.

Synchronous: no threads, no sleeping, no sockets. Except where stated, all methods are called from one thread.
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
"""Limit on requests that start in one overlapped iteration: planning more takes longer than computing it."""
EXPECTED_WITHIN = 32
"""Steps for which an engine waits for a request that another engine is about to hand over."""


class SiteEngine:
    """Schedules requests, runs them through the model and turns tokens into outputs.

    `runner` computes the plans and owns the KV cache. With an `OverlappedRunner` each iteration is launched
    before the tokens of the previous one are read: sampled tokens stay on the device as the next inputs, so
    the host plans and publishes while the device computes. The end of a request is then known one iteration
    late, and its row computes one more token, which is discarded. The mask of a grammar is computed when the
    previous token is known, while the device computes the logits. Only prompt log probabilities make all rows
    wait for the host.
    """

    def __init__(
        self,
        model: LoadedModel,
        runner: Runner,
        settings: EngineSettings,
        clock: Callable[[], float],
        variants: VariantStore | None = None,
    ) -> None:
        """Create an engine. Without `variants`, which `runner` must support, only the base is served."""
        self.settings = settings
        self.runner = runner
        self._overlapped = runner if isinstance(runner, OverlappedRunner) else None
        self._kv_cache = runner.kv_cache
        self.limit_tokens = min(model.context_tokens, self._kv_cache.tokens)  # of prompt and response
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
        self._unmeasured: tuple[SchedulePlan, float, int] | None = None  # plan, start in s, discarded tokens
        self._pending: PendingStep | None = None  # the step that the device is computing
        self._launched_s = self._published_s = 0.0  # of the pending step, and of the newest tokens
        self._expected_within = 0  # steps left to wait for a request from another engine; 0: none is expected

    def step(self) -> Sequence[Output]:
        """Run one iteration, or one training slice if no iteration is due. Return the outputs of requests."""
        if not (self._run_slice() or self._await_move()):
            if self._overlapped is None:
                self._step_synchronous()
            else:
                self._step_overlapped(self._overlapped)
        return self._live.take_outputs()

    def _run_slice(self) -> bool:
        """Run a training slice, or publish the step that it would delay. Return whether either was done."""
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
        """Hold back the next step while a request from another engine is expected, which would wait for that
        step. Publish the pending step instead; return whether there was one.
        """
        if not self._expected_within:
            return False
        self._expected_within -= 1
        if self._pending is None:
            return False
        self._publish_pending()
        return True

    def _step_synchronous(self) -> None:
        """Run one iteration: control, schedule, run, sample, publish."""
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
        """Run one iteration: control, schedule, launch, then publish the previous iteration."""
        began = self._clock()
        self._measure_last(began)
        self._live.end_due(began)
        max_new = 0 if self._expected_within else MAX_NEW_WHILE_OVERLAPPED
        plan = self._scheduler.plan(began, max_new=max_new, max_prompt_tokens=self.training.prompt_tokens)
        before, before_s = self._pending, self._launched_s
        self._pending, self._launched_s = None, began
        if any(_needs_host(chunk.request) for chunk in plan.prefills):
            self._publish_step(before, before_s)
            self._run(plan.of(lambda request: request.row >= 0), self._clock())
            return
        if plan:
            try:
                self._pending = runner.launch(plan, self._rules)
                self._scheduler.advance(plan)
                for request, start, length, samples in plan.chunks:
                    if samples and start + length - request.prompt_len + 1 >= request.max_tokens:
                        request.state = State.LAST  # its last token is being computed: not planned again
            except Exception as error:  # noqa: BLE001 - one request's fault must not end the others
                self._publish_step(before, before_s)
                before, again_s = None, self._clock()
                if left := plan.of(lambda request: request.row >= 0):  # without requests that have ended
                    discarded = self._isolate(left, error)
                    if len(left.chunks) > 1:  # a single chunk has failed and is not computed again
                        self._measure(left, self._clock() - again_s, discarded)
        self._publish_step(before, before_s)
        if self._pending is not None:
            self._pending.finish()  # grammars know the previous token now; later the device would idle

    # ---- between iterations

    def submit(self, request: Request, moved: Moved | None = None) -> None:
        """Queue a request. Raises RequestRejected with the reason.

        `moved`: the state of a request that another engine has started. Such a request was admitted there, so
        the limit on pending requests does not apply.
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
        """Raise RequestRejected if the queue has no place for another request of the tenant."""
        queue, max_pending = self._scheduler.queue, self.settings.max_pending
        if not has_place(queue.waiting_of(tenant), len(queue), max_pending):
            message = f"{len(queue)} requests already wait, of {max_pending} at most"
            raise RequestRejected(RejectionReason.FULL, message)

    def _begin(self, request: Request) -> None:
        """Set the arrival time, the token limit and the grammar position of a valid request."""
        request.state = State.WAITING
        request.arrived_s = self._clock()
        sampling, room = request.sampling, self.limit_tokens - request.prompt_len
        request.max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        if request.grammar is not None:
            request.guide = self._rules.start(request.grammar, self.settings.slots, self._model.vocab_size)
        elif sampling.runs_out and request.max_tokens > 0:
            request.remaining = RemainingCurve.exactly(request.max_tokens)

    def _enqueue(self, request: Request, moved: Moved | None) -> None:
        """Queue a request, with the keys and values received for it if another engine has started it."""
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
        """Hold back steps and new requests until the request that another engine is handing over arrives."""
        self._expected_within = EXPECTED_WITHIN

    def send_ahead(self, request_id: str, to: InboxPlace | None) -> bool:
        """Start copying the KV cache of a request to `to`. Return whether to call again after a step."""
        processor = self._live.processors.get(request_id)
        return processor is not None and self.inbox.send_ahead(processor.request, to)

    def export(self, request_id: str, to: InboxPlace | None = None) -> tuple[Sequence[Output], Moved | None]:
        """Remove a request in order to hand it over to another engine.

        Return the outputs of the pending step, and the state of the request, or None if those outputs end it.
        The keys and values that were not sent ahead are copied to `to`. The tenant is charged for what the
        request used here.
        """
        processor = self._live.processors.get(request_id)
        computed = 0 if processor is None else self.inbox.send(processor.request, to)
        self._publish_pending()  # the copies are queued behind this step
        self.inbox.sent(to)
        outputs = self._live.take_outputs()
        if processor is None or request_id not in self._live.processors:
            return outputs, None
        moved = processor.request.to_move()._replace(computed=computed, place=to if computed else None)
        self._live.forget(processor.request)
        return outputs, moved

    def load_variant(self, variant: Variant) -> Callable[[], Chain]:
        """Load, check and certify a variant. May be called from any thread.

        Return the function that publishes the variant, to be called from the engine's thread. Both raise
        VariantRefused.
        """
        return self._variants.load(variant)

    def add_variant(self, variant: Variant) -> Chain:
        """Load a variant and publish it at once. Raises VariantRefused."""
        return self.load_variant(variant)()

    @property
    def variants(self) -> Mapping[str, Chain]:
        """The variants that take requests, by id."""
        return {variant_id: each.chain for variant_id, each in self._variants.served.items()}

    def remove_variant(self, variant_id: str) -> None:
        """Refuse new requests for a variant; those queued or running finish. Raises VariantRefused."""
        self._variants.remove(variant_id)

    def cancel(self, request_id: str) -> None:
        """Cancel a request in any state, with effect at the next step. An unknown id is ignored."""
        self._live.cancel(request_id)

    def end_by_text(self, request_id: str, generated: int) -> None:
        """End a request whose text, decoded in another process, ended after `generated` tokens."""
        processor = self._live.processors.get(request_id)
        if processor is not None:
            self._scheduler.reservation.factors.ended(processor.request, generated)
            self._live.finish(processor, Finish.CANCELLED)  # before a token of the pending step ends it, too

    def waits(self, request_id: str) -> bool:
        """Return whether a request is queued and has not started."""
        return request_id in self._scheduler.queue

    def release(self, request_ids: Iterable[str]) -> list[str]:
        """Remove the requests that have not started, for another site to take. Return their ids."""
        released = [request_id for request_id in dict.fromkeys(request_ids) if self.waits(request_id)]
        for request_id in released:
            self._live.forget(self._live.processors[request_id].request)
        return released

    @property
    def has_work(self) -> bool:
        live = self._live
        return bool(self._pending is not None or live.processors or live.needs_step or self.training.jobs)

    def load(self) -> LoadFigures:
        """Return running and waiting work, free KV memory and the measured speed."""
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
        """Wait for a launched step, publish its tokens and measure it. Does nothing for None."""
        if step is None:
            return
        tokens = step.wait()
        now = self._clock()
        discarded = self._publish(step.requests, tokens, now)
        self._measure(step.plan, now - max(launched_s, self._published_s), discarded)
        self._published_s = now

    def _publish(self, requests: Sequence[Request], tokens: StepTokens, now: float) -> int:
        """Turn one token of each request into an output. Return the number of discarded tokens.

        A token is discarded if its request ended before this step was read, has failed, or wanted only its
        prompt evaluated.
        """
        token_ids, broken, alternatives = tokens
        live, outputs, discarded = self._live.processors, self._live.outputs, 0
        in_columns = not outputs.has_tokens
        described = {*broken, *(alternatives or ())}  # rows with more than a token id
        for row, (request, token_id) in enumerate(zip(requests, token_ids, strict=True)):
            if request.state is State.FINISHED:
                discarded += 1
                continue
            processor = live[request.id]
            if in_columns and row not in described and (generated := processor.take_alone(token_id)):
                outputs.request_ids.append(request.id)
                outputs.token_ids.append(token_id)
                outputs.generated.append(generated)
                continue
            fault = broken.get(row)
            if fault is None and request.guide is not None and request.guide.error:
                fault = f"the answer's grammar: {request.guide.error}"
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
        """Compute the chunks of a failed iteration one by one. Fail the requests whose chunk fails alone.

        Return the number of the plan's tokens that were discarded or not computed.
        """
        chunks, made = plan.chunks, 0
        lost: set[int] = set()  # pages that were not written, which other chunks of the plan may read
        for chunk in chunks:
            if not lost.isdisjoint(chunk.request.pages):
                continue  # it starts again below
            alone = SchedulePlan([chunk]) if chunk in plan.decodes else SchedulePlan([], [chunk])
            try:
                if len(chunks) == 1:
                    raise error
                logits = self.runner.run(alone)
                sampled = self._sampler.sample(logits.sampled, logits.rows)
            except Exception as reason:  # noqa: BLE001 - it becomes the request's own error
                lost.update(chunk.request.pages[chunk.start // self._pool.page_size :])
                self._live.fail(self._live.processors[chunk.request.id], f"{type(reason).__name__}: {reason}")
            else:
                made += alone.samples - self._publish_sampled(alone, logits, sampled)
        for request in [one for one in self._scheduler.running if not lost.isdisjoint(one.pages)]:
            self._scheduler.restart(request)
        return plan.samples - made

    def _measure_last(self, now: float) -> None:
        """Measure the last synchronous iteration, up to the start of the next one if there is more work.

        The time that the engine's owner spends between two iterations counts for the first of them.
        """
        if self._unmeasured is not None:
            plan, began, discarded = self._unmeasured
            self._unmeasured = None
            self._measure(plan, now - began, discarded)

    def _measure(self, plan: SchedulePlan, seconds: float, discarded: int = 0) -> None:
        self.training.served(plan, seconds)
        self._meter.iteration(
            rows=len(plan.chunks),
            tokens=plan.tokens,
            kv_tokens=plan.kv_tokens,
            sampled=plan.samples - discarded,
            seconds=max(seconds, self.settings.iteration_floor_s),
        )


def _needs_host(request: Request) -> bool:
    """Return whether the request wants log probabilities of its prompt, which the host computes."""
    return request.sampling.prompt_logprobs and request.first_token_s is None
