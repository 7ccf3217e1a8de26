"""Run the engine on its own thread: operations between iterations, and steps while there is work.

The replies and outputs of one turn are posted to the event loop as one call. Knows no attempts or gateways.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NoReturn, TypeVar

from site_engine.core.chain import Chain, Variant
from site_engine.core.inbox import InboxAddress, InboxPlace
from site_engine.core.loader_turns import LoaderTurns
from site_engine.core.request import Finish, Moved, Output, Request, RequestRejected, Sampling
from site_engine.core.stall_watch import StallWatch
from site_engine.core.step_outputs import StepOutputs, with_more_than_a_token
from site_engine.engine.engine_interface import Engine
from site_engine.engine.thread_training import ThreadTraining
from site_engine.engine_client import Group, Listener, LoadSeen
from site_engine.errors import EngineBroken, NotServed, Reason, VariantRefused, describe

log = logging.getLogger(__name__)

T = TypeVar("T")

LOAD_INTERVAL_S = 0.05
LOAD_SHARE = 0.05
"""Largest share of the thread's time for requested load reports: with 256 requests, one takes half a step."""
MAX_CONSECUTIVE_ERRORS = 3
"""The engine is broken after this many failed steps in a row. Each failed step fails the running requests."""
MAX_STEPS_WITHOUT_TOKEN = 3
"""After this many iterations with failures and no token, the thread submits a probe request."""
PROBE_ID = "probe"
STALLED_AFTER_S = 2.0
"""An iteration has stalled if it takes this much longer than twice the expected time of a full batch. A false
alarm costs little: the gateways move the requests that other sites can serve, and use the site again later.
"""


