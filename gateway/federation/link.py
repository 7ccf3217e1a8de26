"""One joined site: its live attempts, and the messages to and from it. Synchronous, without a socket.

The number of running attempts is the size of the map of live attempts, never a separate counter.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

from gateway.decision import Decision
from gateway.domain import AttemptFailure, Credit, FailureCause, Query, Resume, SiteIdentity, SiteState
from gateway.federation import codec
from gateway.federation.attempt import LiveAttempt
from gateway.federation.directory import Directory
from gateway.federation.offloading import Offloading
from gateway.routing.demand import Demand
from predictor.forecast import Forecast
from wire import federation_pb2 as pb

log = logging.getLogger(__name__)

ABANDONED = frozenset((pb.Delta.FAILED, pb.Delta.CANCELLED))


class Link:
    """`outbox` holds the messages still to be sent, bounded by the attempts that admission lets in."""

    def __init__(
        self,
        identity: SiteIdentity,
        directory: Directory,
        offloading: Offloading,
        clock: Callable[[], float],
        *,
        reads_bunches: bool = False,
    ) -> None:
        self.identity = identity
        self.last_heard_s = clock()
        self.outbox: asyncio.Queue[pb.GatewayMessage] = asyncio.Queue()
        self.closing: str | None = None
        self._live: dict[str, LiveAttempt] = {}
        self._uncovered: dict[str, Demand] = {}  # assigned, and not in a report of the site yet
        self._reads_bunches = reads_bunches
        self._directory = directory
        self._offloading = offloading
        self._clock = clock
        self._pings: dict[int, float] = {}
        self._handlers: Mapping[str, Callable[[Any], None]] = {
            "accepted": self._accepted,
            "rejected": self._rejected,
            "step": self._step,
            "load": self._report,
            "pong": self._pong,
            "draining": self._draining,
            "bye": self._draining,
            "bid": lambda bid: offloading.bid(self.name),
            "released": self._released,
        }

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def live(self) -> int:
        return len(self._live)

    # -- to the site --

    async def next_message(self) -> pb.GatewayMessage:
        """Wait for the next message; bunch it with all that waits behind it if the site reads bunches."""
        first = await self.outbox.get()
        return codec.bundle(first, self._waiting()) if self._reads_bunches else first

    def _waiting(self) -> Iterator[pb.GatewayMessage]:
        while not self.outbox.empty():
            yield self.outbox.get_nowait()

    def assign(
        self,
        query: Query,
        decision: Decision,
        demand: Demand,
        forecast: Forecast,
        *,
        resume: Resume | None = None,
        moves: int = 0,
    ) -> LiveAttempt:
        attempt = LiveAttempt(
            decision=decision,
            demand=demand,
            site=self.identity,
            choices=query.sampling.n,
            moves=moves,
            on_cancel=self._cancel,
            resumable=query.sampling.resumable and self._names_tokens(query.model),
        )
        if self.closing is not None:
            attempt.fail(AttemptFailure(self.name, FailureCause.LOST, self.closing))
            return attempt
        deadline_s = max(0.001, query.deadline_s - self._clock())
        message = codec.assign(query, decision.attempt_id, forecast, resume, deadline_s)
        self._live[attempt.id] = attempt
        self._uncovered[attempt.id] = demand
        self._directory.set_credit(self.name, self._credit())
        self.outbox.put_nowait(message)
        return attempt

    def pending(self) -> list[LiveAttempt]:
        """Return the attempts that the site has accepted and, as far as is known here, not started."""
        return [each for each in self._live.values() if each.accepted and not each.started]

    def release(self, release_id: str, attempt_ids: list[str]) -> None:
        release = pb.Release(release_id=release_id, attempt_ids=attempt_ids)
        self.outbox.put_nowait(pb.GatewayMessage(release=release))

    def forget(self, attempt: LiveAttempt) -> None:
        """Stop waiting for the end of an attempt; later messages about it are dropped."""
        if attempt.id in self._live:
            self._end(
                attempt,
                AttemptFailure(self.name, FailureCause.CANCELLED, "the site did not say that it ended"),
            )

    def move_away(self, served_elsewhere: Container[str], reason: str) -> int:
        """Fail the attempts that another site can continue, so that they are decided anew; return their
        number.

        The other attempts may finish here.
        """
        moving = [
            each for each in self._live.values() if each.movable and each.demand.model in served_elsewhere
        ]
        for attempt in moving:
            self._cancel(attempt)
            self._end(attempt, AttemptFailure(self.name, FailureCause.DRAINING, reason))
        return len(moving)

    def ping(self) -> None:
        """Send a ping; the ping of eight rounds ago will not be answered any more."""
        nonce = max(self._pings, default=0) + 1
        self._pings[nonce] = self._clock()
        self._pings.pop(nonce - 8, None)
        self.outbox.put_nowait(pb.GatewayMessage(ping=pb.Ping(nonce=nonce)))

    def _cancel(self, attempt: LiveAttempt) -> None:
        if attempt.id in self._live:
            self.outbox.put_nowait(pb.GatewayMessage(cancel=pb.Cancel(attempt_id=attempt.id)))

    def _names_tokens(self, model: str) -> bool:
        """Return whether the site names its tokens, so that another site can resume from them."""
        served = self.identity.models.get(model)
        return served is None or "resume" in served.features

    # -- from the site --

    def receive(self, message: pb.SiteMessage) -> None:
        """Handle one message, or each of a bunch. Raises ProtocolError if no correct site would have sent
        it.

        A kind of message that only newer sites know is counted and ignored. Does nothing after `close`: the
        site may have joined again, and the message is out of date.
        """
        if self.closing is not None:
            return
        self.last_heard_s = self._clock()
        for each in codec.messages_of(message):
            body = each.WhichOneof("body")
            if body is None:
                self._directory.count_unknown_message(self.name)
            elif body not in self._handlers:
                raise codec.ProtocolError(f"unexpected message {body}")
            else:
                self._handlers[body](getattr(each, body))

    def close(self, reason: str) -> None:
        """Close the link: fail every live attempt, which wakes its reader."""
        self.closing = reason
        for attempt in list(self._live.values()):
            self._end(
                attempt, AttemptFailure(self.name, FailureCause.LOST, f"{self.name} was lost: {reason}")
            )

    def _accepted(self, message: pb.Accepted) -> None:
        if attempt := self._live.get(message.attempt_id):
            attempt.accept(codec.accepted(message))

    def _rejected(self, message: pb.Rejected) -> None:
        if attempt := self._live.get(message.attempt_id):
            self._end(attempt, codec.rejected(message, self.name))

    def _step(self, message: pb.Step) -> None:
        for delta in message.deltas:
            self._delta(delta)

    def _delta(self, message: pb.Delta) -> None:
        """Drop the output of an attempt that is no longer live here: the attempt id is the fence."""
        attempt = self._live.get(message.attempt_id)
        if attempt is None:
            return
        try:
            if message.finish in ABANDONED:
                self._abandoned(attempt, message)
            else:
                attempt.feed(codec.delta(message))
        except IndexError as exc:
            reason = f"choice {message.index} of attempt {attempt.id} was not asked for"
            raise codec.ProtocolError(reason) from exc
        if attempt.ended.is_set():
            self._forget(attempt)

    def _abandoned(self, attempt: LiveAttempt, message: pb.Delta) -> None:
        """Drop the text in the message: the less a client has, the more sites can resume."""
        attempt.count(message.index, message.completion_tokens)
        if message.finish == pb.Delta.FAILED:
            self._cancel(attempt)  # or its other choices would run on
            self._end(
                attempt,
                AttemptFailure(self.name, FailureCause.FAILED, message.error or f"{self.name} failed"),
            )
        else:
            attempt.close_choice(
                message.index, AttemptFailure(self.name, FailureCause.CANCELLED, "cancelled")
            )

    def _report(self, message: pb.Load) -> None:
        """Record a load report. Messages keep their order, so it covers every attempt accepted before it."""
        report = codec.load(message, self._clock())
        live = self._live
        self._uncovered = {k: demand for k, demand in self._uncovered.items() if live[k].accepted is None}
        self._directory.report(self.name, report, self._credit())
        if report.running < self.identity.slots and report.pending == 0:
            self._offloading.bid(self.name)

    def _released(self, message: pb.Released) -> None:
        """Fail the attempts that the site has released: each goes to the site that bid for it, or is decided
        anew.
        """
        bidder = self._offloading.close_round(message.release_id)
        for attempt_id in message.attempt_ids:
            if attempt := self._live.get(attempt_id):
                self._end(
                    attempt,
                    AttemptFailure(self.name, FailureCause.RELEASED, "released", preferred_site=bidder),
                )

    def _pong(self, message: pb.Pong) -> None:
        if sent_s := self._pings.pop(message.nonce, None):
            rtt_s = self.last_heard_s - sent_s
            ahead_s = message.unix_s - (time.time() - rtt_s / 2) if message.unix_s else None
            self._directory.set_rtt(self.name, rtt_s, ahead_s)

    def _draining(self, message: pb.Draining | pb.Bye) -> None:
        log.info("site %s takes no more work: %s", self.name, message.reason)
        self._directory.set_state(self.name, SiteState.DRAINING)

    def _end(self, attempt: LiveAttempt, failure: AttemptFailure) -> None:
        attempt.fail(failure)
        self._forget(attempt)

    def _forget(self, attempt: LiveAttempt) -> None:
        self._live.pop(attempt.id, None)
        if self._uncovered.pop(attempt.id, None) is not None:
            self._directory.set_credit(self.name, self._credit())

    def _credit(self) -> Credit:
        prompt_tokens, response_tokens = 0, 0.0
        for demand in self._uncovered.values():
            prompt_tokens += demand.prompt_tokens
            response_tokens += demand.response_tokens
        return Credit(len(self._uncovered), prompt_tokens, response_tokens)
