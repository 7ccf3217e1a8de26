"""Use an inference server as the engine of a site: the `EngineClient` over HTTP.

Lives on the event loop. Does not count the tokens of prompts: the server does, and reports them at the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from site_engine.core.request import Finish, Output
from site_engine.core.request_queue import has_place
from site_engine.core.stall_watch import StallWatch
from site_engine.engine_client import Group, Listener, LoadSeen, Prepared
from site_engine.errors import NotServed, Reason
from site_engine.messages import Assign, PoolingPrompt, TextPrompt
from site_engine.remote import plain
from site_engine.remote.concurrency import ConcurrencyLimit, RateLimit
from site_engine.remote.count import TokenCounter
from site_engine.remote.dialects import Dialect
from site_engine.remote.load import Throughput, load_figures
from site_engine.remote.prometheus import ServerLoad
from site_engine.remote.queue import RemoteQueue, RemoteRequest
from site_engine.remote.quirks import Quirks, change_for
from site_engine.remote.request import HttpRequest, build_request, guess_tokens, without_limit
from site_engine.remote.server import Server, ServerLost, ServerRefused, refused_in_stream
from site_engine.remote.stream import FailedStream, MalformedStream, ResponseStream

log = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.05
MAX_FAILURES = 3
"""Consecutive failed answers after which the server counts as broken, whatever its health probe returns,
unless it answers a plain request.
"""
LAST_BYTES_S = 1.0
SILENT_AFTER_S = 15.0
"""Seconds without a byte in any started answer, beyond the time for the prefill of its prompts, after which
the server counts as stalled. The setting `silence_s` later ends each answer individually.
"""
GUESS_FACTOR = 2
"""A prompt whose guessed length exceeds this many times the context is refused here, as some servers would
process it to its end. Images are not counted: their number of tokens differs too much between models.
"""


@dataclass(frozen=True, slots=True)
class ServerProfile:
    """Capabilities discovered of the server, and the operator's limits. `models`: Mico's names to the
    server's.
    """

    models: Mapping[str, str]
    dialect: Dialect
    context_tokens: int
    kv_capacity_tokens: int
    slots: int
    max_pending: int
    max_prompt_tokens: int | None = None  # the longest context; None: unknown
    requests_per_min: int | None = None
    tokens_per_min: int | None = None


_NOT_STARTED = Listener(lambda _: None, lambda _: None, lambda _: None)


class RemoteEngine:
    """The EngineClient of a site in front of a server.

    `listener.broken` is called once if the server counts as broken.
    """

    waiting = 0  # prompts are prepared at once

    def __init__(self, server: Server, profile: ServerProfile, clock: Callable[[], float]) -> None:
        self._server = server
        self._profile = profile
        self.listener = _NOT_STARTED
        self._clock = clock
        self.queue = RemoteQueue()
        self.concurrency = ConcurrencyLimit(profile.slots)
        self._throughput = Throughput(clock())
        self._rate = RateLimit(profile.requests_per_min, profile.tokens_per_min, clock())
        self._server_load: ServerLoad | None = None
        self._blocked_until_s = float("-inf")
        self._failures = 0
        self._broken = ""
        self._pump_timer: asyncio.TimerHandle | None = None
        self._load_timer: asyncio.TimerHandle | None = None
        self._load_s = float("-inf")
        self._received_s = float("-inf")
        self._stall_watch = StallWatch()
        self._counter = TokenCounter(server)
        self._asking_plainly: asyncio.Task[None] | None = None
        self._quirks = Quirks()

    # the interface of a site

    def waiting_of(self, tenant: str) -> int:
        """Return 0: prompts are prepared at once."""
        return 0

    def stalled_s(self) -> float:
        """Return the seconds without a byte in all started answers if the server has stalled, else 0."""
        begun = [each for each in self.queue.sent if each.first_s is not None]
        silent_s = self._stall_watch.look(self._received_s if begun else None, self._clock())
        if silent_s <= SILENT_AFTER_S:
            return 0.0
        unread = sum(each.prompt_tokens for each in self.queue.sent if each.first_s is None)
        cost = self._throughput.fit.cost()
        reading_s = cost.seconds(len(self.queue.sent), unread, self.queue.sent_tokens)
        return silent_s if silent_s > SILENT_AFTER_S + 2 * reading_s else 0.0

    def prepare(
        self,
        assign: Assign,
        reply: Callable[[Prepared | NotServed], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Reply at once: the server tokenizes prompts itself."""
        try:
            request = build_request(assign, self._profile.models[assign.model], self._profile.dialect)
        except NotServed as refusal:
            reply(refusal)
            return
        tokens, context, factor = guess_tokens(assign), self._profile.max_prompt_tokens, GUESS_FACTOR
        if self._profile.dialect.truncates:
            context, factor = self._profile.context_tokens, 1
        is_one = not isinstance(assign.prompt, PoolingPrompt)  # each of several inputs may fill the context
        if context is not None and is_one and tokens - assign.image_tokens > context * factor:
            message = f"the prompt has about {tokens} tokens, but the context here is {context}"
            reply(NotServed(Reason.CONTEXT_LENGTH, message, "prompt"))
            return
        echo = assign.prompt.text if assign.echo and isinstance(assign.prompt, TextPrompt) else ""
        reply(Prepared((), echo, guessed_tokens=tokens, payload=request))

    def count(
        self,
        assign: Assign,
        reply: Callable[[int | NotServed], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self._counter.count(assign, self._profile.models[assign.model], self._profile.dialect, reply)

    def submit(self, prepared: Prepared, group: Group, reply: Callable[[NotServed | None], None]) -> None:
        assert isinstance(prepared.payload, HttpRequest)
        if (refusal := self._refusal(group[0].tenant)) is not None:
            reply(refusal)
            return
        tokens, http = prepared.guessed_tokens, self._quirks.apply(prepared.payload)
        request = RemoteRequest(tuple(group), http, tokens, self._clock(), reply)
        if request.is_spent:
            reply(None)
            self.listener.outputs(_finishes(request, Finish.LENGTH))
            return
        self.queue.add(request)
        reply(None)
        self.pump()
        self._report_load()  # with each admission, so that no older report follows it

    def cancel(self, request_ids: Iterable[str]) -> None:
        for request in self.queue.find(request_ids):
            self._drop(request)
            self.listener.outputs(_finishes(request, Finish.CANCELLED))
        self.pump()
        self._schedule_load()

    def release(self, groups: Sequence[Sequence[str]], reply: Callable[[list[bool]], None]) -> None:
        """Release the groups that have not been sent to the server."""
        decisions = []
        for group in groups:
            unsent = [each for each in self.queue.find(group) if each.sent_s is None]
            for request in unsent:
                self._drop(request)
            decisions.append(bool(unsent))
        reply(decisions)
        self._schedule_load()

    def request_load(self) -> None:
        self.pump()
        self._report_load()

    # the server's state

    def update_load(self, load: ServerLoad) -> None:
        """Store the server's latest metrics."""
        self._server_load = load
        self.concurrency.observe_queue(sent=len(self.queue.sent), waiting=load.waiting or 0)
        self.pump()
        self._schedule_load()

    def set_profile(self, profile: ServerProfile) -> None:
        """Replace the served models. Slots and limits stay, and started answers continue."""
        self._profile = profile

    def forget_load(self) -> None:
        """Drop the latest metrics, which are outdated once the server stops exporting any."""
        self._server_load = None

    def fail_all(self, reason: str) -> None:
        """Fail every request because the server is lost, so that gateways resume them at other sites."""
        self._broken = reason
        for timer in (self._pump_timer, self._load_timer):
            if timer is not None:
                timer.cancel()
        self._counter.cancel()
        if self._asking_plainly is not None:
            self._asking_plainly.cancel()
        for request in self.queue.all():
            self._fail(request, reason)

    # sending

    def pump(self) -> None:
        """Send pending requests, as far as concurrency, rate limit and the server's Retry-After permit.

        If one of the last two does not permit it yet, the next call is scheduled for when it does.
        """
        while self.queue.pending and len(self.queue.sent) < self.concurrency.limit and not self._broken:
            now = self._clock()
            request = self.queue.peek(now)
            tokens = request.tokens + round(request.expected_remaining())
            wait_s = max(self._blocked_until_s - now, self._rate.wait_s(tokens, now))
            loop = asyncio.get_running_loop()
            if wait_s > 0:
                if self._pump_timer is not None:
                    self._pump_timer.cancel()
                self._pump_timer = loop.call_later(wait_s, self.pump)
                return
            self._rate.take(tokens, now)
            self.queue.pop(now)
            request.sent_s = now
            request.task = loop.create_task(self._stream(request))

    async def _stream(self, request: RemoteRequest) -> None:
        """Send one request and publish its answer until it ends, fails or is refused."""
        deadline_s = request.first.deadline_s
        left_s = None if deadline_s is None else max(0.0, deadline_s - self._clock())
        try:
            async with asyncio.timeout(left_s), self._server.stream(request.http) as received:
                async for data in received:
                    self._received_s = self._clock()
                    before = request.stream.tokens
                    outputs = request.stream.feed(data)
                    self._throughput.tokens_total += request.stream.tokens - before
                    self._publish(request, outputs)
                    if request.stream.done:
                        break
                self._finish(request)
                with suppress(TimeoutError):  # read to the end, so that the connection can be reused
                    async with asyncio.timeout(LAST_BYTES_S):
                        async for _ in received:
                            pass
        except ServerRefused as refused:
            self._turn_away(request, refused)
        except FailedStream as failed:
            self._fail_or_turn_away(request, failed)
        except (ServerLost, MalformedStream) as exc:
            self._fail_unless_ended(request, str(exc))
        except TimeoutError:
            self._fail(request, "the answer's deadline passed")
        except Exception:
            log.exception("a fault of ours in talking to the server")
            self._fail(request, "a fault of this site")
        finally:
            self.pump()
            self._schedule_load()

    def _publish(self, request: RemoteRequest, outputs: list[Output]) -> None:
        if not outputs or request not in self.queue:
            return
        if request.first_s is None:
            self._observe_first_token(request)
        self.listener.outputs(outputs)
        self._schedule_load()

    def _observe_first_token(self, request: RemoteRequest) -> None:
        now = request.first_s = self._clock()
        seconds, sent = now - (request.sent_s or now), len(self.queue.sent)
        waiting = self._server_load.waiting if self._server_load else None
        queues = None if waiting is None else waiting > 0
        self.concurrency.observe_first_token(seconds, sent=sent, queues=queues)
        if not waiting:  # otherwise most of the time was spent in the server's queue
            self._throughput.observe_prefill(
                rows=sent,
                prompt_tokens=request.prompt_tokens,
                kv_tokens=self.queue.sent_tokens,
                seconds=seconds,
            )

    def _finish(self, request: RemoteRequest) -> None:
        before = request.stream.tokens
        finishes = request.stream.end()
        if request not in self.queue:
            return
        now, stream = self._clock(), request.stream
        self._failures = 0
        self._quirks.learn(request.http, request.changes)
        self._throughput.tokens_total += stream.tokens - before
        self._throughput.prompt_tokens_total += stream.prompt_tokens or request.prompt_tokens
        if request.http.pooling is not None:
            self.concurrency.observe_whole_answer(sent=len(self.queue.sent))
            self._throughput.observe_prefill(
                rows=len(self.queue.sent),
                prompt_tokens=stream.prompt_tokens or request.prompt_tokens,
                kv_tokens=0,
                seconds=now - (request.sent_s or now),
            )
        if request.first_s is not None:
            self._throughput.observe_decode(
                rows=len(self.queue.sent),
                kv_tokens=self.queue.sent_tokens,
                tokens=(stream.tokens - stream.delivered) // len(request.choices),
                seconds=now - request.first_s,
            )
        self.queue.remove(request)
        self.listener.outputs([each._replace(timings=request.timings(now)) for each in finishes])
        self._schedule_load()

    # failures

    def _refusal(self, tenant: str) -> NotServed | None:
        if self._broken:
            return NotServed(Reason.INTERNAL, self._broken)
        if (left_s := self._blocked_until_s - self._clock()) > 0:
            return NotServed(Reason.FULL, f"the server asked to be left alone for {left_s:.1f} s more")
        waiting, max_pending = len(self.queue.pending), self._profile.max_pending
        if not has_place(self.queue.pending_of(tenant), waiting, max_pending):
            return NotServed(Reason.FULL, f"{waiting} attempts wait here already, of {max_pending} at most")
        return None

    def _turn_away(self, request: RemoteRequest, refused: ServerRefused) -> None:
        """Pass on a refusal of the server. Send nothing more to a full server for its Retry-After."""
        if refused.refusal.reason is Reason.INTERNAL:
            self._fail_by_server(request, refused.refusal.message)
            return
        if refused.retry_after_s is not None:
            self.concurrency.observe_overload()
            self._blocked_until_s = max(self._blocked_until_s, self._clock() + refused.retry_after_s)
        if request in self.queue and not self._sent_again(request, refused.refusal):
            self.queue.remove(request)
            request.reply(refused.refusal)

    def _fail_or_turn_away(self, request: RemoteRequest, failed: FailedStream) -> None:
        """Handle an error in a stream: a refusal that a server such as SGLang sends there, or a failure."""
        refused = refused_in_stream(failed.error)
        if refused is not None and not request.stream.started:
            self._turn_away(request, refused)
        else:
            self._fail_by_server(request, str(failed))

    def _fail_unless_ended(self, request: RemoteRequest, reason: str) -> None:
        """Fail an answer, unless only the server's usage is missing: it would be resumed after its end."""
        if request.stream.is_ended:
            self._finish(request)
        else:
            self._fail_by_server(request, reason)

    def _sent_again(self, request: RemoteRequest, refusal: NotServed) -> bool:
        """Send a refused request again in another form, if there is one. Return whether it was sent.

        If the server refuses `max_tokens` beyond its context, the request is sent without a limit, and the
        answer may be shorter. If the refusal is one that `quirks.py` knows, the field that it names is
        renamed or left out. A prompt that is too long is refused again.
        """
        again = None
        if (change := change_for(request.http, refusal.message)) is not None:
            request.changes.append(change)
            again = change(request.http)
        elif refusal.reason is Reason.CONTEXT_LENGTH and self._profile.dialect.refuses_excess:
            again = without_limit(request.http)
        if again is None:
            return False
        request.http = again
        request.stream = ResponseStream([each.id for each in request.choices], again.delivered)
        request.task = asyncio.get_running_loop().create_task(self._stream(request))
        return True

    def _fail_by_server(self, request: RemoteRequest, reason: str) -> None:
        if request not in self.queue:
            return
        log.warning("an answer failed: %s", reason)
        self._fail(request, reason)
        self._failures += 1
        if self._failures >= MAX_FAILURES and not (self._broken or self._asking_plainly):
            asking = self._ask_plainly(request.http, reason)
            self._asking_plainly = asyncio.get_running_loop().create_task(asking)

    async def _ask_plainly(self, failed: HttpRequest, reason: str) -> None:
        if not await plain.serves(self._server, failed):
            self.listener.broken(f"{self._failures} answers in a row failed, the last: {reason}")
            return
        log.warning("%d answers in a row failed, but the server answers a plain request", self._failures)
        self._failures, self._asking_plainly = 0, None

    def _fail(self, request: RemoteRequest, reason: str) -> None:
        """Refuse an attempt without output, which can start elsewhere unharmed. Fail any other."""
        if request not in self.queue:
            return
        self._drop(request)
        if request.stream.started:
            self.listener.outputs(_finishes(request, Finish.FAILED, reason))
        else:
            request.reply(NotServed(Reason.INTERNAL, reason))

    def _drop(self, request: RemoteRequest) -> None:
        self.queue.remove(request)
        if request.task is not None and request.task is not asyncio.current_task():
            request.task.cancel()

    # load

    def _schedule_load(self) -> None:
        """Schedule a load report, at most one every LOAD_INTERVAL_S: the link sends no more either."""
        if self._load_timer is None and not self._broken:
            wait_s = max(0.0, self._load_s + LOAD_INTERVAL_S - self._clock())
            self._load_timer = asyncio.get_running_loop().call_later(wait_s, self._report_load)

    def _report_load(self) -> None:
        if self._load_timer is not None:
            self._load_timer.cancel()
            self._load_timer = None
        now = self._load_s = self._clock()
        load = self._server_load
        working = bool(self.queue.sent or (load and load.running))
        self._throughput.sample(now, load.tokens_total if load else None, working=working)
        capacity = self._profile.kv_capacity_tokens
        figures = load_figures(self.queue, load, self._throughput, capacity)
        self.listener.load(LoadSeen(figures, now))


def _finishes(request: RemoteRequest, finish: Finish, error: str = "") -> list[Output]:
    return [
        Output(
            each.id,
            finish=finish,
            error=error,
            completion_tokens=request.stream.tokens_of(index),
            prompt_tokens=request.stream.prompt_tokens,
        )
        for index, each in enumerate(request.choices)
    ]
