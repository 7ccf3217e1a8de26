"""The engine on a GPU: the next iteration is launched before the one that runs is read.

Tokens stay on the device as the next inputs, so the host plans and publishes while the device computes. Whose
answer ends is known one iteration late: that row computes once more, and nobody reads it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from site_engine.core.request import Admission, Output, Request, Sampling, State
from site_engine.core.scheduler import ScheduledChunk, SchedulePlan
from site_engine.cuda.compile import QUERY_KEY_VALUE, compile_ends, compile_layers, join
from site_engine.cuda.llama_forward import lean_forward
from site_engine.cuda.runner import DeviceRunner, PendingStep
from site_engine.engine.engine import EngineSettings, SiteEngine
from site_engine.model import certify
from site_engine.model.loader import CannotServe, LoadedModel
from site_engine.model.runner import Forward, PackedRunner

WARM_CONTEXT_TOKENS = 1024
MOST_NEW = 32  # requests that start in one iteration: with more the device waits for the host


class AheadEngine(SiteEngine):
    """One iteration ahead while the device can choose every token itself; else as the engine it extends."""

    def __init__(
        self,
        model: LoadedModel,
        settings: EngineSettings,
        clock: Callable[[], float],
        *,
        forward: Forward | None = None,
    ) -> None:
        super().__init__(model, settings, clock)
        reference = self._runner
        assert isinstance(reference, PackedRunner)
        self._flight: PendingStep | None = None
        self._launched_s = 0.0  # when the flight began
        self._published_s = 0.0  # when the one before it was read
        self._careful: set[str] = set()  # requests whose rules need tokens or logits on the host
        self._device_runner = DeviceRunner(
            forward or model.forward,
            self._arena,
            reference,
            slots=settings.slots,
            pages_per_row=self._pool.pages_for(self._limit_tokens),
            heads_per_kv_head=_heads_per_kv_head(model),
        )
        self._runner = self._device_runner
        self._certify(reference)

    def warm(self, longest: int = WARM_CONTEXT_TOKENS) -> int:
        """Make the graphs before the first request comes; their number. Others are made when they are met."""
        gc.collect()
        gc.freeze()  # what is loaded stays: no search through it between two steps
        return self._device_runner.warm(min(longest, self._limit_tokens))

    def _certify(self, reference: PackedRunner) -> None:
        """Raise CannotServe unless the device computes the reference's logits: a chunk, the rest, a token."""
        tokens = certify.sample_prompts(self._model.vocab_size)[0][: self._limit_tokens - 1]
        request = Request("certify", tokens, Sampling(temperature=0.0))
        request.row, request.pages = 0, self._pool.take(self._pool.pages_for(len(tokens))) or []
        middle, last = len(tokens) // 2, len(tokens) - 1
        chunks = [
            ScheduledChunk(request, 0, middle, True),
            ScheduledChunk(request, middle, last - middle, True),
        ]
        tolerance = certify.TOLERANCE.get(self._model.dtype, 0.0)
        for plan in [
            *(SchedulePlan([], [chunk]) for chunk in chunks),
            SchedulePlan([ScheduledChunk(request, last, 1, True)]),
        ]:
            wanted = reference.run(plan).rows.float()
            found = self._device_runner.run(plan).rows.float()
            off = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))
            if not off <= tolerance:
                raise CannotServe(
                    f"{type(self._model.model).__name__} computes other logits here than the reference: "
                    f"they differ by {off:.1e} of the largest (limit {tolerance:.0e})"
                )
        self._pool.drop(request.pages)

    def step(self) -> list[Output]:
        """One iteration: apply control, schedule, launch; publish the iteration before it."""
        if self._careful:
            self._land()
            return super().step()
        began = self._clock()
        self._end_iteration(began)
        self._apply_control(began)
        plan = self._scheduler.plan(began, MOST_NEW)
        before, self._flight = self._flight, None
        before_s, self._launched_s = self._launched_s, began
        if plan:
            try:
                self._flight = self._device_runner.launch(plan)
                self._advance(plan)
            except Exception as error:  # noqa: BLE001 - one request's fault must not end the others
                self._publish_flight(before, before_s)
                before = None
                self._isolate(self._alive(plan), error)
        self._publish_flight(before, before_s)
        outputs, self._outputs = self._outputs, []
        return outputs

    def submit(self, request: Request) -> Admission:
        admission = super().submit(request)
        if not _plain(request) and request.id in self._answers:
            self._careful.add(request.id)
        return admission

    @property
    def has_work(self) -> bool:
        return self._flight is not None or super().has_work

    def _land(self) -> None:
        flight, self._flight = self._flight, None
        self._publish_flight(flight, self._launched_s)

    def _advance(self, plan: SchedulePlan) -> None:
        """What was launched counts as computed. Whose last token is on its way is not planned again."""
        self._scheduler.advance(plan)
        for request, start, length, samples in plan.entries:
            if samples and start + length - request.prompt_len + 1 >= request.max_tokens:
                request.state = State.LAST

    def _publish_flight(self, flight: PendingStep | None, launched_s: float) -> None:
        if flight is None:
            return
        token_ids, broken = flight.land()
        now = self._clock()
        answers, outputs, unread = self._answers, self._outputs, 0
        for row, (request, token_id) in enumerate(zip(flight.requests, token_ids, strict=True)):
            answer = answers.get(request.id)
            if answer is None or answer.request is not request:
                unread += 1  # it ended while its row ran once more
                continue
            if row in broken:
                self._fail(answer, "the model's output was not finite")
                continue
            if request.first_token_s is None:
                self._meter.prompt_tokens_total += request.prompt_len
            output = answer.take(token_id, now, None)
            outputs.append(output)
            if output.finish is not None:
                self._forget(request)
        self._measure(flight.plan, now - max(launched_s, self._published_s), unread)
        self._published_s = now

    def _alive(self, plan: SchedulePlan) -> SchedulePlan:
        """Of a plan that failed, the entries whose requests still run: some ended by the tokens before."""

        def runs(request: Request) -> bool:
            answer = self._answers.get(request.id)
            return answer is not None and answer.request is request and request.row >= 0

        return SchedulePlan(
            [entry for entry in plan.decodes if runs(entry.request)],
            [entry for entry in plan.prefills if runs(entry.request)],
        )

    def _forget(self, request: Request) -> None:
        self._careful.discard(request.id)
        super()._forget(request)


