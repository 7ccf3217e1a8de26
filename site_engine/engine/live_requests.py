"""Keep the requests of an engine that have not ended, and end them: each with one last output.

A request ends with a token, by its client, at its deadline or with an error; or it leaves for another engine,
without an output. Whichever it is, the scheduler gets back what the request holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from site_engine.core.deadlines import Deadlines
from site_engine.core.request import Finish, Output, Request
from site_engine.core.scheduler import Scheduler
from site_engine.core.step_outputs import StepOutputs
from site_engine.engine.output_processor import OutputProcessor
from site_engine.model.kv_cache import KVCache


class LiveRequests:
    """`processors` has the requests that have not ended, by id; `outputs` are those not taken yet."""

    def __init__(self, scheduler: Scheduler, kv_cache: KVCache, clock: Callable[[], float]) -> None:
        self.processors: dict[str, OutputProcessor] = {}
        self.outputs = StepOutputs()
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._clock = clock
        self._cancelled: list[str] = []
        self._deadlines = Deadlines()

    @property
    def needs_step(self) -> bool:
        """Return whether outputs wait to be taken, or cancelled requests to be ended."""
        return bool(self.outputs or self._cancelled)

    def add(self, processor: OutputProcessor) -> None:
        request = processor.request
        self.processors[request.id] = processor
        if request.deadline_s is not None:
            self._deadlines.add(request.deadline_s, request.id, self.processors)

    def cancel(self, request_id: str) -> None:
        """End a request with the next `end_due`; ignore an unknown id."""
        self._cancelled.append(request_id)

    def end_due(self, now: float) -> None:
        """End the requests that were cancelled or are past their deadline."""
        cancelled, self._cancelled = self._cancelled, []
        for request_id in cancelled:
            if request_id in self.processors:
                self.finish(self.processors[request_id], Finish.CANCELLED)
        for deadline_s, request_id in self._deadlines.pop_due(now):
            processor = self.processors.get(request_id)
            if processor is not None and processor.request.deadline_s == deadline_s:
                self.finish(processor, Finish.FAILED, "its deadline passed before it was done")

    def take_outputs(self) -> Sequence[Output]:
        outputs, self.outputs = self.outputs, StepOutputs()
        return outputs if outputs.request_ids else outputs.others

    def fail(self, processor: OutputProcessor, error: str) -> None:
        """End a request whose keys and values cannot be trusted: nobody reads them again."""
        request, manager = processor.request, self._scheduler.kv_cache_manager
        manager.invalidate(request)
        self._kv_cache.zero_pages([page for page in request.pages if manager.pool.references(page) == 1])
        self.finish(processor, Finish.FAILED, error)

    def finish(self, processor: OutputProcessor, finish: Finish, error: str = "") -> None:
        """End a request with an output of its own."""
        self.outputs.others.append(processor.end(finish, self._clock(), error))
        self.forget(processor.request)

    def forget(self, request: Request) -> None:
        """Let go of a request that has had its last output, or goes on elsewhere."""
        self._scheduler.release(request)
        del self.processors[request.id]
        request.variant = None  # which is in memory as long as something refers to it
