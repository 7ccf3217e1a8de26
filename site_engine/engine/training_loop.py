"""The training of one engine: which job runs next, and whether a slice of it runs before the next iteration.

Starts no threads and reads no files. While there are jobs, the engine calls it before each iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

from site_engine.core.load import CostFit, IterationCost
from site_engine.core.request import Lane, Request, State
from site_engine.core.schedule_plan import SchedulePlan
from site_engine.core.scheduler import Scheduler
from site_engine.core.slack import MIN_CHUNK_TOKENS, Bounds, Deferral, NextSlice, Serving, Slack, SliceCosts
from site_engine.core.tensor_split import FAMILIES
from site_engine.core.training import AdapterShape, TrainingOrder
from site_engine.errors import TrainingRefused

if TYPE_CHECKING:
    from site_engine.model.loader import LoadedModel
    from site_engine.training.snapshot import Snapshot
    from site_engine.training.trainer import Event

MAX_JOBS = 8
"""Jobs that an engine trains in turns. Each keeps its adapter and optimizer moments in memory."""

KEPT_ITERATIONS = 32
"""Iterations over which the time that training adds to an iteration is averaged."""
QUIET_S = 1.0
"""After this many seconds without a chat, the next slice is launched while a GPU still computes one; a chat
that arrives then waits for both.
"""


class Job(Protocol):
    """The part of a `Trainer` that the loop needs."""

    @property
    def following(self) -> NextSlice: ...
    @property
    def ended(self) -> bool: ...
    def run_slice(self, *, ahead: bool = False) -> float: ...
    def take_events(self) -> list[Event]: ...
    def snapshot(self) -> Snapshot: ...


class JobEvent(NamedTuple):
    """An event of a job. Its last event is `Failed` or the snapshot after its last step."""

    job_id: str
    event: Event


class _Running(NamedTuple):
    tenant: str
    job: Job


class TrainingLoop:
    """Runs jobs in turns: the tenant with the least device time gets the next micro-batch."""

    def __init__(
        self,
        model: LoadedModel,
        scheduler: Scheduler,
        fit: CostFit,
        bounds: Bounds,
        clock: Callable[[], float],
    ) -> None:
        self.jobs: dict[str, _Running] = {}
        self.trained_s = 0.0  # device time of all jobs
        self.prompt_tokens: int | None = None  # limit for the next iteration; None: no limit
        self._model, self._scheduler, self._fit, self._clock = model, scheduler, fit, clock
        self._name = type(model.model).__name__
        self._slack = Slack(bounds)
        self._costs: dict[tuple[int, str], SliceCosts] = {}  # by rank and target of the adapter
        self._train_tokens: int | None = None  # tokens of a micro-batch, once fitted
        self._events: list[JobEvent] = []
        self._used_s: dict[str, float] = {}  # device time by tenant, while it has jobs
        self._current = ""
        self._tokens_s = 0.0  # when answers got their last tokens
        self._chat_s = -inf  # when a chat was last served
        self._cost: IterationCost | None = None  # fitted cost of iterations, cached until the next one
        self._beside_s = 0.0  # seconds of slices since the last iteration, while requests were served
        self._mean_beside_s = 0.0

    @property
    def added_s(self) -> float:
        """The mean seconds that slices recently added before an iteration; 0 without a job."""
        return self._mean_beside_s if self.jobs else 0.0

    def warm_up(self) -> None:
        """Rehearse a job of the usual shape on a GPU, so that kernels are loaded and costs are known.

        Raises TrainingRefused.
        """
        if self._model.device.type == "cpu" or self._name not in FAMILIES:
            return
        from site_engine.training.job import warm_up  # imported where jobs are trained

        shape = AdapterShape()
        self._train_tokens = warm_up(self._model, shape, self._clock, self._costs_of(shape))

    def load(self, order: TrainingOrder) -> Callable[[], None]:
        """Read a job's data and build its trainer, on any thread; return the function that begins the job
        between two steps.

        This method and the returned function raise TrainingRefused.
        """
        from site_engine.training.job import open_job  # imported where jobs are trained

        if self._model.device.type != "cpu" and self._name not in FAMILIES:
            raise TrainingRefused(f"a GPU trains the Llama family, not {self._name}", elsewhere=True)
        costs = self._costs_of(order.recipe.shape)
        job = open_job(self._model, order, self._clock, train_tokens=self._train_tokens, costs=costs)
        return partial(self.begin, order.job_id, order.tenant, job)

    def _costs_of(self, shape: AdapterShape) -> SliceCosts:
        return self._costs.setdefault((shape.rank, shape.target), SliceCosts())

    def begin(self, job_id: str, tenant: str, job: Job) -> None:
        """Begin a job; a new tenant starts with the least device time of any. Raises TrainingRefused."""
        if job_id in self.jobs:
            raise TrainingRefused(f"{job_id} is trained here already")
        if len(self.jobs) >= MAX_JOBS:
            raise TrainingRefused(f"{MAX_JOBS} jobs are trained here, which is the limit", elsewhere=True)
        self._used_s.setdefault(tenant, min(self._used_s.values(), default=0.0))
        self.jobs[job_id] = _Running(tenant, job)

    def stop(self, job_id: str) -> Snapshot | None:
        """End a job without an event; return its state after its last step, or None if it is unknown."""
        running = self.jobs.get(job_id)
        if running is None:
            return None
        self._forget(job_id)
        return running.job.snapshot()

    def take_events(self) -> list[JobEvent]:
        events, self._events = self._events, []
        return events

    def is_due(self, tokens_s: float) -> bool:
        """Return whether a slice may run after the pending iteration.

        `tokens_s`: when answers got their last tokens. If no slice is due, the engine can launch the next
        iteration before it reads the pending one.
        """
        return self._due(tokens_s, running=True) is not None

    def run_slice(self, tokens_s: float) -> bool:
        """Run a slice if serving allows it; return whether one ran.

        `tokens_s`: when answers got their last tokens.
        """
        due = self._due(tokens_s, running=False)
        if due is None:
            return False
        serving, following = due
        tenant, job = self.jobs[self._current]
        is_quiet = not serving.active and self._clock() >= self._chat_s + QUIET_S
        taken_s = job.run_slice(ahead=is_quiet)
        self._slack.trained(taken_s, serving, following)
        if serving.chat_decodes or serving.batch:
            self._beside_s += taken_s
        self._used_s[tenant] += taken_s
        self.trained_s += taken_s
        self._events += [JobEvent(self._current, event) for event in job.take_events()]
        if job.ended:
            self._forget(self._current)
        return True

    def _due(self, tokens_s: float, *, running: bool) -> tuple[Serving, NextSlice] | None:
        """Return the state of serving and the slice that is due. If none is, set `prompt_tokens`, the limit
        on prompt tokens of the next iteration, and return None.
        """
        if tokens_s != self._tokens_s:
            self._slack.published(tokens_s - self._tokens_s)
            self._tokens_s = tokens_s
        if self._current not in self.jobs or self.jobs[self._current].job.following.begins:
            self._current = min(self.jobs, key=lambda each: self._used_s[self.jobs[each].tenant])
        if self._cost is None:
            self._cost = self._fit.cost()
        now_s = self._clock()
        bounds = self._slack.bounds
        serving = serving_of(
            self._scheduler, self._cost, now_s, now_s if running else tokens_s, bounds.deferral
        )
        serving = serving._replace(sliced=self._beside_s > 0.0 and not running)
        following = self.jobs[self._current].job.following
        if self._slack.takes(serving, following):
            return serving, following
        self.prompt_tokens = self._slack.chunk_tokens(serving, serving.iteration_s, self._cost.per_token_s)
        return None

    def served(self, plan: SchedulePlan, seconds: float) -> None:
        """Count an iteration of serving."""
        self._cost = None
        if self.jobs:
            batch_alone = all(request.lane is Lane.BATCH for request in plan.requests)
            self._slack.served(seconds, batch_alone=batch_alone)
            if not batch_alone:
                self._chat_s = self._clock()
            self._mean_beside_s += (self._beside_s - self._mean_beside_s) / KEPT_ITERATIONS
            self._beside_s = 0.0

    def _forget(self, job_id: str) -> None:
        tenant = self.jobs.pop(job_id).tenant
        if all(each.tenant != tenant for each in self.jobs.values()):
            del self._used_s[tenant]
        if not self.jobs:
            self.prompt_tokens = None


def serving_of(
    scheduler: Scheduler, cost: IterationCost, now: float, tokens_s: float, deferral: Deferral
) -> Serving:
    """Return the current state of serving. `tokens_s`: when answers got their last tokens."""
    running, queue, slots = scheduler.running, scheduler.queue, scheduler.free_slots + len(scheduler.running)
    decoding = [each for each in running if each.state is not State.PREFILL]
    waiting = [each for each in running if each.state is State.PREFILL] + scheduler.preempted

    def chats(requests: list[Request]) -> bool:
        return any(each.lane is Lane.CHAT for each in requests)

    oldest_wait_s = 0.0
    if deferral is Deferral.ITERATION:
        oldest_wait_s = max((now - each.arrived_s for each in (*queue, *waiting)), default=0.0)
    kv_tokens = sum([each.computed for each in decoding])
    return Serving(
        chat_waits=chats(waiting) or queue.has_lane(Lane.CHAT),
        chat_decodes=chats(decoding),
        batch=bool(queue) or not all(each.lane is Lane.CHAT for each in (*running, *scheduler.preempted)),
        since_tokens_s=now - tokens_s,
        iteration_s=cost.seconds(len(decoding), len(decoding), kv_tokens),
        newcomer_s=MIN_CHUNK_TOKENS * cost.per_token_s,
        oldest_wait_s=oldest_wait_s,
        free_share=1.0 - len([each for each in running if each.lane is Lane.CHAT]) / slots,
    )