def engine_on_gpu(model: LoadedModel, settings: EngineSettings, clock: Callable[[], float]) -> AheadEngine:
    """Ready to serve: made fast, certified, its graphs made."""
    engine = AheadEngine(model, settings, clock, forward=fast_forward(model))
    engine.warm()
    return engine


def fast_forward(model: LoadedModel) -> Forward:
    """The model's pass with fewer kernels: by our own layers if it is of the Llama family, else compiled."""
    lean = lean_forward(model)
    if lean is not None:
        return lean
    if model.device.type == "cuda":
        join(model.model, QUERY_KEY_VALUE)
    compile_layers(model.model)
    compile_ends(model.model)
    return model.forward


def _plain(request: Request) -> bool:
    """Nothing that needs the logits or the tokens on the host before the next step starts."""
    sampling = request.sampling
    return (
        request.grammar is None
        and not sampling.logit_bias
        and sampling.min_tokens == 0
        and sampling.logprobs is None
        and not sampling.prompt_logprobs
        and not sampling.presence_penalty
        and not sampling.frequency_penalty
        and sampling.repetition_penalty == 1.0
    )


def _heads_per_kv_head(model: LoadedModel) -> int:
    config = model.model.config.get_text_config()
    return max(1, int(config.num_attention_heads) // min(shape.kv_heads for shape in model.layers))
