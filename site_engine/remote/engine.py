"""A server as the engine of a site: what `Site` asks of an engine and of a tokenizer, answered over HTTP.

Lives on the event loop. Does not count tokens of prompts: the server does, and tells at the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from site_engine.core.request import Admission, Finish, Output
from site_engine.core.request_queue import has_place
from site_engine.engine_client import Group, Listener, LoadSeen, Prepared
from site_engine.errors import NotServed, Reason
from site_engine.messages import Assign, TextPrompt
from site_engine.remote.concurrency import Allowance, Window
from site_engine.remote.dialects import Dialect
from site_engine.remote.load import Pace, figures
from site_engine.remote.prometheus import Busy
from site_engine.remote.queue import Held, Holding
from site_engine.remote.request import Asking, asking, guessed_tokens
from site_engine.remote.server import Server, ServerLost, ServerRefused
from site_engine.remote.stream import Garbage

log = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.05
FAILURES_MAX = 3
"""So many answers in a row that the server failed, none in between: it is broken, whatever its probe says."""
LAST_BYTES_S = 1.0
GUESS_FACTOR = 2
"""A prompt of so many times the context, by the guess of its tokens, is too long for certain; some servers
would read it to its end.
"""


@dataclass(frozen=True, slots=True)
class Terms:
    """What was found of the server, and what the operator allows. `models`: our names to the server's."""

    models: Mapping[str, str]
    dialect: Dialect
    context_tokens: int
    kv_capacity_tokens: int
    slots: int
    max_pending: int
    longest_prompt_tokens: int | None = None  # the longest context; None: nobody said it
    requests_per_min: int | None = None
    tokens_per_min: int | None = None


_NOT_STARTED = Listener(lambda _: None, lambda _: None, lambda _: None)


