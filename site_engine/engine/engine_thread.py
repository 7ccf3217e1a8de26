"""The one thread that touches the engine: does as asked between iterations, steps while there is work.

Answers and outputs of a pass reach the event loop together, as one call. Does not know attempts or gateways.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from site_engine.core.load import LoadFigures
from site_engine.core.request import Admission, Finish, Output, Request, RequestRejected, Sampling
from site_engine.engine_client import Group, Listener, LoadSeen
from site_engine.errors import EngineBroken, NotServed, Reason

log = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.05
STRIKES_MAX = 3
"""So many steps that fail in a row, with the running requests dropped each time, mean a broken engine."""
BARREN_MAX = 3
"""After so many iterations with failures and without a token, a request of our own is tried."""
PROBE = "probe"


class Engine(Protocol):
    """What the worker needs of an engine; synchronous and used by one thread only."""

    @property
    def has_work(self) -> bool: ...
    def submit(self, request: Request) -> Admission: ...
    def cancel(self, request_id: str) -> object: ...
    def release(self, request_ids: Sequence[str]) -> Sequence[str]: ...
    def step(self) -> Sequence[Output]: ...
    def load(self) -> LoadFigures: ...


@dataclass(slots=True)
class _Live:
    request: Request
    completion_tokens: int = 0


class Worker:
    """Runs `engine` on a thread from `start` to `stop`.

    `post` carries a call to the event loop (`loop.call_soon_threadsafe`).
    Iterations start at least `floor_s` apart; what is asked meanwhile is not kept waiting.
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
        self._asked: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self.listener = Listener(_unheard, _unheard, _unheard)
        self._ending = False
        self._broken = ""
        self._live: dict[str, _Live] = {}
        self._calls: list[Callable[[], None]] = []
        self._strikes = 0
        self._barren = 0
        self._ready_s = 0.0
        self._load_s = 0.0
        self._load_wanted = True
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, listener: Listener) -> None:
        self.listener = listener
        self._thread.start()

    def stop(self, within_s: float = 10.0) -> None:
        """Ends the thread after the iteration at hand, which may hang; what still runs is dropped."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join(within_s)

    def submit(self, group: Group, reply: Callable[[Admission | NotServed], None]) -> None:
        self._ask(partial(self._submit, group, reply))

    def cancel(self, request_ids: Iterable[str]) -> None:
        self._ask(partial(self._cancel, tuple(request_ids)))

    def release(self, groups: Sequence[Sequence[str]], reply: Callable[[list[bool]], None]) -> None:
        """Replies, group by group, whether all of its requests were still waiting and are given up now."""
        self._ask(partial(self._release, groups, reply))

    def ask_load(self) -> None:
        self._ask(self._want_load)

    def _ask(self, operation: Callable[[], None]) -> None:
        with self._changed:
            self._asked.append(operation)
            self._changed.notify()

    # the thread

    def turn(self) -> None:
        """What was asked, an iteration if one is due, a look at the load; then everyone is told."""
        while self._asked:
            self._asked.popleft()()
        if self._engine.has_work and self._clock() >= self._ready_s:
            self._iterate()
        self._see_load()
        self._tell()

    def _run(self) -> None:
        try:
            while self._wait():
                self.turn()
        except Exception as exc:  # noqa: BLE001 - the thread's last line: whatever it was, everyone is told
            self._give_up(exc)
            while self._wait():
                self._asked.popleft()()
                self._tell()

    def _wait(self) -> bool:
        """Until something is asked or an iteration is due; False when the thread shall end."""
        with self._changed:
            while not (self._asked or self._ending):
                if self._broken or not self._engine.has_work:
                    self._changed.wait()
                    continue
                left_s = self._ready_s - self._clock()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            return not self._ending

    def _iterate(self) -> None:
        self._ready_s = self._clock() + self._floor_s
        try:
            outputs: Sequence[Output] = self._engine.step()
            self._strikes = 0
        except Exception as exc:  # noqa: BLE001 - an engine's failure costs its requests, not the site
            outputs = self._after_failure(exc)
        self._publish(outputs)
        self._watch(outputs)

    def _publish(self, outputs: Sequence[Output]) -> None:
        known = [output for output in outputs if output.request_id in self._live]
        for output in known:
            if output.finish is None:
                self._live[output.request_id].completion_tokens = output.completion_tokens
            else:
                self._live.pop(output.request_id)
        if known:
            self._calls.append(partial(self.listener.outputs, known))

    def _tell(self) -> None:
        calls, self._calls = self._calls, []
        if calls:
            self._post(partial(_call_all, calls))

    def _see_load(self) -> None:
        """After every pass, but not more often than figures are sent; always when the engine falls idle."""
        now = self._clock()
        if self._load_wanted or now - self._load_s >= LOAD_INTERVAL_S or not self._engine.has_work:
            self._load_wanted = False
            self._load_s = now
            self._calls.append(partial(self.listener.load, LoadSeen(self._engine.load(), now)))

    def _want_load(self) -> None:
        self._load_wanted = True

    def _submit(self, group: Group, reply: Callable[[Admission | NotServed], None]) -> None:
        self._calls.append(partial(reply, self._admit(group)))
        self._want_load()  # figures from before must not be sent after the answer: they would not count it

    def _admit(self, group: Group) -> Admission | NotServed:
        if self._broken:
            return NotServed(Reason.INTERNAL, f"the engine of this site is broken: {self._broken}")
        taken: list[str] = []
        answers = []
        try:
            for request in group:
                answers.append(self._engine.submit(request))
                taken.append(request.id)
        except RequestRejected as refused:
            self._engine.release(taken)
            return NotServed(Reason[refused.reason.name], refused.message, refused.param)
        except Exception as exc:
            log.exception("the engine failed to take a request")
            self._engine.release(taken)
            return NotServed(Reason.INTERNAL, f"the engine failed to take the request: {_told(exc)}")
        self._live.update((request.id, _Live(request)) for request in group)
        return answers[0]

    def _cancel(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self._live and not self._broken:
                self._engine.cancel(request_id)

    def _release(self, groups: Sequence[Sequence[str]], reply: Callable[[list[bool]], None]) -> None:
        self._calls.append(partial(reply, [self._give_up_group(group) for group in groups]))

    def _give_up_group(self, group: Sequence[str]) -> bool:
        """All or nothing: what was taken out of the queue goes back if another choice has started."""
        if self._broken or any(request_id not in self._live for request_id in group):
            return False
        given_up = self._engine.release(group)
        if len(given_up) == len(group):
            for request_id in group:
                del self._live[request_id]
            return True
        self._take_back(given_up)
        return False

    def _take_back(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            try:
                self._engine.submit(self._live[request_id].request)
            except RequestRejected as refused:
                self._publish([self._failed(request_id, refused.message)])

    # failures

    def _watch(self, outputs: Sequence[Output]) -> None:
        """A dead device fails all requests at once: the site looks idle and quick. Raises EngineBroken."""
        failed = [output for output in outputs if output.finish is Finish.FAILED]
        for output in failed:
            if output.request_id == PROBE:
                raise EngineBroken(f"even a request of one token fails: {output.error}")
        if any(output.token_ids for output in outputs):
            self._barren = 0
        elif failed:
            self._barren += 1
            if self._barren >= BARREN_MAX:
                self._probe()

    def _probe(self) -> None:
        self._barren = 0
        try:
            self._engine.submit(Request(PROBE, [0], Sampling(max_tokens=1, temperature=0.0)))
        except RequestRejected as refused:
            log.info("the engine could not be probed: %s", refused.message)

    def _after_failure(self, exc: Exception) -> list[Output]:
        """Drops what was running, keeps what waits. Raises EngineBroken if that did not help before."""
        self._strikes += 1
        log.error("an iteration of the engine failed (%d in a row)", self._strikes, exc_info=exc)
        if self._strikes >= STRIKES_MAX:
            raise EngineBroken(
                f"{STRIKES_MAX} iterations in a row failed, the last with: {_told(exc)}"
            ) from exc
        waiting = set(self._engine.release(list(self._live)))
        started = [request_id for request_id in self._live if request_id not in waiting]
        for request_id in started:
            self._engine.cancel(request_id)
        self._take_back(request_id for request_id in list(self._live) if request_id in waiting)
        return [self._failed(request_id, f"the engine failed: {_told(exc)}") for request_id in started]

    def _give_up(self, exc: Exception) -> None:
        self._broken = _told(exc)
        log.critical("the engine is broken beyond use", exc_info=exc)
        self._publish(
            [self._failed(request_id, f"the engine is broken: {self._broken}") for request_id in self._live]
        )
        self._calls.append(partial(self.listener.broken, self._broken))
        self._tell()

    def _failed(self, request_id: str, error: str) -> Output:
        tokens = self._live[request_id].completion_tokens
        return Output(request_id, finish=Finish.FAILED, error=error, completion_tokens=tokens)


def _told(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__


def _unheard(_: object) -> None:
    """Before the start nobody listens."""


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        try:
            call()
        except Exception:
            log.exception("what the engine had to say was not taken")
