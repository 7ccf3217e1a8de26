"""Give the requests of a pool to its engines, and move them from one engine to another, until they end.

Lives on the event loop's thread. Which engine computes a request is decided in `ownership.py`, which is best
for it in `routing.py`, which moves are worth their cost in `rebalancing.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from site_engine.core.request import Finish, Moved, Output
from site_engine.engine.process_answer import Answer
from site_engine.engine.process_client import AdmissionReply, Orphans
from site_engine.engine_client import Group
from site_engine.errors import NotServed, Reason
from site_engine.pool import ownership
from site_engine.pool.figures import mean_cost
from site_engine.pool.ownership import Act, Owned, Phase
from site_engine.pool.places import Places
from site_engine.pool.rebalancing import Rebalancer
from site_engine.pool.replica import Replica, served
from site_engine.pool.routing import Work, blocks_of, choose, work_of

log = logging.getLogger(__name__)


class PoolRequests:
    """The requests of a pool that have not ended, each with the engine that computes it."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        clock: Callable[[], float],
        *,
        share_prefixes: bool,
        deliver: Callable[[Sequence[Output]], None],
        on_end: Callable[[], None],
    ) -> None:
        """`deliver` gets the outputs of all engines; `on_end` is called when requests may have ended."""
        self.owned: dict[str, Owned] = {}
        self.places = Places()
        self.limit_tokens = 0  # of a request, the same in every engine
        self._replicas = replicas
        self._clock = clock
        self._share_prefixes = share_prefixes
        self._deliver = deliver
        self._on_end = on_end
        self._rebalancer = Rebalancer()

    def submit(self, group: Group, reply: AdmissionReply) -> None:
        """Submit a group to one engine, all of its requests or none; reply with what it says."""
        first, work = group[0], work_of(group[0])
        for request in group:
            room = self.limit_tokens - len(request.prompt)
            wanted = request.sampling.max_tokens
            if room > 0 and (wanted is None or wanted > room):
                request.sampling = replace(request.sampling, max_tokens=room)
            request.arrived_s = self._clock()
        blocks = blocks_of(first.prompt, ("" if self._share_prefixes else first.tenant, first.chain))
        replica = self._best(work, blocks)
        if replica is None:
            reply(NotServed(Reason.INTERNAL, "all engines of this site are lost"))
            return
        replica.prefixes.add(blocks)
        for request in group:
            self.owned[request.id] = Owned(replica.place)
            replica.given[request.id] = work
        replica.process.submit(group, partial(self._admitted, [each.id for each in group], reply))

    def cancel(self, request_ids: Iterable[str]) -> None:
        """End requests; those that have ended are ignored."""
        by_engine: dict[int, list[str]] = {}
        for request_id in request_ids:
            if request_id in self.owned:
                one = self.owned[request_id] = ownership.cancel(self.owned[request_id])
                by_engine.setdefault(one.engine, []).append(request_id)
        for place, ids in by_engine.items():
            self._replicas[place].process.cancel(ids)

    def release(self, groups: Sequence[Sequence[str]], reply: Callable[[list[bool]], None]) -> None:
        """Release groups whose requests all still wait, in one engine; reply, group by group."""
        decisions = [False] * len(groups)
        by_engine: dict[int, list[int]] = {}
        for at, group in enumerate(groups):
            engines = {self.owned[each].engine for each in group if each in self.owned}
            if len(engines) == 1 and all(each in self.owned for each in group):
                by_engine.setdefault(engines.pop(), []).append(at)
        left = set(by_engine)

        def decided(place: int, found: list[bool]) -> None:
            for at, gone in zip(by_engine[place], found, strict=True):
                decisions[at] = gone
                for request_id in groups[at] if gone else ():
                    self._replicas[self.owned.pop(request_id).engine].left(request_id)
            self._on_end()
            left.remove(place)
            if not left:
                reply(decisions)

        for place, places in by_engine.items():
            its = [groups[at] for at in places]
            self._replicas[place].process.release(its, partial(decided, place))
        if not by_engine:
            reply(decisions)

    def take_outputs(self, outputs: Sequence[Output]) -> None:
        """Deliver outputs of an engine, or of the pool for a request that no engine has."""
        for output in outputs:
            if output.finish is not None and (one := self.owned.pop(output.request_id, None)):
                self._replicas[one.engine].left(output.request_id)
        self._deliver(outputs)
        self._on_end()

    def _admitted(self, request_ids: Sequence[str], reply: AdmissionReply, answer: NotServed | None) -> None:
        for request_id in request_ids:
            one = self.owned[request_id] = ownership.accepted(self.owned[request_id])
            self._replicas[one.engine].admitted.append(request_id)
            self.places.free(request_id)
            self._rebalancer.came_over(request_id, self._clock())
        reply(answer)
        if answer is not None:
            for request_id in request_ids:
                if (refused := self.owned.pop(request_id, None)) is not None:
                    self._replicas[refused.engine].left(request_id)
            self._on_end()

    def _best(self, work: Work, blocks: Sequence[int] = ()) -> Replica | None:
        """Return the engine where a request finishes first, None if all are lost."""
        serving = self._serving()
        able = [each for each in serving if not each.stalled] or serving
        if not able:
            return None
        cached = [each.prefixes.cached_tokens(blocks) for each in able]
        return able[choose(work, cached, [each.now() for each in able], mean_cost(served(able)))]

    # ---- moves

    def where(self, request_id: str) -> int | None:
        """Return the place of the engine that has a request, None if none has or it is on its way."""
        one = self.owned.get(request_id)
        return one.engine if one is not None and one.phase is Phase.HELD else None

    def is_moving(self, request_id: str) -> bool:
        """Return whether a request is on its way from one engine to another."""
        one = self.owned.get(request_id)
        return one is not None and one.phase is not Phase.HELD

    def move(self, request_id: str, to: int) -> bool:
        """Begin to move a request to the engine at a place; return whether it can be moved now."""
        one, target = self.owned.get(request_id), self._replicas[to]
        if one is None or not target.serves:
            return False
        changed, act = ownership.move(one, to)
        if act is not Act.EXPORT:
            return False
        source = self._replicas[one.engine].process
        answer = source.answers.of(request_id)
        if not target.can_take(answer):
            return False
        self.owned[request_id] = changed
        target.process.expect(answer.request)
        place = self.places.give(request_id, target.process.inbox)
        source.export(request_id, place, partial(self._exported, request_id))
        return True

    def rebalance(self) -> None:
        """Begin the moves by which requests finish sooner than where they are, when looking is due."""
        serving = self._serving()
        if len(serving) < 2 or not self._rebalancer.is_due(self._clock()):
            return
        placed = [each for replica in serving for each in replica.placed()]
        rooms = {each.place: each.now().room() for each in serving if not each.stalled}
        for move in self._rebalancer.moves(placed, rooms, mean_cost(served(serving)), self._clock()):
            if self.move(move.request_id, move.to):
                saved = f"saves {move.gain_s:.2f} s of waiting and costs {move.cost_s:.2f} s"
                log.info("%s moves to engine %d, which %s", move.request_id, move.to, saved)
            else:
                self._rebalancer.stayed(move.request_id)

    def take_over(self, orphans: Orphans, *, go_on: bool) -> None:
        """Let other engines go on with the requests of one that is lost, unless they are to end."""
        left = [([answer], self._reply_of(answer)) for answer in orphans.answers] + orphans.unadmitted
        for answers, reply in left:
            self.places.free(*(each.request.id for each in answers))
            to = self._other(answers[0]) if go_on else None
            self._go_on(answers, reply, answers[0].to_move(), partial(ownership.lost, to=to))

    def _exported(self, request_id: str, answer: Answer | None, moved: Moved | None) -> None:
        """Give a request to the engine to which it moves, unless it stays or `answer` has ended."""
        if answer is None or moved is None:
            self.places.free(request_id)
            self._rebalancer.stayed(request_id)
            if answer is not None:
                self.owned[request_id] = ownership.stayed(self.owned[request_id])
            return
        one = self.owned[request_id]
        to = one.to if one.to is not None and self._replicas[one.to].serves else self._other(answer)
        if to is not None and not one.cancelled:
            self._replicas[to].moved_in += 1
            self._replicas[one.engine].left(request_id)
        self._go_on([answer], self._reply_of(answer), moved, partial(ownership.exported, to=to))

    def _reply_of(self, answer: Answer) -> AdmissionReply:
        """Return the reply for an answer that goes on: it has been admitted before."""

        def reply(refusal: NotServed | None) -> None:
            if refusal is not None:
                cancelled = self.owned[answer.request.id].cancelled
                finish = Finish.CANCELLED if cancelled else Finish.FAILED
                self.take_outputs([answer.end(finish, "" if cancelled else refusal.message)])

        return partial(self._admitted, [answer.request.id], reply)

    def _go_on(
        self,
        answers: Sequence[Answer],
        reply: AdmissionReply,
        moved: Moved,
        change: Callable[[Owned], tuple[Owned, Act]],
    ) -> None:
        """Carry out a change of requests that no engine has: give them to another, or end them."""
        for answer in answers:
            self.owned[answer.request.id], act = change(self.owned[answer.request.id])
        if act is not Act.PLACE:
            reply(NotServed(Reason.INTERNAL, "its engine is lost, and no other goes on with it"))
            return
        replica = self._replicas[self.owned[answers[0].request.id].engine]
        for answer in answers:
            replica.take(answer.request.id, work_of(answer.request, len(answer.token_ids)))
        replica.process.place(answers, reply, moved)

    def _other(self, answer: Answer) -> int | None:
        best = self._best(work_of(answer.request, len(answer.token_ids)))
        return None if best is None else best.place

    def _serving(self) -> list[Replica]:
        return [each for each in self._replicas if each.serves]