class RemoteEngine:
    """The EngineClient of a site in front of a server.

    `listener.broken` is called once if the server fails for good.
    """

    waiting = 0  # prompts are prepared at once

    def __init__(self, server: Server, terms: Terms, clock: Callable[[], float]) -> None:
        self._server = server
        self._terms = terms
        self.listener = _NOT_STARTED
        self._clock = clock
        self.holding = Holding()
        self.window = Window(terms.slots)
        self._pace = Pace(clock())
        self._allowance = Allowance(terms.requests_per_min, terms.tokens_per_min, clock())
        self._busy: Busy | None = None
        self._blocked_until_s = float("-inf")
        self._failures = 0
        self._broken = ""
        self._later: asyncio.TimerHandle | None = None
        self._load_due: asyncio.TimerHandle | None = None
        self._load_s = float("-inf")

    # a tokenizer's part

    def waiting_of(self, tenant: str) -> int:
        """None: prompts are prepared at once."""
        return 0

    def prepare(self, assign: Assign, reply: Callable[[Prepared | NotServed], None]) -> None:
        """Reply at once: there is nothing to tokenize here."""
        try:
            asked = asking(assign, self._terms.models[assign.model], self._terms.dialect)
        except NotServed as refusal:
            reply(refusal)
            return
        tokens = guessed_tokens(assign)
        most = self._terms.longest_prompt_tokens
        if most is not None and tokens > most * GUESS_FACTOR:
            message = f"the prompt has about {tokens} tokens, but the context here is {most}"
            reply(NotServed(Reason.CONTEXT_LENGTH, message, "prompt"))
            return
        echo = assign.prompt.text if assign.echo and isinstance(assign.prompt, TextPrompt) else ""
        reply(Prepared((), echo, guessed_tokens=tokens, payload=asked))

    # an engine's part

    def submit(
        self, prepared: Prepared, group: Group, reply: Callable[[Admission | NotServed], None]
    ) -> None:
        assert isinstance(prepared.payload, Asking)
        asked, tokens = prepared.payload, prepared.guessed_tokens
        if (refusal := self._refusal(group[0].tenant)) is not None:
            reply(refusal)
            return
        held = Held(tuple(group), asked, tokens, self._clock(), reply)
        room = max(1, self._terms.context_tokens - tokens)
        most = min(room, held.request.sampling.max_tokens or room)
        if held.is_spent:
            reply(Admission(0, most))
            self.listener.outputs(_ends(held, Finish.LENGTH))
            return
        reply(Admission(self.holding.add(held), most))
        self.pump()
        self._tell_load()  # with each admission, so that no older figures follow it

    def cancel(self, request_ids: Iterable[str]) -> None:
        for held in self.holding.of(request_ids):
            self._drop(held)
            self.listener.outputs(_ends(held, Finish.CANCELLED))
        self.pump()
        self._show_load()

    def release(self, groups: Sequence[Sequence[str]], reply: Callable[[list[bool]], None]) -> None:
        """Gives up what has not been sent."""
        gone = []
        for group in groups:
            found = [held for held in self.holding.of(group) if held.sent_s is None]
            for held in found:
                self._drop(held)
            gone.append(bool(found))
        reply(gone)
        self._show_load()

    def request_load(self) -> None:
        self.pump()
        self._tell_load()

    # the server's word

    def update_load(self, busy: Busy) -> None:
        """Take the server's latest metrics."""
        self._busy = busy
        self.window.figures(sent=len(self.holding.sent), waiting=busy.waiting or 0)
        self.pump()
        self._show_load()

    def forget_load(self) -> None:
        """Drop the latest metrics, which would only mislead once the server exports none."""
        self._busy = None

    def fail_all(self, reason: str) -> None:
        """The server is gone: whatever is held ends, so that the gateways go on elsewhere."""
        self._broken = reason
        for timer in (self._later, self._load_due):
            if timer is not None:
                timer.cancel()
        for held in self.holding.all():
            self._fail(held, reason)

    # sending

    def pump(self) -> None:
        """Sends what may be sent; looks again when the provider's allowance or patience permits."""
        while self.holding.pending and len(self.holding.sent) < self.window.size and not self._broken:
            now = self._clock()
            held = self.holding.first(now)
            tokens = held.tokens + round(held.expected_remaining())
            wait_s = max(self._blocked_until_s - now, self._allowance.wait_s(tokens, now))
            if wait_s > 0:
                self._look_again(wait_s)
                return
            self._allowance.take(tokens, now)
            self.holding.begin(now)
            held.sent_s = now
            held.task = asyncio.get_running_loop().create_task(self._converse(held))

    def _look_again(self, wait_s: float) -> None:
        if self._later is not None:
            self._later.cancel()
        self._later = asyncio.get_running_loop().call_later(wait_s, self.pump)

    async def _converse(self, held: Held) -> None:
        try:
            async with asyncio.timeout(self._left_s(held)), self._server.answer(held.asking) as received:
                async for data in received:
                    self._publish(held, self._read(held, data))
                    if held.stream.done:
                        break
                self._finish(held)
                await _read_out(received)
        except ServerRefused as refused:
            self._turned_away(held, refused)
        except (ServerLost, Garbage) as broken:
            self._server_failed(held, str(broken))
        except TimeoutError:
            self._fail(held, "the answer's deadline passed")
        except Exception:
            log.exception("a fault of ours in talking to the server")
            self._fail(held, "a fault of this site")
        finally:
            self.pump()
            self._show_load()

    def _left_s(self, held: Held) -> float | None:
        deadline_s = held.request.deadline_s
        return None if deadline_s is None else max(0.0, deadline_s - self._clock())

    def _read(self, held: Held, data: bytes) -> list[Output]:
        before = held.stream.tokens
        outputs = held.stream.feed(data)
        self._pace.tokens_total += held.stream.tokens - before
        return outputs

    def _publish(self, held: Held, outputs: list[Output]) -> None:
        if not outputs or held not in self.holding:
            return
        if held.first_s is None:
            self._first(held)
        self.listener.outputs(outputs)
        self._show_load()

    def _first(self, held: Held) -> None:
        now = held.first_s = self._clock()
        seconds, sent = now - (held.sent_s or now), len(self.holding.sent)
        waiting = self._busy.waiting if self._busy else None
        self.window.first_token(seconds, sent=sent, queues=None if waiting is None else waiting > 0)
        if not waiting:  # else it says how long it queued
            kv_tokens = self._kv_tokens()
            self._pace.began(
                rows=sent, prompt_tokens=held.prompt_tokens, kv_tokens=kv_tokens, seconds=seconds
            )

    def _finish(self, held: Held) -> None:
        before = held.stream.tokens
        ends = held.stream.end()
        if held not in self.holding:
            return
        now, stream = self._clock(), held.stream
        self._failures = 0
        self._pace.tokens_total += stream.tokens - before
        self._pace.prompt_tokens_total += stream.prompt_tokens or held.prompt_tokens
        if held.first_s is not None:
            each = (stream.tokens - stream.delivered) // len(held.requests)
            self._pace.ended(
                rows=len(self.holding.sent),
                kv_tokens=self._kv_tokens(),
                tokens=each,
                seconds=now - held.first_s,
            )
        self.holding.drop(held)
        self.listener.outputs([end._replace(timings=held.timings(now)) for end in ends])
        self._show_load()

    # when it goes wrong

    def _refusal(self, tenant: str) -> NotServed | None:
        if self._broken:
            return NotServed(Reason.INTERNAL, self._broken)
        if (left_s := self._blocked_until_s - self._clock()) > 0:
            return NotServed(Reason.FULL, f"the server asked to be left alone for {left_s:.1f} s more")
        waiting, most = len(self.holding.pending), self._terms.max_pending
        if not has_place(self.holding.pending_of(tenant), waiting, most):
            return NotServed(Reason.FULL, f"{waiting} attempts wait here already, of {most} at most")
        return None

    def _turned_away(self, held: Held, refused: ServerRefused) -> None:
        if refused.refusal.reason is Reason.INTERNAL:
            self._server_failed(held, refused.refusal.message)
            return
        if refused.retry_after_s is not None:
            self.window.refused()
            self._blocked_until_s = self._clock() + refused.retry_after_s
        if held in self.holding:
            self.holding.drop(held)
            held.reply(refused.refusal)

    def _server_failed(self, held: Held, reason: str) -> None:
        if held not in self.holding:
            return
        log.warning("an answer failed: %s", reason)
        self._fail(held, reason)
        self._failures += 1
        if self._failures >= FAILURES_MAX and not self._broken:
            self.listener.broken(f"{self._failures} answers in a row failed, the last: {reason}")

    def _fail(self, held: Held, reason: str) -> None:
        """Before its first word an attempt can go on elsewhere as if nothing had been; after it, it broke."""
        if held not in self.holding:
            return
        self._drop(held)
        if held.stream.spoke:
            self.listener.outputs(_ends(held, Finish.FAILED, reason))
        else:
            held.reply(NotServed(Reason.INTERNAL, reason))

    def _drop(self, held: Held) -> None:
        self.holding.drop(held)
        if held.task is not None and held.task is not asyncio.current_task():
            held.task.cancel()

    # load

    def _kv_tokens(self) -> int:
        return sum(held.tokens for held in self.holding.sent)

    def _show_load(self) -> None:
        """Soon: figures need not be sent more often than the link passes them on."""
        if self._load_due is None and not self._broken:
            wait_s = max(0.0, self._load_s + LOAD_INTERVAL_S - self._clock())
            self._load_due = asyncio.get_running_loop().call_later(wait_s, self._tell_load)

    def _tell_load(self) -> None:
        if self._load_due is not None:
            self._load_due.cancel()
            self._load_due = None
        now = self._load_s = self._clock()
        working = bool(self.holding.sent or (self._busy and self._busy.running))
        self._pace.look(now, self._busy.tokens_total if self._busy else None, working=working)
        seen = figures(self.holding, self._busy, self._pace, self._terms.kv_capacity_tokens)
        self.listener.load(LoadSeen(seen, now))


def _ends(held: Held, finish: Finish, error: str = "") -> list[Output]:
    return [
        Output(
            each.id,
            finish=finish,
            error=error,
            completion_tokens=held.stream.tokens_of(index),
            prompt_tokens=held.stream.prompt_tokens,
        )
        for index, each in enumerate(held.requests)
    ]


async def _read_out(received: AsyncIterator[bytes]) -> None:
    """The stream's own end, so that its connection can be used again."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LAST_BYTES_S):
            async for _ in received:
                pass
