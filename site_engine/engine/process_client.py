"""Use an engine in a separate process: start it, send requests, turn tokens into text, detect its end.

Runs on the event loop's thread. The messages are in `process_messages.py`, the other side in
`process_server.py`.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeAlias, cast

from site_engine.core.chain import Chain, Variant
from site_engine.core.inbox import InboxAddress, InboxPlace
from site_engine.core.request import Finish, Moved, Output, Request, Timings
from site_engine.core.stall_watch import StallWatch
from site_engine.core.startup import Part
from site_engine.engine import process_messages as pm
from site_engine.engine import process_packing as packing
from site_engine.engine.engine_thread import STALLED_AFTER_S
from site_engine.engine.process_answer import Answer
from site_engine.engine.process_answers import Answers
from site_engine.engine.process_sleep import RemoteSleep
from site_engine.engine.process_spawn import Spawn, spawn
from site_engine.engine.process_training import RemoteTraining
from site_engine.engine.process_variants import RemoteVariants
from site_engine.engine_client import Facts, Group, Listener, LoadSeen
from site_engine.errors import ConfigError, NotServed, Reason, VariantRefused
from site_engine.text.detokenize import NoText, Vocabulary
from wire.send_pace import SendPace

log = logging.getLogger(__name__)

STOP_WITHIN_S = 10.0
AT_ONCE = Timings(0.0, 0.0, 0.0, 0, 0)
"""The timings of an answer that had ended before its request was admitted."""


AdmissionReply: TypeAlias = Callable[[NotServed | None], None]
ExportReply: TypeAlias = Callable[[Answer | None, Moved | None], None]


class Orphans(NamedTuple):
    """The requests of a lost process: admitted answers, and groups that were waiting for admission."""

    answers: list[Answer]
    unadmitted: list[tuple[list[Answer], AdmissionReply]]


class EngineProcess(asyncio.Protocol):
    """An engine in a child process. When the process ends or breaks, the listener is notified once and all
    requests fail, unless `on_lost` takes them.

    Each request has a number in this process's messages. The number of a request that has moved to another
    process is forgotten, and rows that still name it are dropped.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], clock: Callable[[], float], stream_interval_s: float = 0.0
    ) -> None:
        """`stream_interval_s`: the longest that tokens are held for merging while the event loop is busy."""
        self.vocabulary: Vocabulary = NoText()  # for detokenizing; set before `start`
        self.on_lost: Callable[[Orphans], None] | None = None  # if set, takes the requests of a lost process
        self._process = process
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.start_parts: list[Part] = []  # parts of the engine's start; like `inbox`, set once it is ready
        self.inbox: InboxAddress | None = None
        self.shares = ""  # the device whose memory this engine shares with engines of other processes
        self._described: asyncio.Future[pm.Described] = self._loop.create_future()
        self._ready: asyncio.Future[Facts] = self._loop.create_future()
        self._listener: Listener | None = None
        self._frames = pm.Frames()
        self._eos_token_ids: tuple[int, ...] = ()
        self._next_call = count(1)
        self._next_number = count(1)
        self.answers = Answers(lambda number, generated: self._send(pm.EndByText(number, generated)))
        self._pace = SendPace(stream_interval_s)
        self._reading: asyncio.TimerHandle | None = None  # when held tokens are read
        self._admissions: dict[int, tuple[list[int], AdmissionReply]] = {}
        self._exports: dict[int, ExportReply] = {}
        self._releases: dict[int, tuple[Sequence[Sequence[str]], Callable[[list[bool]], None]]] = {}
        self.variants = RemoteVariants(self._send)
        self.trainer = RemoteTraining(self._send, self._loop)
        self.sleeper = RemoteSleep(self._send)
        self._stall_watch = StallWatch()
        self._stalled_s = 0.0  # as reported by the engine
        self._heard_s = clock()
        self._longest_iteration_s = 0.0
        self._broken = ""
        self._stopping = False

    @classmethod
    async def launch(
        cls,
        settings: Mapping[str, Any],
        clock: Callable[[], float],
        spawn: Spawn = spawn,
        *,
        with_others: bool = False,
    ) -> EngineProcess:
        """Start the process, which then loads its model: await `ready`.

        The process ends when this one ends, in whatever way. `with_others`: requests move to and from engines
        in other processes.
        """
        process, ours = spawn()
        ours.setblocking(False)
        engine = cls(process, clock, settings["stream_interval_s"])
        try:
            await engine._loop.create_unix_connection(lambda: engine, sock=ours)
        except BaseException:
            ours.close()
            process.kill()
            process.wait()
            raise
        engine._send(pm.Start(dict(settings), with_others))
        return engine

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_lost(self) -> bool:
        return bool(self._broken)

    async def described(self) -> pm.Described:
        """Wait until the model is loaded. Raises ConfigError with the reason if it can't be."""
        await asyncio.wait((self._described, self._ready), return_when=asyncio.FIRST_COMPLETED)
        if not self._described.done():
            await self.ready()  # raises the reason
        return self._described.result()

    async def ready(self) -> Facts:
        """Wait until the engine can serve. Raises ConfigError with the reason if it can't."""
        return await asyncio.shield(self._ready)

    def start(self, listener: Listener) -> None:
        self._listener = listener
        self.trainer.on_event = listener.training
        if self._broken:
            listener.broken(self._broken)

    def stop(self, within_s: float = STOP_WITHIN_S) -> None:
        """End the process after the current iteration, killing it after `within_s`; drop live requests.

        May be called on any thread but the event loop's.
        """
        self._stopping = True
        self._loop.call_soon_threadsafe(self._send, pm.Stop())
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._loop.call_soon_threadsafe(self._transport.abort)

    def kill(self) -> None:
        """End the process at once. May be called on any thread."""
        self._stopping = True
        self._process.kill()
        self._loop.call_soon_threadsafe(self._transport.abort)

    def give_up(self, reason: str) -> None:
        """End the process and treat it as lost, for the given reason."""
        self._lose(reason)

    def stalled_s(self) -> float:
        """Return the seconds that the engine has stalled or its process was silent, 0 if within limits."""
        silent_s = self._stall_watch.look(self._heard_s, self._clock())
        is_silent = silent_s > STALLED_AFTER_S + 2 * self._longest_iteration_s
        return max(self._stalled_s, silent_s if is_silent else 0.0)

    def submit(self, group: Group, reply: AdmissionReply) -> None:
        """Submit all requests of a group or none; reply with the refusal, or None if they are admitted."""
        chain = self.variants.chains.get(group[0].chain)
        eos, fingerprint = self._eos_token_ids, ""
        if chain is not None:
            eos, fingerprint = chain.eos_token_ids, chain.fingerprint
        answers = [Answer(each, self.vocabulary, eos, fingerprint) for each in group]
        for answer in answers:
            answer.replay()
        if any(answer.contradicts_delivered for answer in answers):
            message = "what was delivered is not what was asked for"
            reply(NotServed(Reason.INVALID, message, "resume"))
        else:
            self.place(answers, reply)

    def place(self, answers: Sequence[Answer], reply: AdmissionReply, moved: Moved | None = None) -> None:
        """Submit requests and keep their answers here. `moved` is the state of a single request that another
        engine has begun.
        """
        if self._broken:
            reply(self._refusal())
            return
        call, numbers = next(self._next_call), [next(self._next_number) for _ in answers]
        for number, answer in zip(numbers, answers, strict=True):
            self.answers.add(number, answer)
        group = [answer.request for answer in answers]
        self._admissions[call] = numbers, reply
        self._send(packing.to_submit(call, numbers, group, answers[0].token_ids, moved))

    def export(self, request_id: str, to: InboxPlace | None, reply: ExportReply) -> None:
        """Remove a request so that another engine can continue it, and copy its keys and values to `to`.

        Replies with the answer, None if it has ended, and the moved state, None if the request was not
        removed. A lost process replies only for requests that have ended.
        """
        number = self.answers.number_of(request_id)
        assert number is not None, "the request is here"
        self._exports[number] = reply
        self._send(pm.Export(number, to))

    def expect(self, request: Request) -> None:
        """Prepare the engine for a request that another engine is about to export."""
        source = "" if request.grammar is None else request.grammar.source
        self._send(pm.Expect(source, request.chain))

    def meet(self, others: Iterable[EngineProcess]) -> None:
        """Connect the engine to the inboxes of others, to which requests may move."""
        self._send(pm.Meet([each.inbox for each in others if each.inbox is not None]))

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Cancel requests. Requests that have ended are ignored."""
        known = map(self.answers.number_of, request_ids)
        if numbers := [number for number in known if number is not None]:
            self._send(pm.Cancel(numbers))

    def release(self, groups: Sequence[Sequence[str]], reply: Callable[[list[bool]], None]) -> None:
        """Release the groups whose requests all still wait; reply for each group whether it was released."""
        if self._broken:
            reply([False] * len(groups))
            return
        call = next(self._next_call)
        self._releases[call] = groups, reply
        number_of = self.answers.number_of
        self._send(pm.Release(call, [[number_of(each) or 0 for each in group] for group in groups]))

    def request_load(self) -> None:
        self._send(pm.WantLoad())

    def add_variant(self, variant: Variant, reply: Callable[[Chain | VariantRefused], None]) -> None:
        """Load a variant and publish it; reply with its chain or the refusal."""
        self.variants.add(variant, reply)

    def remove_variant(self, variant_id: str, reply: Callable[[VariantRefused | None], None]) -> None:
        """Remove a variant: submitted requests finish with it, new ones are refused."""
        self.variants.remove(variant_id, reply)

    def _send(self, message: pm.Message) -> None:
        if not self._transport.is_closing():
            self._transport.write(pm.frame(message))

    # ---- from the engine

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """Handle received messages. Plain tokens are held for merging only while the event loop is busy."""
        self._heard_s = self._clock()
        outputs: list[Output] = []
        for body in self._frames.feed(data):
            message = pm.decode_from_engine(body)
            if isinstance(message, pm.Step):
                outputs += self.answers.take(message, self._heard_s)
            else:
                self._publish(outputs)
                outputs = []
                self._handle(message)
        self._publish(outputs)
        if self.answers.has_unread and self._reading is None:
            wait_s = self._pace.due_s - self._heard_s
            if wait_s > 0:
                self._reading = self._loop.call_later(wait_s, self._read_tokens)
            else:
                self._read_tokens()

    def _read_tokens(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        self._publish(self.answers.read(self._heard_s))
        self._pace.sent(self._clock(), time.thread_time())

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(f"its process {self.pid} has ended")

    def _handle(self, message: pm.FromEngine) -> None:
        match message:
            case pm.Load() | pm.Alive():
                self._load(message)
            case pm.Admitted():
                self._admitted(message)
            case pm.Released():
                self._released(message)
            case pm.Exported():
                self._exported(message)
            case pm.VariantAdded() | pm.VariantRemoved():
                self.variants.handle(message)
            case pm.Turned():
                self.sleeper.handle(message)
            case (
                pm.TrainAnswered() | pm.TrainingStopped() | pm.StepTrained() | pm.JobFailed() | pm.JobSaved()
            ):
                self.trainer.handle(message)
            case pm.Described() | pm.Ready() | pm.Refused():
                self._starting(message)
            case pm.Broken():
                self._lose(message.reason)

    def _starting(self, message: pm.Described | pm.Ready | pm.Refused) -> None:
        if isinstance(message, pm.Described):
            self._described.set_result(message)
        elif isinstance(message, pm.Refused):
            self._ready.set_exception(ConfigError(message.message))
        else:
            self._eos_token_ids = message.facts.eos_token_ids
            self.start_parts = message.parts
            self.inbox = message.inbox
            self.shares = message.shares
            self._ready.set_result(message.facts)

    def _load(self, message: pm.Load | pm.Alive) -> None:
        if isinstance(message, pm.Alive):
            self._stalled_s = message.stalled_s
            return
        self._longest_iteration_s = message.figures.longest_iteration_s
        if self._listener is not None:
            self._listener.load(LoadSeen(message.figures, message.at_s))

    def _released(self, message: pm.Released) -> None:
        groups, reply = self._releases.pop(message.call)
        decisions = []
        for group, gone in zip(groups, message.decisions, strict=True):
            answers = self.answers.pop(filter(None, map(self.answers.number_of, group))) if gone else []
            decisions.append(gone and not any(each.ended for each in answers))  # ended ones are not released
        reply(decisions)

    def _admitted(self, message: pm.Admitted) -> None:
        numbers, reply = self._admissions.pop(message.call)
        refusal = packing.from_admitted(message)
        if refusal is not None:
            self.answers.pop(numbers)
            reply(refusal)
            return
        reply(None)
        for number in numbers:
            placed = self.answers.get(number)
            if placed is not None and placed.ended:
                self._publish([placed.end(Finish.STOP, timings=AT_ONCE)])
                self._send(pm.Cancel([number]))

    def _exported(self, message: pm.Exported) -> None:
        self._read_tokens()
        reply = self._exports.pop(message.number)
        answer = self.answers.get(message.number)
        if answer is not None and message.moved is not None:
            self.answers.pop([message.number])
        reply(None if answer is None or answer.ended else answer, message.moved)

    def _publish(self, outputs: Sequence[Output]) -> None:
        if outputs and self._listener is not None:
            self._listener.outputs(outputs)

    # ---- its end

    def _lose(self, reason: str) -> None:
        """End the process, fail or hand over its requests, refuse pending calls and notify the listener."""
        if self._broken:
            return
        self._read_tokens()
        self._broken = reason
        self._loop.run_in_executor(None, self._reap)
        self._transport.close()
        if self._stopping:
            self._ready.cancel()  # nothing awaits it
        elif not self._ready.done():
            self._ready.set_exception(ConfigError(f"the engine could not be loaded: {reason}"))
        orphans = self._orphans()
        self.trainer.lose(reason)
        self.sleeper.lose(reason)
        releases, self._releases = self._releases, {}
        for groups, decide in releases.values():
            decide([False] * len(groups))
        self.variants.lose(self._refusal().message)
        if self.on_lost is not None:
            self.on_lost(orphans)
        else:
            for _, reply in orphans.unadmitted:
                reply(self._refusal())
            message = f"the engine is broken: {reason}"
            self._publish([each.end(Finish.FAILED, message) for each in orphans.answers])
        if self._listener is not None and not self._stopping:
            self._listener.broken(reason)

    def _orphans(self) -> Orphans:
        """Remove all requests and return those that have not ended."""
        admissions, self._admissions = self._admissions, {}
        unadmitted = [(self.answers.pop(numbers), reply) for numbers, reply in admissions.values()]
        exports, self._exports = self._exports, {}
        for number, exported in exports.items():
            answer = self.answers.get(number)
            if answer is None or answer.ended:
                exported(None, None)
        left = [answer for answer in self.answers.pop_all() if not answer.ended]
        return Orphans(left, unadmitted)

    def _reap(self) -> None:
        if not self._stopping:
            self._process.kill()
        status = self._process.wait()
        log.log(
            logging.INFO if self._stopping else logging.ERROR,
            "the engine's process %d ended with status %d",
            self.pid,
            status,
        )

    def _refusal(self) -> NotServed:
        return NotServed(Reason.INTERNAL, f"the engine of this site is broken: {self._broken}")
