"""Serve an engine to the site's process: messages in, operations on the engine thread, outputs back.

Runs in the engine's process, which has no event loop and knows neither attempts nor text.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from site_engine.core.chain import Chain
from site_engine.core.request import Grammar, Moved, Output, Request
from site_engine.core.step_outputs import with_more_than_a_token
from site_engine.engine import process_messages as pm
from site_engine.engine import process_packing as packing
from site_engine.engine.engine_thread import EngineThread
from site_engine.engine.process_sleep import SleepServer, Turns
from site_engine.engine.process_training import TrainingServer
from site_engine.engine_client import Listener
from site_engine.errors import NotServed, Reason, VariantRefused

log = logging.getLogger(__name__)

ALIVE_EVERY_S = 0.25
RECEIVE_BYTES = 1 << 18
MAX_BACKLOG_BYTES = 256 << 20
"""Limit on unread outputs, enough for seconds of the fastest engine. Beyond it, the site counts as broken."""


class Sender:
    """Sends without blocking; a thread sends what the socket does not accept, so no iteration waits.

    May be used by several threads. `max_bytes` bounds the backlog of data not sent at once.
    """

    def __init__(self, connection: socket.socket, max_bytes: int = MAX_BACKLOG_BYTES) -> None:
        self._connection = connection
        self._max_bytes = max_bytes
        self._backlog = bytearray()
        self._changed = threading.Condition()
        threading.Thread(target=self._send_backlog, name="backlog", daemon=True).start()

    def send(self, data: bytes) -> None:
        """Send data. Raises ConnectionError if the backlog exceeds `max_bytes`: the site does not read."""
        with self._changed:
            sent = 0
            if not self._backlog:
                try:
                    sent = self._connection.send(data, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass
                except OSError:
                    return  # the site has disconnected: `EngineServer.run` handles it
            if sent == len(data):
                return
            self._backlog += data[sent:]
            if len(self._backlog) > self._max_bytes:
                raise ConnectionError(f"the site has not read {len(self._backlog)} bytes")
            self._changed.notify()

    def _send_backlog(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._backlog)
                part = bytes(self._backlog[:RECEIVE_BYTES])
            try:
                self._connection.sendall(part)
            except OSError:
                return  # the site has disconnected: `EngineServer.run` handles it
            with self._changed:
                del self._backlog[: len(part)]


CompileGrammar: TypeAlias = Callable[[str, tuple[int, ...] | None], Grammar]
"""(source, end tokens of a variant, None for the base's) -> grammar."""


class EngineServer:
    """Serves one engine on one connection.

    `compile_grammar` compiles a grammar from its source. It may take long, and raises NotServed.
    """

    def __init__(
        self,
        connection: socket.socket,
        make_thread: Callable[[Callable[[Callable[[], None]], object]], EngineThread],
        clock: Callable[[], float],
        compile_grammar: CompileGrammar,
        sleeper: Turns | None = None,
    ) -> None:
        """`make_thread(post)` creates the engine thread; `post` runs the callbacks that the thread posts."""
        self._connection = connection
        self._sender = Sender(connection)
        self._clock = clock
        self._compile_grammar = compile_grammar
        self._compiler = ThreadPoolExecutor(1, "grammars")
        self._compiling: set[int] = set()  # numbers of requests whose grammar is being compiled
        self._ends: dict[str, tuple[int, ...]] = {}  # end-of-sequence token ids by variant id
        self._ids: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self._frames: list[bytes] = []  # of one turn of the engine thread
        self._thread = make_thread(self._post)
        self._sleep = SleepServer(sleeper, self._thread.between, self._put)
        self._training = TrainingServer(
            self._thread.trainer, lambda message: self._sender.send(pm.frame(message))
        )

    def run(self) -> bool:
        """Serve until the site sends Stop or disconnects; return whether it sent Stop."""
        heard = self._training.heard
        self._thread.start(
            Listener(self._outputs, lambda seen: self._put(pm.Load(*seen)), self._broken, heard)
        )
        frames = pm.Frames()
        alive_s = self._clock()
        while True:
            readable, _, _ = select.select([self._connection], [], [], max(0.0, alive_s - self._clock()))
            if self._clock() >= alive_s:
                alive_s = self._clock() + ALIVE_EVERY_S
                self._sender.send(pm.frame(pm.Alive(self._thread.stalled_s())))
            if not readable:
                continue
            data = self._connection.recv(RECEIVE_BYTES)
            if not data:
                return False
            for body in frames.feed(data):
                message = pm.decode_to_engine(body)
                if isinstance(message, pm.Stop):
                    self._thread.stop()
                    return True
                self._handle(message)

    def _handle(self, message: pm.ToEngine) -> None:  # noqa: C901 - one case for each kind of message
        match message:
            case pm.Submit():
                self._submit(message)
            case pm.Cancel():
                self._cancel(message.numbers)
            case pm.EndByText():
                self._end_by_text(message)
            case pm.Release():
                self._release(message)
            case pm.Export():
                self._export(message)
            case pm.Expect():
                self._expect(message)
            case pm.Meet():
                self._thread.meet(message.inboxes)
            case pm.WantLoad():
                self._thread.request_load()
            case pm.AddVariant():
                self._thread.add_variant(message.variant, partial(self._variant_added, message.call))
            case pm.RemoveVariant():
                self._thread.remove_variant(message.id, partial(self._variant_removed, message))
            case pm.Turn() | pm.Hold():
                self._sleep.handle(message)
            case pm.Train() | pm.StopTraining() | pm.Taken():
                self._training.handle(message)

    def _submit(self, message: pm.Submit) -> None:
        group = packing.to_requests(message)
        self._ids.update(zip(message.numbers, message.ids, strict=True))
        self._numbers.update(zip(message.ids, message.numbers, strict=True))
        if message.grammar:
            self._compiling.update(message.numbers)
            self._compiler.submit(self._compile_first, message, group)
        else:
            self._pass_on(message, group)

    def _compile_first(self, message: pm.Submit, group: list[Request]) -> None:
        """Compile the grammar of a group, then submit the group. Called on the compiler's thread."""
        try:
            grammar = self._compile_grammar(message.grammar, self._ends.get(message.chain))
        except Exception as exc:  # the site waits for an answer in any case
            if not isinstance(exc, NotServed):
                log.exception("a grammar could not be compiled")
                exc = NotServed(Reason.INTERNAL, "the grammar could not be compiled")
            self._forget(message.ids)
            self._sender.send(pm.frame(packing.to_admitted(message.call, exc)))
        else:
            for request in group:
                request.grammar = grammar
            self._pass_on(message, group)
        self._compiling.difference_update(message.numbers)

    def _pass_on(self, message: pm.Submit, group: list[Request]) -> None:
        def reply(answer: NotServed | None) -> None:
            if answer is not None:
                self._forget(message.ids)
            self._put(packing.to_admitted(message.call, answer))

        self._thread.submit(group, reply, message.moved)

    def _cancel(self, numbers: list[int]) -> None:
        """Cancel requests, after the compilation of their grammars if any is under way."""
        if self._compiling.isdisjoint(numbers):
            found = map(self._ids.get, numbers)  # the engine thread may forget any of them meanwhile
            self._thread.cancel([each for each in found if each is not None])
        else:
            self._compiler.submit(self._cancel, numbers)

    def _end_by_text(self, message: pm.EndByText) -> None:
        request_id = self._ids.get(message.number)
        if request_id is not None:
            self._thread.end_by_text(request_id, message.generated)

    def _release(self, message: pm.Release) -> None:
        groups = [[self._ids.get(each, "") for each in group] for group in message.groups]

        def reply(decisions: list[bool]) -> None:
            for group, gone in zip(groups, decisions, strict=True):
                if gone:
                    self._forget(group)
            self._put(pm.Released(message.call, decisions))

        self._thread.release(groups, reply)

    def _export(self, message: pm.Export) -> None:
        request_id = self._ids.get(message.number, "")

        def reply(moved: Moved | None) -> None:
            if moved is not None:
                self._forget([request_id])
            self._put(pm.Exported(message.number, moved))

        self._thread.export(request_id, message.to, reply)

    def _expect(self, message: pm.Expect) -> None:
        def compile_ahead() -> None:
            with suppress(Exception):  # the error is reported when the request itself is compiled
                self._compile_grammar(message.grammar, self._ends.get(message.chain))

        self._thread.expect()
        if message.grammar:
            self._compiler.submit(compile_ahead)

    # ---- on the engine thread

    def _outputs(self, outputs: Sequence[Output]) -> None:
        self._put(packing.to_step(outputs, self._numbers))
        ended = [each.request_id for each in with_more_than_a_token(outputs) if each.finish is not None]
        self._forget(ended)

    def _variant_added(self, call: int, answer: Chain | VariantRefused) -> None:
        if isinstance(answer, VariantRefused):
            self._put(pm.VariantAdded(call, None, str(answer)))
        else:
            self._ends[answer.id] = answer.eos_token_ids
            self._put(pm.VariantAdded(call, answer))

    def _variant_removed(self, message: pm.RemoveVariant, refusal: VariantRefused | None) -> None:
        if refusal is None:
            self._ends.pop(message.id, None)
        self._put(pm.VariantRemoved(message.call, "" if refusal is None else str(refusal)))

    def _broken(self, reason: str) -> None:
        self._put(pm.Broken(reason))

    def _forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            del self._ids[self._numbers.pop(request_id)]

    def _put(self, message: pm.Message) -> None:
        self._frames.append(pm.frame(message))

    def _post(self, run_pass: Callable[[], None]) -> None:
        """Run the callbacks of a turn, and send all their messages at once."""
        run_pass()
        frames, self._frames = self._frames, []
        self._sender.send(b"".join(frames))
