"""Track the requests of an engine until they end, each with exactly one last output.

A request ends with a token, by a cancel, at its deadline or with an error. A request that moves to another
engine leaves without an output. In every case the scheduler frees the request's row and pages.
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
    """`processors` holds the live requests' output processors by id, `outputs` the outputs not taken yet."""

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
        """Return whether there are outputs to take or cancelled requests to end."""
        return bool(self.outputs or self._cancelled)

    def add(self, processor: OutputProcessor) -> None:
        request = processor.request
        self.processors[request.id] = processor
        if request.deadline_s is not None:
            self._deadlines.add(request.deadline_s, request.id, self.processors)

    def cancel(self, request_id: str) -> None:
        """End a request at the next `end_due`. Unknown ids are ignored."""
        self._cancelled.append(request_id)

    def end_due(self, now: float) -> None:
        """End the requests that were cancelled or whose deadline has passed."""
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
        """Fail a request whose keys and values may be corrupt; they leave the prefix cache and are zeroed."""
        request, manager = processor.request, self._scheduler.kv_cache_manager
        manager.invalidate(request)
        self._kv_cache.zero_pages([page for page in request.pages if manager.pool.references(page) == 1])
        self.finish(processor, Finish.FAILED, error)

    def finish(self, processor: OutputProcessor, finish: Finish, error: str = "") -> None:
        """End a request with a last output that carries no token."""
        self.outputs.others.append(processor.end(finish, self._clock(), error))
        self.forget(processor.request)

    def forget(self, request: Request) -> None:
        """Release a request that has had its last output or that another engine or site will serve."""
        self._scheduler.release(request)
        del self.processors[request.id]
        request.variant = None  # a removed variant is freed with its last reference
