"""One joined site: its live attempts, and the messages to and from it. Synchronous, without a socket.

The number of running attempts is always the size of the map of live attempts, never a separate counter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

import numpy as np

from gateway.decision import Decision
from gateway.domain import Query, SiteIdentity, SiteState
from gateway.failure import AttemptFailure, FailureCause, Resume
from gateway.federation import codec, load_codec
from gateway.federation.answer_limits import AnswerLimits
from gateway.federation.attempt import LiveAttempt
from gateway.federation.counts import Counts
from gateway.federation.directory import Directory
from gateway.federation.model_orders import ModelOrders
from gateway.federation.offloading import Offloading
from gateway.federation.outbox import Outbox
from gateway.federation.pings import Pings
from gateway.federation.progress import GIVE_UP_AFTER_S, AwakeClock, Progress, Silence
from gateway.federation.report_pace import ReportPace
from gateway.federation.stream_pace import StreamPace
from gateway.federation.training import TrainingRuns
from gateway.federation.unreported import UnreportedDemands
from gateway.prices import FREE
from gateway.routing.demand import Demand
from gateway.routing.failover import NATIVE, same_weights
from gateway.routing.filters import allowed_sites
from predictor.forecast import Forecast
from wire import federation_pb2 as pb

log = logging.getLogger(__name__)

ABANDONED = frozenset((pb.Delta.FAILED, pb.Delta.CANCELLED))
READ_WITHIN_S, MIN_READ_BYTES_PER_S = 10.0, 2**17
"""The time in which a site must read a message: READ_WITHIN_S, plus its size at MIN_READ_BYTES_PER_S. After
that, the link is closed.
"""
PREFIXES_INTERVAL_S = 0.5
"""The shortest interval of Prefixes messages that are used; sites send at most one per second."""
FIRST_EJECTION_S, MAX_EJECTION_S = 5.0, 60.0
"""How long an unresponsive site is ejected, doubled at each ejection until the site sends output."""


class _Ejection(NamedTuple):
    began_s: float
    lasts_until_s: float

    def is_over(self, now_s: float, reported_s: float) -> bool:
        return now_s >= self.lasts_until_s and reported_s > self.began_s


class Link:
    """One stream of one site. `outbox` holds the messages still to be sent."""

    def __init__(
        self,
        identity: SiteIdentity,
        directory: Directory,
        offloading: Offloading,
        clock: Callable[[], float],
        *,
        reads_bunches: bool = False,
        paces_reports: bool = False,
        awake: AwakeClock | None = None,
        pace: StreamPace | None = None,
    ) -> None:
        self.identity = identity
        self.silent_since_s = clock()
        self.outbox = Outbox()
        self.reports = ReportPace(self.outbox, is_kept=paces_reports)
        self.counts = Counts(identity.name, self.outbox)
        self.orders = ModelOrders(identity.name, self.outbox)
        self.training = TrainingRuns(self.outbox, clock)
        self.pings = Pings(self.outbox, clock)
        self.closing: str | None = None
        self._live: dict[str, LiveAttempt] = {}
        self._unreported = UnreportedDemands()
        self._reads_bunches = reads_bunches
        self._clock = clock
        self._directory = directory
        self._offloading = offloading
        self._awake = awake or AwakeClock(clock)
        self._pace = pace or StreamPace()
        self._progress = Progress(self._awake.now_s)
        self._writing: tuple[float, int] | None = None  # start and bytes of the message being written
        self._told_s = -inf  # time of the last Prefixes message that was used
        self._ejections = 0  # without output in between
        self._ejected: _Ejection | None = None
        self._handlers = self._handlers_by_kind()

    @property
    def name(self) -> str:
        return self.identity.name

    @property
    def live(self) -> int:
        return len(self._live)

    # -- to the site --

    async def next_message(self) -> bytes:
        """Wait for the next message and return it serialized. The previous message counts as read."""
        self._writing = None
        message = await self.outbox.next(in_bunches=self._reads_bunches)
        self._writing = self._awake.now_s, len(message)
        return message

    def assign(
        self,
        query: Query,
        decision: Decision,
        demand: Demand,
        forecast: Forecast,
        *,
        resume: Resume | None = None,
        moves: int = 0,
        excluded: frozenset[str] = frozenset(),
        prefix_hashes: bytes = b"",
    ) -> LiveAttempt:
        if resume is not None and not (resume.has_output or self._names_tokens(query.model)):
            resume = None  # without a tokenizer the site can't resume from tokens, and starts over
        attempt = LiveAttempt(
            decision=decision,
            demand=demand,
            site=self.identity,
            choices=query.sampling.n,
            moves=moves,
            on_cancel=self._cancel,
            limits=AnswerLimits.of(query, self.identity, demand.prompt_tokens),
            pace=self._pace,
            prices=self._directory.prices_of(self.name) or FREE,
            resumed_tokens=resume.tokens if resume else 0,
            resumable=query.sampling.resumable and self._names_tokens(query.model),
            excluded=excluded,
        )
        if self.closing is not None:
            attempt.fail(AttemptFailure(self.name, FailureCause.LOST, self.closing))
            return attempt
        if self.outbox.full:
            message = f"{self.name} reads too slowly: {self.outbox.bytes >> 20} MiB wait for it"
            attempt.fail(AttemptFailure(self.name, FailureCause.FULL, message))
            return attempt
        deadline_s = max(0.001, query.deadline_s - self._clock())
        assign = codec.assign(query, attempt.id, forecast, resume, deadline_s)
        assign.assign.prefix_hashes = prefix_hashes
        if not self._live:
            self.silent_since_s = self._clock()
        self._live[attempt.id] = attempt
        self._unreported.add(attempt.id, demand)
        self._progress.assigned(attempt.id, self._awake.now_s)
        self._directory.set_credit(self.name, self._unreported.credit)
        self.outbox.put(assign, attempt.id)
        return attempt

    def pending(self) -> list[LiveAttempt]:
        """Return the attempts that the site has accepted but, as far as is known here, not started."""
        return [each for each in self._live.values() if each.prompt_tokens is not None and not each.started]

    def release(self, release_id: str, attempt_ids: list[str]) -> None:
        release = pb.Release(release_id=release_id, attempt_ids=attempt_ids)
        self.outbox.put(pb.GatewayMessage(release=release))

    def forget(self, attempt: LiveAttempt) -> None:
        """Stop waiting for the end of an attempt; later messages about it are dropped."""
        if attempt.id in self._live:
            self._end(
                attempt,
                AttemptFailure(self.name, FailureCause.CANCELLED, "the site did not say that it ended"),
            )

    def move_away(self, reason: str) -> None:
        """Fail the attempts that another site can continue now, so that their queries are decided again.

        The other attempts may finish at this site.
        """
        for attempt in [each for each in self._live.values() if self._can_move(each)]:
            self._give_up(attempt, AttemptFailure(self.name, FailureCause.DRAINING, reason))

    def _cancel(self, attempt: LiveAttempt) -> None:
        """End an attempt whose Assign is not sent yet. For any other, send a Cancel to the site."""
        if attempt.id not in self._live:
            return
        if self.outbox.withdraw(attempt.id):
            self._end(attempt, AttemptFailure(self.name, FailureCause.CANCELLED, "cancelled"))
        else:
            self.outbox.put(pb.GatewayMessage(cancel=pb.Cancel(attempt_id=attempt.id)))

    def _give_up(self, attempt: LiveAttempt, failure: AttemptFailure) -> None:
        """End an attempt without waiting for the site, to which a Cancel is sent."""
        if not self.outbox.withdraw(attempt.id):
            self.outbox.put(pb.GatewayMessage(cancel=pb.Cancel(attempt_id=attempt.id)))
        self._end(attempt, failure)

    def _names_tokens(self, model: str) -> bool:
        """Return whether the site sends token ids for the model, from which another site can resume."""
        served = self.identity.models.get(model)
        return served is None or "resume" in served.features

    # -- from the site --

    def receive(self, message: pb.SiteMessage) -> None:
        """Handle one message, or each message of a bunch. Raises ProtocolError for an invalid message.

        Messages of kinds unknown to this version are counted and ignored. After `close` all messages are
        ignored, as the site may have joined again.
        """
        if self.closing is not None:
            return
        self.silent_since_s = self._clock()
        self._offloading.mark_changed(self.name)
        for each in codec.messages_of(message):
            body = each.WhichOneof("body")
            if body is None:
                self._directory.count_unknown_message(self.name)
            elif body not in self._handlers:
                raise codec.ProtocolError(f"unexpected message {body}")
            else:
                self._handlers[body](getattr(each, body))

    def _handlers_by_kind(self) -> Mapping[str, Callable[[Any], None]]:
        return {
            "accepted": self._accepted,
            "rejected": self._rejected,
            "counted": self.counts.counted,
            "ordered": self.orders.ordered,
            "held": lambda held: self._progress.held(held.attempt_id, self._awake.now_s),
            "training": self.training.reported,
            "step": self._step,
            "models": self._change_models,
            "load": self._report,
            "pong": self._pong,
            "draining": self._draining,
            "bye": self._draining,
            "bid": lambda bid: self._offloading.bid(self.name),
            "released": self._released,
            "prefixes": self._prefixes,
        }

    # -- silence --

    def check_progress(self) -> None:
        """Eject the site if it makes no progress, or restore it. Close the link if the site does not read."""
        if self.closing is not None:
            return
        now_s = self._awake.now_s
        if self._writing is not None:
            unread_s = now_s - self._writing[0] - self._writing[1] / MIN_READ_BYTES_PER_S
            if unread_s > READ_WITHIN_S:
                self._directory.eject(self.name, reason := f"it has read nothing for {unread_s:.0f} s")
                self.close(reason)
                return
        silence = self._progress.silence(
            self._directory.load_of(self.name),
            self._unreported.credit.prompt_tokens,
            now_s,
            native=self.identity.engine == NATIVE,
        )
        if silence is not None:
            self._eject(silence, now_s)
        elif self._ejected is not None and self._ejected.is_over(now_s, self._progress.reported_s):
            log.warning("site %s gets work again", self.name)
            self._ejected = None
            self._directory.restore(self.name)

    def _eject(self, silence: Silence, now_s: float) -> None:
        """Exclude the site from routing, and fail the attempts that another site can take. The others wait,
        up to GIVE_UP_AFTER_S at a native site.

        Do nothing, before GIVE_UP_AFTER_S, if at least half of the other sites of a model are ejected: then
        they are likely overloaded.
        """
        reason = f"{silence.what} for {silence.lasts_s:.1f} s"
        over = silence.lasts_s > GIVE_UP_AFTER_S and self.identity.engine == NATIVE
        if (
            self._ejected is None
            and silence.needs_trial
            and not over
            and self._directory.is_one_of_many(self.identity)
        ):
            return
        if self._ejected is None:
            log.warning("site %s is ejected, %d attempts wait there: %s", self.name, self.live, reason)
            backoff_s = min(MAX_EJECTION_S, FIRST_EJECTION_S * 2.0**self._ejections)
            self._ejected = _Ejection(now_s, now_s + backoff_s if silence.needs_trial else now_s)
            self._ejections += silence.needs_trial
        self._directory.eject(self.name, reason)
        failure = AttemptFailure(self.name, FailureCause.LOST, f"{self.name} hangs: {reason}")
        for attempt in list(self._live.values()):
            if silence.only_unanswered and not self._progress.is_unanswered(attempt.id):
                continue
            if over or self._can_move(attempt):
                self._give_up(attempt, failure)

    def _can_move(self, attempt: LiveAttempt) -> bool:
        """Return whether another site could take the attempt now."""
        if not attempt.movable:
            return False
        demand, fleet = attempt.demand, self._directory.fleet
        if attempt.started:
            demand = replace(demand, needs=demand.needs | attempt.needs_to_resume)
        takers = allowed_sites(demand, fleet, fleet.figures, self._clock(), (self.name, *attempt.excluded))
        return any(
            not attempt.started or same_weights(self.identity, fleet.sites[place].identity, demand.model)
            for place in np.flatnonzero(takers)
        )

    def close(self, reason: str) -> None:
        """Close the link and fail every live attempt, which wakes its reader."""
        self.closing = reason
        failure = AttemptFailure(self.name, FailureCause.LOST, f"{self.name} was lost: {reason}")
        self.counts.close(failure)
        self.orders.close(reason)
        for attempt in list(self._live.values()):
            self._end(attempt, failure)

    def _accepted(self, message: pb.Accepted) -> None:
        if attempt := self._live.get(message.attempt_id):
            self._progress.answered(attempt.id, self._awake.now_s, accepted=True)
            attempt.accept(min(message.prompt_tokens, attempt.limits.prompt_tokens))

    def _rejected(self, message: pb.Rejected) -> None:
        if attempt := self._live.get(message.attempt_id):
            self._progress.answered(attempt.id, self._awake.now_s, accepted=False)
            self._end(attempt, codec.rejected(message, self.name))
        else:
            self.counts.rejected(message)

    def _step(self, message: pb.Step) -> None:
        self._pace.begin()
        for delta in codec.deltas(message):
            self._delta(delta)

    def _delta(self, message: pb.Delta) -> None:
        """Feed a delta to its attempt, or drop the delta if the attempt is no longer live here. Raises
        ProtocolError for a choice that was not requested, or an answer larger than its request allows.
        """
        attempt = self._live.get(message.attempt_id)
        if attempt is None:
            return
        try:
            if message.finish in ABANDONED:
                self._abandoned(attempt, message)
            else:
                attempt.wire_bytes += message.ByteSize()
                if attempt.wire_bytes > attempt.limits.wire_bytes:
                    raise codec.ProtocolError(
                        f"the answer to attempt {attempt.id} has {attempt.wire_bytes} bytes; "
                        f"it can have {attempt.limits.wire_bytes} at most"
                    )
                attempt.feed(codec.delta(message, attempt.limits))
                self._ejections = 0
                self._progress.output(self._awake.now_s)
        except IndexError as exc:
            reason = f"choice {message.index} of attempt {attempt.id} was not asked for"
            raise codec.ProtocolError(reason) from exc
        if message.finish:
            self._choice_ended(attempt, message.index)

    def _choice_ended(self, attempt: LiveAttempt, index: int) -> None:
        """Remove a choice that has ended from the last report, if that covers the attempt."""
        if attempt.started and attempt.id in self._live and attempt.id not in self._unreported:
            self._directory.request_ended(self.name, attempt.freed_by(index))
        if attempt.ended.is_set():
            self._forget(attempt)

    def _abandoned(self, attempt: LiveAttempt, message: pb.Delta) -> None:
        """End an attempt or a choice that the site abandoned. The delta's text is dropped: the less of the
        answer a client has, the more sites can resume it.
        """
        attempt.count(message.index, min(message.completion_tokens, attempt.limits.completion_tokens))
        if message.finish == pb.Delta.FAILED:
            failure = AttemptFailure(
                self.name, FailureCause.FAILED, codec.reason(message.error) or f"{self.name} failed"
            )
            self._give_up(attempt, failure)  # its other choices would continue otherwise
        else:
            attempt.close_choice(
                message.index, AttemptFailure(self.name, FailureCause.CANCELLED, "cancelled")
            )

    def _report(self, message: pb.Load) -> None:
        """Record a load report. As messages are ordered, it covers every attempt accepted before it."""
        report = load_codec.load(message, self._clock(), self.reports.quiet_s)
        self._progress.reported(load_codec.engine_report(message), self._awake.now_s)
        self._unreported.keep(lambda attempt_id: self._live[attempt_id].prompt_tokens is None)
        self._directory.report(self.name, report, self._unreported.credit)
        if message.stalled_s:
            self.check_progress()
        elif report.running < self.identity.slots and report.pending == 0:
            self._offloading.bid(self.name)

    def _change_models(self, message: pb.Models) -> None:
        """Replace the models of the site. Live attempts continue with the identity that they began with."""
        self.identity = replace(self.identity, models=codec.models(message.models))
        self._directory.set_identity(self.identity)

    def _released(self, message: pb.Released) -> None:
        """Fail the attempts that the site has released. Their queries move to the site that bid for them, or
        are decided again if the round is no longer open.
        """
        bidder = self._offloading.close_round(message.release_id)
        for attempt_id in message.attempt_ids:
            if attempt := self._live.get(attempt_id):
                self._end(
                    attempt,
                    AttemptFailure(self.name, FailureCause.RELEASED, "released", preferred_site=bidder),
                )

    def _prefixes(self, message: pb.Prefixes) -> None:
        """Record the prefixes that the site computed for other gateways. Messages within PREFIXES_INTERVAL_S
        are ignored, as they could displace the prefixes of other sites.
        """
        hashes, now_s = codec.prefix_hashes(message), self._clock()
        if now_s >= self._told_s + PREFIXES_INTERVAL_S:
            self._told_s = now_s
            self._directory.prefixes.record_announced(hashes, self.name, now_s)

    def _pong(self, message: pb.Pong) -> None:
        if (trip := self.pings.answered(message, self.silent_since_s)) is not None:
            self._directory.set_rtt(self.name, trip.rtt_s, trip.clock_ahead_s)

    def _draining(self, message: pb.Draining | pb.Bye) -> None:
        log.info("site %s takes no more work: %s", self.name, codec.reason(message.reason))
        self._directory.set_state(self.name, SiteState.DRAINING)

    def _end(self, attempt: LiveAttempt, failure: AttemptFailure) -> None:
        attempt.fail(failure)
        self._forget(attempt)

    def _forget(self, attempt: LiveAttempt) -> None:
        self._live.pop(attempt.id, None)
        self._progress.forget(attempt.id)
        if self._unreported.remove(attempt.id):
            self._directory.set_credit(self.name, self._unreported.credit)
        self._offloading.mark_changed(self.name)
