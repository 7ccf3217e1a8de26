"""Serve with several engine processes of one host, one for each device, as if they were one engine.

Lives on the event loop's thread. What becomes of requests is in `requests.py`. An engine that is lost is
started again by `replica_starter.py`, alone: the others go on with its requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from site_engine.core.chain import Chain, Variant
from site_engine.core.load import LoadFigures
from site_engine.core.request import Output
from site_engine.core.startup import Part
from site_engine.engine.process_client import AdmissionReply, EngineProcess, Orphans
from site_engine.engine.process_messages import Described
from site_engine.engine.process_spawn import Spawn, spawn
from site_engine.engine_client import Facts, Group, Listener, LoadSeen
from site_engine.errors import NotServed, Reason, VariantRefused
from site_engine.pool.figures import idle_figures, join_facts
from site_engine.pool.replica import Replica, give_up_hung, introduce, served, site_figures
from site_engine.pool.replica_starter import ReplicaStarter
from site_engine.pool.requests import PoolRequests
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
        self._replicas = [
            Replica(place, process, device) for place, (device, process) in enumerate(processes.items())
        ]
        self._variants = PoolVariants(
            serving=lambda: [each.process for each in self._serving()],
            holding=lambda: [each.process for each in self._replicas if each.serves or each.rests],
        )
        self._starter = ReplicaStarter(
            launch, self._variants, clock, is_wanted=lambda: not self.sleeping.asleep, join=self._join
        )
        self.trainer = PoolTraining(
            lambda: {each.place: each.process.trainer for each in self._serving()},
            sleeps=lambda: self.sleeping.asleep,
        )
        self._listener: Listener | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.sleeping = PoolSleep(
            self._replicas,
            serves=lambda: bool(self.requests.owned),
            trains=lambda: self.trainer.trains,
            start=self._starter.start,
            restart=lambda replica: self._begin(self._starter.restart(replica)),
            begin=self._begin,
        )
        self.requests = PoolRequests(
            self._replicas,
            clock,
            share_prefixes=share_prefixes,
            deliver=self._deliver,
            on_end=self.sleeping.look,
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
        self.requests.limit_tokens = self._starter.limit_tokens = joined.context_tokens
        return joined

    def start(self, listener: Listener) -> None:
        self._listener = listener
        self.trainer.on_event = listener.training
        self._variants.on_refused = listener.refused
        for each in self._replicas:
            self._serve(each)
        introduce(self._serving())

    def stop(self) -> None:
        """End all processes after their current iterations. May be called on any thread but the loop's."""
        self._stopping = True
        ends: Future[list[Callable[[], None]]] = Future()
        self._loop.call_soon_threadsafe(lambda: ends.set_result(self._ends()))
        with ThreadPoolExecutor(len(self._replicas)) as threads:
            list(threads.map(lambda end: end(), ends.result()))

    def _ends(self) -> list[Callable[[], None]]:
        """Start no process any more; return what ends each of those that there are."""
        self._cancel_tasks()
        return [
            each.process.stop if each.serves or each.rests else each.process.kill for each in self._replicas
        ]

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
        process.vocabulary = self.vocabulary
        process.on_lost = partial(self._take_over, replica)
        load, lost = partial(self._load, replica), partial(self._lost, replica)
        process.start(Listener(self.requests.take_outputs, load, lost, self.trainer.heard))

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
        else:
            self.requests.submit(group, reply)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """End requests; those that have ended are ignored."""
        self.requests.cancel(request_ids)

    def release(self, groups: Sequence[Sequence[str]], reply: Callable[[list[bool]], None]) -> None:
        """Release groups whose requests all still wait, in one engine; reply, group by group."""
        self.requests.release(groups, reply)

    def _deliver(self, outputs: Sequence[Output]) -> None:
        if self._listener is not None:
            self._listener.outputs(outputs)

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
        self.requests.rebalance()

    def _report(self, each: Sequence[LoadFigures], at_s: float) -> None:
        if self._listener is not None:
            self._listener.load(LoadSeen(site_figures(each, self._replicas), at_s))

    # ---- losses

    def _take_over(self, replica: Replica, orphans: Orphans) -> None:
        """Let the other engines go on with the requests of one that is lost."""
        replica.end()
        self.trainer.lost(replica.place)
        if not self._stopping:
            orphaned = len(orphans.answers) + len(orphans.unadmitted)
            log.warning("engine %d is lost; the others go on with its %d requests", replica.place, orphaned)
        self.requests.take_over(orphans, go_on=not self._stopping)

    def _lost(self, replica: Replica, reason: str) -> None:
        """Start a lost engine again. Without any other, all of the site is, unless the pool sleeps or still
        wakes: it starts what is missing when it wakes.
        """
        if replica.rests:
            return
        replica.serves = False
        if self._stopping:
            return
        if self._serving():
            self._begin(self._starter.restart(replica))
        elif self._listener is not None and not self.sleeping.asleep:
            self._listener.broken(reason)


async def _replied(answer: Coroutine[Any, Any, T], reply: Callable[[T], None]) -> None:
    reply(await answer)