class EngineThread:
    """Runs `engine` on a thread from `start` to `stop`.

    `post` schedules a call on the event loop (`loop.call_soon_threadsafe`). Iterations start at least
    `floor_s` seconds apart; operations run without this delay.
    """

    def __init__(
        self,
        engine: Engine,
        post: Callable[[Callable[[], None]], object],
        clock: Callable[[], float],
        floor_s: float = 0.0,
    ) -> None:
        self._engine = engine
        self._post = post
        self._clock = clock
        self._floor_s = floor_s
        self._operations: deque[Callable[[], None]] = deque()
        self._after_iteration: list[Callable[[], None]] = []  # operations deferred to the next turn
        self._wakeup = threading.Condition()
        self.listener = Listener(_ignore, _ignore, _ignore)
        self._ending = False
        self._broken = ""
        self._live: dict[str, int] = {}  # tokens generated so far, by id of the request
        self._calls: list[Callable[[], None]] = []
        self._consecutive_errors = 0
        self._steps_without_token = 0
        self._ready_s = 0.0
        self._load_s = 0.0
        self._turn_s: float | None = None  # when the current turn began, None between turns
        self._longest_iteration_s = 0.0
        self._stall_watch = StallWatch()
        self._load_wanted = True
        self._load_took_s = 0.0
        self._loader = ThreadPoolExecutor(1, "variants", initializer=partial(_compute_with, 1))
        self._loader_turns, self._threads = LoaderTurns(), _openmp_threads()
        self.trainer = ThreadTraining(engine, self._load, self._enqueue, self._call)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, listener: Listener) -> None:
        self.listener = listener
        self._thread.start()

    def stalled_s(self) -> float:
        """Return the seconds that the current turn has taken if it has stalled, else 0. Runs on the loop."""
        taken_s = self._stall_watch.look(self._turn_s, self._clock())
        return taken_s if taken_s > STALLED_AFTER_S + 2 * self._longest_iteration_s else 0.0

    def stop(self, within_s: float = 10.0) -> None:
        """End the thread after the current iteration, waiting at most `within_s`; drop live requests."""
        with self._wakeup:
            self._ending = True
            self._wakeup.notify()
        self._loader.shutdown(wait=False, cancel_futures=True)
        self._thread.join(within_s)

    def submit(
        self, group: Group, reply: Callable[[NotServed | None], None], moved: Moved | None = None
    ) -> None:
        """Submit all requests of a group or none; reply with the refusal, or None if they are admitted.

        `moved` is the state of the group's only request if another engine has begun and exported it.
        """

        def run() -> None:
            self._calls.append(partial(reply, self._admit(group, moved)))
            self._load_wanted = True  # soon: older figures, sent after the reply, lack this request

        self._enqueue(run)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Cancel requests. Requests that have ended are ignored."""
        ids = tuple(request_ids)

        def run() -> None:
            for request_id in ids:
                if request_id in self._live and not self._broken:
                    self._engine.cancel(request_id)

        self._enqueue(run)

    def end_by_text(self, request_id: str, generated: int) -> None:
        """End a request whose text, detokenized in another process, stopped after `generated` tokens."""

        def run() -> None:
            if request_id in self._live and not self._broken:
                self._engine.end_by_text(request_id, generated)

        self._enqueue(run)

    def release(self, groups: Sequence[Sequence[str]], reply: Callable[[list[bool]], None]) -> None:
        """Release the groups whose requests all still wait; reply for each group whether it was released."""
        self.between(lambda: [self._release_group(each) for each in groups], reply)

    def export(self, request_id: str, to: InboxPlace | None, reply: Callable[[Moved | None], None]) -> None:
        """Remove a request so that another engine can continue it; reply with its state.

        With a place `to`, its keys and values are copied there ahead while the request keeps running. Replies
        with None if the request is unknown or has ended; nothing more is written to the place then.
        """

        def run() -> None:
            moved = None
            if not self._broken:
                if self._engine.send_ahead(request_id, to):
                    self._after_iteration.append(run)
                    return
                outputs, moved = self._engine.export(request_id, to)
                self._publish(outputs)
            if moved is not None:
                self._live.pop(request_id)
            self._calls.append(partial(reply, moved))
            self._post_calls()  # before the next iteration

        self._enqueue(run)

    def expect(self) -> None:
        """Prepare for a request that another engine is about to export."""
        self._enqueue(self._engine.expect)

    def meet(self, inboxes: Sequence[InboxAddress]) -> None:
        """Connect to the inboxes of other engines, to which requests may move."""
        self._enqueue(partial(self._engine.inbox.meet, inboxes))

    def request_load(self) -> None:
        """Report the load soon, after one of the next turns."""
        self._enqueue(partial(setattr, self, "_load_wanted", True))

    def add_variant(self, variant: Variant, reply: Callable[[Chain | VariantRefused], None]) -> None:
        """Load a variant concurrently with iterations and publish it; reply with its chain or the refusal."""

        def load() -> None:
            try:
                publish = self._engine.load_variant(variant)
            except VariantRefused as refused:
                publish = partial(_raise, refused)
            except Exception as exc:
                log.exception("variant %s could not be loaded", variant.id)
                publish = partial(
                    _raise, VariantRefused(f"{variant.id} could not be loaded: {describe(exc)}")
                )
            self._enqueue(lambda: self._calls.append(partial(reply, _outcome(publish))))

        self._load(load)

    def remove_variant(self, variant_id: str, reply: Callable[[VariantRefused | None], None]) -> None:
        """Remove a variant: submitted requests finish with it, new ones are refused."""

        self.between(partial(_outcome, partial(self._engine.remove_variant, variant_id)), reply)

    def between(self, act: Callable[[], T], reply: Callable[[T], None]) -> None:
        """Run `act` between two iterations; reply with its result."""
        self._enqueue(lambda: self._calls.append(partial(reply, act())))

    def _load(self, load: Callable[[], None]) -> None:
        """Run `load` on the loader thread, alternating with the iterations."""
        self._loader.submit(self._loader_turns.run, load)

    def _enqueue(self, operation: Callable[[], None]) -> None:
        with self._wakeup:
            self._operations.append(operation)
            self._wakeup.notify()

    # ---- on the thread

    def _call(self, call: Callable[[], None]) -> None:
        """Post a call to the event loop at the end of this turn."""
        self._calls.append(call)

    def turn(self) -> None:
        """Run the queued operations, a due iteration and a load report, then post the results."""
        while self._operations:
            self._operations.popleft()()
        if self._engine.has_work and self._clock() >= self._ready_s:
            self._iterate()
        self._operations.extend(self._after_iteration)
        self._after_iteration.clear()
        self._report_load()
        self._post_calls()
        if self._engine.has_work:
            self._loader_turns.give()

    def _run(self) -> None:
        _compute_with(self._threads)
        try:
            while self._wait():
                self._turn_s = self._clock()
                self.turn()
                self._turn_s = None
        except Exception as exc:  # noqa: BLE001 - the engine is unusable: every request fails with the reason
            self._turn_s = None
            self._break(exc)
            while self._wait():
                self._operations.popleft()()
                self._post_calls()
        finally:
            self._loader_turns.leave()

    def _wait(self) -> bool:
        """Wait for an operation or a due iteration; return False if the thread must end."""
        with self._wakeup:
            while not (self._operations or self._ending):
                left_s = None
                if self._engine.has_work and not self._broken:
                    left_s = self._ready_s - self._clock()
                    if left_s <= 0:
                        break
                self._loader_turns.leave()
                self._wakeup.wait(left_s)
            return not self._ending

    def _iterate(self) -> None:
        self._ready_s = self._clock() + self._floor_s
        try:
            outputs: Sequence[Output] = self._engine.step()
            self._consecutive_errors = 0
        except Exception as exc:  # noqa: BLE001 - a failed step fails its requests, not the site
            outputs = self._after_failure(exc)
        self._publish(outputs)
        self._check_health(outputs)
        if self.trainer.has_begun:
            self.trainer.pass_on(self.listener.training)

    def _publish(self, outputs: Sequence[Output]) -> None:
        live = self._live
        if isinstance(outputs, StepOutputs) and live.keys() >= outputs.owners():
            live.update(zip(outputs.request_ids, outputs.generated, strict=True))
        else:
            outputs = [each for each in outputs if each.request_id in live]
        for output in with_more_than_a_token(outputs):
            if output.finish is None:
                live[output.request_id] = output.completion_tokens
            else:
                live.pop(output.request_id)
        if outputs:
            self._calls.append(partial(self.listener.outputs, outputs))

    def _post_calls(self) -> None:
        calls, self._calls = self._calls, []
        if calls:
            self._post(partial(_call_all, calls))

    def _report_load(self) -> None:
        """Report the load every LOAD_INTERVAL_S, sooner on request, and whenever the engine is idle."""
        now = self._clock()
        spacing_s = self._load_took_s / LOAD_SHARE if self._load_wanted else LOAD_INTERVAL_S
        if now - self._load_s >= min(spacing_s, LOAD_INTERVAL_S) or not self._engine.has_work:
            self._load_wanted = False
            self._load_s = now
            figures = self._engine.load()
            self._load_took_s = self._clock() - now
            self._longest_iteration_s = figures.longest_iteration_s
            self._calls.append(partial(self.listener.load, LoadSeen(figures, now)))

    def _admit(self, group: Group, moved: Moved | None) -> NotServed | None:
        if self._broken:
            return NotServed(Reason.INTERNAL, f"the engine of this site is broken: {self._broken}")
        taken: list[str] = []
        try:
            for request in group:
                self._engine.submit(request, moved)
                taken.append(request.id)
        except RequestRejected as refused:
            self._engine.release(taken)
            return NotServed(Reason[refused.reason.name], refused.message, refused.param)
        except Exception as exc:
            log.exception("the engine failed to take a request")
            self._engine.release(taken)
            return NotServed(Reason.INTERNAL, f"the engine failed to take the request: {describe(exc)}")
        self._live.update((request.id, 0) for request in group)
        return None

    def _release_group(self, group: Sequence[str]) -> bool:
        """Release all requests of a group or none."""
        if self._broken or not all(each in self._live and self._engine.waits(each) for each in group):
            return False
        for request_id in self._engine.release(group):
            del self._live[request_id]
        return True

    # ---- failures

    def _check_health(self, outputs: Sequence[Output]) -> None:
        """Detect a dead device, which fails all requests at once and then looks idle. Raises EngineBroken."""
        others = with_more_than_a_token(outputs)
        failed = [each for each in others if each.finish is Finish.FAILED]
        for output in failed:
            if output.request_id == PROBE_ID:
                raise EngineBroken(f"even a request of one token fails: {output.error}")
        if len(others) < len(outputs) or any(output.token_ids for output in others):
            self._steps_without_token = 0
        elif failed:
            self._steps_without_token += 1
            if self._steps_without_token >= MAX_STEPS_WITHOUT_TOKEN:
                self._steps_without_token = 0
                try:
                    self._engine.submit(Request(PROBE_ID, [0], Sampling(max_tokens=1, temperature=0.0)))
                except RequestRejected as refused:
                    log.info("the engine could not be probed: %s", refused.message)

    def _after_failure(self, exc: Exception) -> list[Output]:
        """Fail the running requests and keep the waiting ones.

        Raises EngineBroken after MAX_CONSECUTIVE_ERRORS failed steps in a row.
        """
        self._consecutive_errors += 1
        log.error("an iteration of the engine failed (%d in a row)", self._consecutive_errors, exc_info=exc)
        if self._consecutive_errors >= MAX_CONSECUTIVE_ERRORS:
            raise EngineBroken(
                f"{MAX_CONSECUTIVE_ERRORS} iterations in a row failed, the last with: {describe(exc)}"
            ) from exc
        started = [request_id for request_id in self._live if not self._engine.waits(request_id)]
        for request_id in started:
            self._engine.cancel(request_id)
        return [self._failed(request_id, f"the engine failed: {describe(exc)}") for request_id in started]

    def _break(self, exc: Exception) -> None:
        self._broken = describe(exc)
        log.critical("the engine is broken beyond use", exc_info=exc)
        self._publish(
            [self._failed(request_id, f"the engine is broken: {self._broken}") for request_id in self._live]
        )
        self._calls.append(partial(self.listener.broken, self._broken))
        self._post_calls()

    def _failed(self, request_id: str, error: str) -> Output:
        tokens = self._live[request_id]
        return Output(request_id, finish=Finish.FAILED, error=error, completion_tokens=tokens)


def _openmp_threads() -> int:
    """Return how many OpenMP threads the operations of this thread use."""
    import torch  # imported here, so that a site whose engine runs in another process does not load torch

    return int(torch.get_num_threads())


def _compute_with(threads: int) -> None:
    """Set how many OpenMP threads the operations of this thread use.

    The loader thread uses one. With more, even idle ones, there would be more OpenMP threads than processors,
    and OpenMP would let the engine's threads sleep between any two operations: on two cores, small operations
    took ten times as long.
    """
    import torch

    torch.get_num_threads()  # a thread's first call adopts the number that any thread has set last
    torch.set_num_threads(threads)


def _raise(refused: VariantRefused) -> NoReturn:
    raise refused


def _outcome(change: Callable[[], T]) -> T | VariantRefused:
    try:
        return change()
    except VariantRefused as refused:
        return refused


def _ignore(_: object) -> None:
    """Stand in for the listener before the thread starts."""


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        try:
            call()
        except Exception:
            log.exception("a callback of the engine failed")
