"""One site between its gateways and its engine: routes outputs, calls the engine, drains.

Lives on the event loop's thread and is never awaited. Does not know streams; `link.py` moves the messages.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from site_engine import messages as m
from site_engine.core.request import Output
from site_engine.core.request_queue import has_place
from site_engine.engine_client import EngineClient, LoadSeen, Prepared
from site_engine.errors import NotServed, Reason
from site_engine.federation.attempts import Attempts, Routes, rejection
from site_engine.federation.connection import Connection, of_everyone
from site_engine.federation.held import HeldCall, HeldCalls
from site_engine.federation.load_reports import LoadReports
from site_engine.federation.outbox import STREAM_INTERVAL_S
from site_engine.federation.report_pace import ReportPace

log = logging.getLogger(__name__)


class Site:
    """`hello` introduces this site; at most `max_preparing` prompts wait for the tokenizer."""

    def __init__(
        self,
        hello: m.Hello,
        engine: EngineClient,
        clock: Callable[[], float],
        max_preparing: int,
        *,
        on_finish: m.OnFinish = lambda *_: None,
        on_stuck: Callable[[str], None] = lambda _: None,
        stream_interval_s: float = STREAM_INTERVAL_S,
    ) -> None:
        """`on_stuck` is called with the reason if the process must be restarted. While the event loop is
        busy, text is delayed by at most `stream_interval_s`.
        """
        self._on_finish = on_finish
        self._hello = hello
        self._engine = engine
        self._clock = clock
        self._max_preparing = max_preparing
        self._stream_interval_s = stream_interval_s
        self._served = hello.models  # including tenants' models, which Hello leaves out
        self._models = {model.id for model in hello.models}
        self.held = HeldCalls(max_preparing)
        self._connections: dict[str, Connection] = {}
        self.load_reports = LoadReports(hello, engine, self._connections, clock, on_stuck)
        self._routes: Routes = {}
        self._connected = 0
        self.on_order: m.OnModelOrder | None = None  # without it, orders are refused
        self.on_training: m.OnTraining = lambda _: None
        self._draining: m.Draining | None = None
        self._when_idle: Callable[[], None] | None = None

    # streams

    def hello(self) -> m.Hello:
        """Return the first message of a new stream."""
        lost = [each.attempts for each in self._connections.values() if not each.linked]
        return replace(
            self._hello, attempts=tuple(each for attempts in lost for each in attempts.attempt_ids())
        )

    @property
    def linked(self) -> frozenset[str]:
        """Gateways with an open stream."""
        return frozenset(each.gateway for each in self._connections.values() if each.linked)

    @property
    def tuning(self) -> list[Connection]:
        """Gateways with an open stream that have fine-tuning jobs."""
        return [each for each in self._connections.values() if each.linked and each.tunes]

    def welcomed(self, hello: m.Hello, welcome: m.Welcome, wake: Callable[[], None]) -> Connection:
        """Register an open stream. Attempts of an earlier stream to the replica continue if `hello` names
        them.

        Replica and site both treat a second stream as the successor of the first.
        """
        known = self._connections.get(welcome.gateway)
        if known is not None and known.linked:
            known.displaced = True
            known.wake()
            self._abandon(known)
            known = None
        if known is None:
            self._connected += 1
            attempts = Attempts(self._connected, self._routes, self._on_finish, self._stream_interval_s)
            pace = ReportPace(self._hello.slots, self._hello.kv_capacity_tokens)
            known = self._connections[welcome.gateway] = Connection(welcome.gateway, attempts, pace, wake)
        known.welcomed(welcome, wake, self._clock())
        if hello.models != known.visible(self._served):  # changed since, or a tenant's
            self._announce_models(known)
        unwanted = set(known.attempts.attempt_ids()) - set(hello.attempts) | set(welcome.cancel)
        for attempt_id in unwanted:
            self._engine.cancel(known.attempts.cancel(attempt_id))
        if self._draining is not None:
            known.attempts.outbox.put(self._draining)
        self._engine.request_load()
        return known

    def lost(self, connection: Connection) -> None:
        """Unregister a closed stream. Its attempts are kept for the grace period."""
        if connection.displaced:
            return
        connection.linked = False
        connection.counting.clear()
        connection.wake = lambda: None  # no stream reads the outbox
        connection.attempts.outbox.stream_lost()
        connection.lost_s = self._clock()
        self.tick()

    def tick(self) -> None:
        """End grace periods, and request a load report when one is due. Call this a few times a second."""
        now = self._clock()
        for each in list(self._connections.values()):
            if not each.linked and now - each.lost_s >= each.grace_s:
                self._abandon(each)
        self.load_reports.tick(now)
        self._check_idle()

    # from a gateway

    def receive(self, connection: Connection, message: m.FromGateway) -> None:
        attempts = connection.attempts
        match message:
            case m.Assign():
                self._assign(connection, message)
            case m.Count():
                self._count(connection, message.assign)
            case m.Cancel():
                connection.counting.discard(message.attempt_id)
                self._engine.cancel(attempts.cancel(message.attempt_id))
            case m.Release():
                self._release(connection, message)
            case m.Ping():
                attempts.outbox.put(m.Pong(message.nonce, time.time()))
            case m.ModelOrder():
                self._order(connection, message)
            case m.Rejected():
                attempts.outbox.put(message)
            case _:
                log.warning("gateway %s said Welcome twice", connection.gateway)
        self._changed(connection)

    def _assign(self, connection: Connection, assign: m.Assign) -> None:
        refusal = self._refusal(assign)
        if refusal is not None:
            connection.attempts.outbox.put(refusal)
        elif connection.attempts.assign(assign, self._clock()):
            self._prepare(connection, assign)

    def _prepare(self, connection: Connection, assign: m.Assign) -> None:
        """Prepare the prompt once the model is awake. A gateway that would treat that wait as a fault is
        asked to assign again later.
        """
        attempt_id, attempts = assign.attempt_id, connection.attempts
        is_wanted = partial(attempts.is_preparing, attempt_id)
        if not self.held.is_asleep(assign.model):
            try:
                self._engine.prepare(assign, partial(self._prepared, connection, attempt_id), is_wanted)
            except Exception as exc:  # noqa: BLE001 - it would end the link, and all answers on it
                attempts.broken(attempt_id, exc)
            return
        begin = partial(self._prepare, connection, assign)
        refuse = partial(self._admitted, connection, attempt_id)
        if connection.reads_held:
            attempts.outbox.put(m.Held(attempt_id))
            self.held.hold(HeldCall(assign.model, assign.tenant, is_wanted, begin, refuse))
        else:
            self.held.wake(assign.model)
            refuse(NotServed(Reason.FULL, f"{assign.model} sleeps here, and wakes now"))

    def _count(self, connection: Connection, assign: m.Assign) -> None:
        count_id, counting = assign.attempt_id, connection.counting

        def reply(answer: int | NotServed) -> None:
            if count_id not in counting:
                return
            counting.remove(count_id)
            if isinstance(answer, NotServed):
                connection.attempts.outbox.put(rejection(assign, answer))
            else:
                connection.attempts.outbox.put(m.Counted(count_id, answer))
            connection.wake()

        refusal = self._refusal(assign)
        if refusal is not None:
            connection.attempts.outbox.put(refusal)
        elif count_id not in counting:
            counting.add(count_id)
            is_wanted = partial(counting.__contains__, count_id)
            count = partial(self._engine.count, assign, reply, is_wanted)
            if self.held.is_asleep(assign.model):
                self.held.hold(HeldCall(assign.model, assign.tenant, is_wanted, count, reply))
            else:
                count()

    def _refusal(self, assign: m.Assign) -> m.Rejected | None:
        reject = partial(m.Rejected, assign.attempt_id)
        if assign.model not in self._models:
            return reject(Reason.MODEL_UNKNOWN, f"{assign.model} is not served here", "model")
        if self._draining is not None:
            return reject(Reason.DRAINING, "this site takes no new work")
        waiting, of_tenant = self._engine.waiting, self._engine.waiting_of(assign.tenant)
        if not has_place(of_tenant, waiting, self._max_preparing):
            message = f"{waiting} prompts wait to be read already, {of_tenant} of them of this tenant"
            return reject(Reason.FULL, message)
        return None

    def _prepared(self, connection: Connection, attempt_id: str, answer: Prepared | NotServed) -> None:
        if isinstance(answer, NotServed):
            self._admitted(connection, attempt_id, answer)
            return
        group = connection.attempts.prepared(attempt_id, answer)
        if group:
            self._engine.submit(answer, group, partial(self._admitted, connection, attempt_id))

    def _admitted(self, connection: Connection, attempt_id: str, answer: NotServed | None) -> None:
        if answer is not None:
            assign = connection.attempts.wanted(attempt_id)
            if answer.reason is Reason.MODEL_UNKNOWN and assign and self.held.is_asleep(assign.model):
                connection.attempts.prepare_again(attempt_id)  # its model was put to sleep since
                self._prepare(connection, assign)
            else:
                connection.attempts.refused(attempt_id, answer)
        else:
            connection.admitted()
            connection.attempts.admitted(attempt_id)
        self._changed(connection)

    def _release(self, connection: Connection, release: m.Release) -> None:
        pending = connection.attempts.release(release)
        if not pending.groups:
            connection.attempts.released(pending, [])
            return

        def on_decisions(decisions: list[bool]) -> None:
            connection.drop_report()
            connection.attempts.released(pending, decisions)
            self._changed(connection)

        self._engine.release(pending.groups, on_decisions)

    # the models

    def set_models(self, models: tuple[m.Model, ...]) -> None:
        """Replace the served models and notify every gateway. Attempts of removed models continue."""
        before, self._served = self._served, models
        self._hello = replace(self._hello, models=of_everyone(models))
        self._models = {model.id for model in models}
        for connection in self._connections.values():
            if connection.linked and connection.visible(before) != connection.visible(models):
                self._announce_models(connection)
                connection.wake()
        self.held.set_models(models)

    def _order(self, connection: Connection, order: m.ModelOrder) -> None:
        def reply(error: str) -> None:
            connection.attempts.outbox.put(m.Ordered(order.order_id, error))
            connection.wake()

        if self.on_order is None:
            reply(f"{self._hello.site} takes no orders for models")
        else:
            self.on_order(order, reply)

    def _announce_models(self, connection: Connection) -> None:
        """Send the models. For a gateway that reads models only from Hello, `link.py` sends Hello again."""
        if connection.reads_models:
            connection.attempts.outbox.models(m.Models(connection.visible(self._served)))
        else:
            connection.hello_is_old = True

    # from the engine

    def outputs(self, outputs: Sequence[Output]) -> None:
        touched = Counter[Attempts]()  # with the number of ended requests of each
        for output in outputs:
            if (route := self._routes.get(output.request_id)) is not None:
                if broken := route.attempts.deliver(route.attempt_id, route.choice, output):
                    self._engine.cancel(broken)
                touched[route.attempts] += output.finish is not None
        for connection in list(self._connections.values()):
            if connection.attempts in touched:
                if ended := touched[connection.attempts]:
                    connection.ended(ended)
                if connection.attempts.computed:
                    self._announce_prefixes(connection)
                self._changed(connection)

    def _announce_prefixes(self, connection: Connection) -> None:
        """Announce the prompts that this site has computed for one gateway to the others."""
        computed, connection.attempts.computed = connection.attempts.computed, []
        for other in self._connections.values():
            if other is not connection and other.linked and other.reads_prefixes:
                other.attempts.outbox.prefixes(computed)
                other.wake()

    def load(self, seen: LoadSeen) -> None:
        self.load_reports.report(seen, draining=self._draining is not None)

    # the end

    def drain(self, reason: str) -> None:
        """Start refusing new attempts, and notify every gateway."""
        self._draining = m.Draining(reason)
        for connection in self._connections.values():
            if connection.linked:
                connection.attempts.outbox.put(self._draining)
                connection.wake()

    def when_idle(self, call: Callable[[], None]) -> None:
        """Call `call` when no attempt is left, at once if there is none."""
        self._when_idle = call
        self._check_idle()

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(sorted(self._models))

    @property
    def live(self) -> int:
        """Number of attempts that have not ended."""
        return sum(each.attempts.live for each in self._connections.values())

    def _abandon(self, connection: Connection) -> None:
        del self._connections[connection.gateway]
        connection.counting.clear()
        self._engine.cancel(connection.attempts.abandon())

    def _changed(self, connection: Connection) -> None:
        connection.wake()
        self._check_idle()

    def _check_idle(self) -> None:
        if self._when_idle is not None and not self.live:
            call, self._when_idle = self._when_idle, None
            call()
