"""Serve with several engine processes of one host, one for each device, as if they were one engine.

Lives on the event loop's thread. Which engine computes a request is decided in `ownership.py`, which is best
for it in `routing.py`. An engine that is lost is started again, alone: the others go on with its requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from site_engine.core.chain import Chain, Variant
from site_engine.core.load import LoadFigures
from site_engine.core.request import Admission, Finish, Moved, Output
from site_engine.core.startup import Part
from site_engine.engine.process_answer import Answer
from site_engine.engine.process_client import AdmissionReply, EngineProcess, Orphans
from site_engine.engine.process_messages import Described
from site_engine.engine.process_spawn import Spawn, spawn
from site_engine.engine_client import Facts, Group, Listener, LoadSeen
from site_engine.errors import NotServed, Reason, VariantRefused
from site_engine.pool import ownership
from site_engine.pool.figures import idle_figures, join_facts, mean_cost
from site_engine.pool.ownership import Act, Owned, Phase
from site_engine.pool.places import Places
from site_engine.pool.rebalancing import Rebalancer
from site_engine.pool.replica import Replica, give_up_hung, introduce, served, site_figures
from site_engine.pool.replica_starter import ReplicaStarter
from site_engine.pool.routing import Work, blocks_of, choose, work_of
from site_engine.pool.sleeping import PoolSleep
from site_engine.pool.training import PoolTraining
from site_engine.pool.variants import PoolVariants
from site_engine.text.detokenize import NoText, Vocabulary

log = logging.getLogger(__name__)

T = TypeVar("T")


class EnginePool:
    """Engines that are alike, each in a process. Its methods are those of one `EngineProcess`."""

    def __init__(
        self,
        launch: Callable[[int], Coroutine[Any, Any, EngineProcess]],
        processes: Mapping[str, EngineProcess],
        clock: Callable[[], float],
        *,
        share_prefixes: bool = False,
    ) -> None:
        """`launch` starts the process of the device at a place, and returns before it has loaded; `processes`
        are the first ones, by the names of their devices.
        """
        self.vocabulary: Vocabulary = NoText()  # of the answers; to be set before `start`
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._share_prefixes = share_prefixes
        self._replicas = [
            Replica(place, process, device) for place, (device, process) in enumerate(processes.items())
        ]
        self._owned: dict[str, Owned] = {}  # requests that have not ended
        self._limit_tokens = 0  # of a request, the same in every engine
        self._variants = PoolVariants(lambda: [each.process for each in self._serving()])
        self._starter = ReplicaStarter(
            launch, self._variants, clock, is_wanted=lambda: not self.sleeping.asleep, join=self._join
        )
        self.trainer = PoolTraining(lambda: {each.place: each.process.trainer for each in self._serving()})
        self._rebalancer = Rebalancer()
        self._places = Places()
        self._listener: Listener | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.sleeping = PoolSleep(
            self._replicas,
            serves=lambda: bool(self._owned),
            trains=lambda: self.trainer.trains,
            start=self._starter.start,
            restart=lambda replica: self._begin(self._starter.restart(replica)),
            begin=self._begin,
        )

    @classmethod
    async def launch(
        cls,
        settings: Sequence[Mapping[str, Any]],
        clock: Callable[[], float],
        spawn: Spawn = spawn,
        *,
        share_prefixes: bool = False,
    ) -> EnginePool:
        """Start a process for each of the `settings`; all load at the same time: await `ready`."""

        def launch(place: int) -> Coroutine[Any, Any, EngineProcess]:
            return EngineProcess.launch(settings[place], clock, spawn, with_others=len(settings) > 1)

        named = [str(each["device"]) for each in settings]
        devices = named if len({*named}) == len(named) else [f"{name}.{at}" for at, name in enumerate(named)]
        processes = {device: await launch(place) for place, device in enumerate(devices)}
        return cls(launch, processes, clock, share_prefixes=share_prefixes)

    # ---- start and end

    @property
    def start_parts(self) -> list[Part]:
        return self._replicas[0].process.start_parts

    @property
    def pids(self) -> dict[int, int]:
        """The processes of the engines that serve, by place."""
        return {each.place: each.process.pid for each in self._serving()}

    async def described(self) -> Described:
        """Wait until a model is loaded. Raises ConfigError with the reason why not."""
        return await self._replicas[0].process.described()

    async def ready(self) -> Facts:
        """Wait until all engines can serve. Raises ConfigError with the reason of the first that can't."""
        facts = await asyncio.gather(*(each.process.ready() for each in self._replicas))
        for replica, its in zip(self._replicas, facts, strict=True):
            replica.begin(replica.process, its, LoadSeen(idle_figures(its), self._clock()))
        joined = join_facts(facts)
        self._limit_tokens = self._starter.limit_tokens = joined.context_tokens
        return joined

    def start(self, listener: Listener) -> None:
        self._listener = listener
        self.trainer.on_event, self._variants.on_refused = listener.training, listener.refused
        for each in self._replicas:
            self._serve(each)
        introduce(self._serving())

    def stop(self) -> None:
        """End all processes after their current iterations. May be called on any thread but the loop's."""
        self._stopping = True
        self._loop.call_soon_threadsafe(self._cancel_tasks)
        settled = {each.place for each in self._replicas if each.serves or each.rests}
        ends = [each.process.stop if each.place in settled else each.process.kill for each in self._replicas]
        with ThreadPoolExecutor(len(ends)) as threads:
            list(threads.map(lambda end: end(), ends))

    def kill(self) -> None:
        self._stopping = True
        self._cancel_tasks()
        for each in self._replicas:
            each.process.kill()

    def _cancel_tasks(self) -> None:
        for each in self._tasks:
            each.cancel()
        for replica in self._replicas:
            replica.share_nothing()

    def _serve(self, replica: Replica) -> None:
        process = replica.process
        process.vocabulary, process.on_lost = self.vocabulary, partial(self._take_over, replica)
        lost, load = partial(self._lost, replica), partial(self._load, replica)
        process.start(Listener(self._outputs, load, lost, self.trainer.heard))

    def _join(self, replica: Replica) -> None:
        """Let an engine that has started again serve with the others."""
        self._serve(replica)
        introduce(self._serving())

    def _serving(self) -> list[Replica]:
        return [each for each in self._replicas if each.serves]

    # ---- requests

    def submit(self, group: Group, reply: AdmissionReply) -> None:
        """Submit a group to one engine, all of its requests or none; reply with what it says."""
        if self.sleeping.asleep:
            reply(NotServed(Reason.MODEL_UNKNOWN, "the model sleeps here", "model"))
            return
        first, work = group[0], work_of(group[0])
        for request in group:
            room = self._limit_tokens - len(request.prompt)
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
            self._owned[request.id] = Owned(replica.place)
            replica.given[request.id] = work
        replica.process.submit(group, partial(self._admitted, [each.id for each in group], reply))

    def cancel(self, request_ids: Iterable[str]) -> None:
        """End requests; those that have ended are ignored."""
        by_engine: dict[int, list[str]] = {}
        for request_id in request_ids:
            if request_id in self._owned:
                one = self._owned[request_id] = ownership.cancel(self._owned[request_id])
                by_engine.setdefault(one.engine, []).append(request_id)
        for place, ids in by_engine.items():
            self._replicas[place].process.cancel(ids)

    def release(self, groups: Sequence[Sequence[str]], reply: Callable[[list[bool]], None]) -> None:
        """Release groups whose requests all still wait, in one engine; reply, group by group."""
        decisions = [False] * len(groups)
        by_engine: dict[int, list[int]] = {}
        for at, group in enumerate(groups):
            engines = {self._owned[each].engine for each in group if each in self._owned}
            if len(engines) == 1 and all(each in self._owned for each in group):
                by_engine.setdefault(engines.pop(), []).append(at)
        left = set(by_engine)

        def decided(place: int, found: list[bool]) -> None:
            for at, gone in zip(by_engine[place], found, strict=True):
                decisions[at] = gone
                for request_id in groups[at] if gone else ():
                    self._replicas[self._owned.pop(request_id).engine].left(request_id)
            self.sleeping.look()
            left.remove(place)
            if not left:
                reply(decisions)

        for place, places in by_engine.items():
            its = [groups[at] for at in places]
            self._replicas[place].process.release(its, partial(decided, place))
        if not by_engine:
            reply(decisions)

    def where(self, request_id: str) -> int | None:
        """Return the place of the engine that has a request, None if none has or it is on its way."""
        one = self._owned.get(request_id)
        return one.engine if one is not None and one.phase is Phase.HELD else None

    def is_moving(self, request_id: str) -> bool:
        """Return whether a request is on its way from one engine to another."""
        one = self._owned.get(request_id)
        return one is not None and one.phase is not Phase.HELD

    def move(self, request_id: str, to: int) -> bool:
        """Begin to move a request to the engine at a place; return whether it can be moved now."""
        one, target = self._owned.get(request_id), self._replicas[to]
        if one is None or not target.serves:
            return False
        source, (changed, act) = self._replicas[one.engine].process, ownership.move(one, to)
        if act is not Act.EXPORT or not target.can_take(answer := source.answers.of(request_id)):
            return False
        self._owned[request_id] = changed
        target.process.expect(answer.request)
        place = self._places.give(request_id, target.process.inbox)
        source.export(request_id, place, partial(self._exported, request_id))
        return True

    def _rebalance(self, serving: Sequence[Replica]) -> None:
        """Begin the moves by which requests finish sooner than where they are."""
        placed = [each for replica in serving for each in replica.placed()]
        rooms = {each.place: each.now().room() for each in serving if not each.stalled}
        for move in self._rebalancer.moves(placed, rooms, mean_cost(served(serving)), self._clock()):
            if self.move(move.request_id, move.to):
                saved = f"saves {move.gain_s:.2f} s of waiting and costs {move.cost_s:.2f} s"
                log.info("%s moves to engine %d, which %s", move.request_id, move.to, saved)
            else:
                self._rebalancer.stayed(move.request_id)

    def _best(self, work: Work, blocks: Sequence[int] = ()) -> Replica | None:
        """Return the engine where a request finishes first, None if all are lost."""
        serving = self._serving()
        able = [each for each in serving if not each.stalled] or serving
        if not able:
            return None
        cached = [each.prefixes.cached_tokens(blocks) for each in able]
        return able[choose(work, cached, [each.now() for each in able], mean_cost(served(able)))]

    # ---- variants

    def add_variant(self, variant: Variant, reply: Callable[[Chain | VariantRefused], None]) -> None:
        """Load a variant in every engine and publish it; reply with its chain or the refusal of any."""
        self._begin(_replied(self._variants.add(variant), reply))

    def remove_variant(self, variant_id: str, reply: Callable[[VariantRefused | None], None]) -> None:
        """Remove a variant: requests that are here end with it, new ones are refused."""
        self._begin(_replied(self._variants.remove(variant_id), reply))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- load

    def request_load(self) -> None:
        for each in self._serving():
            each.process.request_load()
        self.sleeping.look()
        if self.sleeping.asleep and not self._serving():
            self._report([idle_figures(each.facts) for each in self._replicas], self._clock())

    def stalled_s(self) -> float:
        """Return how long all engines have not moved. One that hangs alone is given up."""
        return give_up_hung(self._serving())

    def _load(self, replica: Replica, seen: LoadSeen) -> None:
        if not replica.serves:
            return
        replica.reported(seen)
        serving = self._serving()
        self._report(served(serving), max(each.seen.at_s for each in serving))
        if len(serving) > 1 and self._rebalancer.is_due(self._clock()):
            self._rebalance(serving)

    def _report(self, each: Sequence[LoadFigures], at_s: float) -> None:
        if self._listener is not None:
            self._listener.load(LoadSeen(site_figures(each, self._replicas), at_s))

    # ---- from the engines

    def _outputs(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if output.finish is not None and (one := self._owned.pop(output.request_id, None)):
                self._replicas[one.engine].left(output.request_id)
        if self._listener is not None:
            self._listener.outputs(outputs)
        self.sleeping.look()

    def _admitted(
        self, request_ids: Sequence[str], reply: AdmissionReply, answer: Admission | NotServed
    ) -> None:
        for request_id in request_ids:
            one = self._owned[request_id] = ownership.accepted(self._owned[request_id])
            self._replicas[one.engine].admitted.append(request_id)
            self._places.free(request_id)
            self._rebalancer.came_over(request_id, self._clock())
        reply(answer)
        if isinstance(answer, NotServed):
            for request_id in request_ids:
                if (refused := self._owned.pop(request_id, None)) is not None:
                    self._replicas[refused.engine].left(request_id)
            self.sleeping.look()

    def _exported(self, request_id: str, answer: Answer | None, moved: Moved | None) -> None:
        """Give a request to the engine to which it moves, unless it stays or `answer` has ended."""
        if answer is None or moved is None:
            self._places.free(request_id)
            self._rebalancer.stayed(request_id)
            if answer is not None:
                self._owned[request_id] = ownership.stayed(self._owned[request_id])
            return
        one = self._owned[request_id]
        to = one.to if one.to is not None and self._replicas[one.to].serves else self._other(answer)
        if to is not None and not one.cancelled:
            self._replicas[to].moved_in += 1
            self._replicas[one.engine].left(request_id)
        self._go_on([answer], self._reply_of(answer), moved, partial(ownership.exported, to=to))

    def _reply_of(self, answer: Answer) -> AdmissionReply:
        """Return the reply for an answer that goes on: it has been admitted before."""

        def reply(admission: Admission | NotServed) -> None:
            if isinstance(admission, NotServed):
                cancelled = self._owned[answer.request.id].cancelled
                finish = Finish.CANCELLED if cancelled else Finish.FAILED
                self._outputs([answer.end(finish, "" if cancelled else admission.message)])

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
            self._owned[answer.request.id], act = change(self._owned[answer.request.id])
        if act is not Act.PLACE:
            reply(NotServed(Reason.INTERNAL, "its engine is lost, and no other goes on with it"))
            return
        replica = self._replicas[self._owned[answers[0].request.id].engine]
        for answer in answers:
            replica.take(answer.request.id, work_of(answer.request, len(answer.token_ids)))
        replica.process.place(answers, reply, moved)

    def _other(self, answer: Answer) -> int | None:
        best = self._best(work_of(answer.request, len(answer.token_ids)))
        return None if best is None else best.place

    # ---- losses

    def _take_over(self, replica: Replica, orphans: Orphans) -> None:
        """Let the other engines go on with the requests of one that is lost."""
        replica.end()
        self.trainer.lost(replica.place)
        left = [([answer], self._reply_of(answer)) for answer in orphans.answers] + orphans.unadmitted
        if not self._stopping:
            log.warning("engine %d is lost; the others go on with its %d requests", replica.place, len(left))
        for answers, reply in left:
            self._places.free(*(each.request.id for each in answers))
            to = None if self._stopping else self._other(answers[0])
            self._go_on(answers, reply, answers[0].to_move(), partial(ownership.lost, to=to))

    def _lost(self, replica: Replica, reason: str) -> None:
        """Start a lost engine again. Without any other, all of the site is, unless it sleeps."""
        if replica.rests:
            return
        replica.serves = False
        if self._serving():
            self._begin(self._starter.restart(replica))
        elif self._listener is not None:
            self._listener.broken(reason)


async def _replied(answer: Coroutine[Any, Any, T], reply: Callable[[T], None]) -> None:
    reply(await answer)
