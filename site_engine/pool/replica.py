"""One engine of a pool as the pool sees it: its process, its last report, the requests it was given since."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from functools import reduce

from site_engine.core.load import DeviceFigures, LoadFigures
from site_engine.engine.process_answer import Answer
from site_engine.engine.process_client import EngineProcess
from site_engine.engine_client import Facts, LoadSeen
from site_engine.errors import ConfigError
from site_engine.pool.figures import Totals, join_figures
from site_engine.pool.lending import Borrower, Lender
from site_engine.pool.rebalancing import Placed
from site_engine.pool.routing import Engine, PrefixIndex, Work, work_of

log = logging.getLogger(__name__)

HUNG_AFTER_S = 20.0
"""An engine without progress for so long is given up, if another engine makes some."""
AGAIN_AFTER_S = 0.05
"""Pause before an engine that wakes asks again for the memory of a process that has just ended."""


class Replica:
    """The engine at a place of the pool, through all of its processes."""

    def __init__(self, place: int, process: EngineProcess, device: str) -> None:
        self.place = place
        self.process = process
        self.device = device
        self.turning = asyncio.Lock()  # held while its process starts again or ends
        self.moved_in = 0  # requests that came over from other engines
        self.losses = 0
        self.serves = False
        self.rests = False  # until the pool wakes; its process has ended, or sleeps
        self._sleeps = False
        self._borrower: Borrower | None = None  # while it serves, if it shares memory with other engines
        self._lender: Lender | None = None  # while it sleeps
        self.stalled = False
        self.began_s = 0.0
        self.wait_s = 0.0  # before it is started again
        self.tokens_before = Totals()  # by the processes before this one

    def begin(self, process: EngineProcess, facts: Facts, load: LoadSeen) -> None:
        """Take up a process that can serve; `load` is what an idle engine reports."""
        self.process, self.facts, self.seen = process, facts, load
        self.began_s = load.at_s
        self.given: dict[str, Work] = {}  # to requests that no report counts yet
        self.admitted: list[str] = []  # of these
        self._taken: set[str] = set()  # of these, that other engines had admitted
        self._left = 0  # requests that the report counts, and that have ended or moved since
        self.prefixes = PrefixIndex(facts.kv_tokens)
        self.serves, self.rests, self.stalled = True, False, False
        self._share()

    def reported(self, seen: LoadSeen) -> None:
        """Take a report, which counts every request that was admitted before it."""
        self.seen = seen
        for request_id in self.admitted:
            self.given.pop(request_id, None)
        self._taken.difference_update(self.admitted)
        self.admitted.clear()
        self._left = 0

    def take(self, request_id: str, work: Work) -> None:
        """Note a request that comes from another engine."""
        self.given[request_id] = work
        self._taken.add(request_id)

    def can_take(self, answer: Answer) -> bool:
        """Return whether an answer that another engine has begun can go on here: its variant may be gone."""
        chain = self.process.variants.chains.get(answer.request.chain)
        return not answer.request.chain or (chain is not None and chain.fingerprint == answer.fingerprint)

    def left(self, request_id: str) -> None:
        """Note that a request has ended here, was refused or has moved to another engine."""
        self._left += self.given.pop(request_id, None) is None
        self._taken.discard(request_id)

    @property
    def load(self) -> LoadFigures:
        """Return the last report with the requests that came since, and without those that left."""
        load = self.seen.figures
        came = sum_of(self.given[each] for each in self._taken.union(self.admitted) & self.given.keys())
        return load._replace(
            running=max(0, load.running - self._left),
            pending=max(0, load.pending + came.requests - max(0, self._left - load.running)),
            token_load=load.token_load + came.prompt_tokens + came.response_tokens,
            pending_prompt_tokens=load.pending_prompt_tokens + came.prompt_tokens,
            pending_response_tokens=load.pending_response_tokens + came.response_tokens,
        )

    def end(self) -> None:
        """Note that the process is lost."""
        self.losses += 1
        if self.serves:
            self._close()
            self.share_nothing()
        self._sleeps = False

    async def rest(self) -> None:
        """Let the process sleep, while nothing runs in it; end the process if it cannot sleep."""
        async with self.turning:
            if not self.serves:
                return
            self._close()
            self.rests = self._sleeps = True
            refusal = await self.process.sleeper.sleep()
            if self._borrower is not None and not refusal:
                self._borrower.give_back()
            self.share_nothing()
            if refusal:
                log.info("engine %d ends to sleep: %s", self.place, refusal)
                self._sleeps = False
                self.process.on_lost = None
                await asyncio.to_thread(self.process.stop)
            elif self.process.shares:
                self._lender = Lender(self.process.shares, self.process.sleeper.freed_bytes)

    async def wake(self) -> bool:
        """Wake the process if it sleeps; return whether it serves now, False if it has ended.

        Raises ConfigError where there is no memory for it; it then sleeps on.
        """
        lender = self._lender
        if lender is not None and not await lender.take_back():
            lender.lend()
            raise ConfigError(f"others on {self.device} have not given its memory back in time")
        refusal = await self.process.sleeper.wake() if self._sleeps else ""
        while refusal and self._sleeps and lender is not None and lender.awaits_end:
            await asyncio.sleep(AGAIN_AFTER_S)
            refusal = await self.process.sleeper.wake()
        if refusal and self._sleeps:
            if lender is not None:
                lender.lend()
            raise ConfigError(refusal)
        self.share_nothing()
        if not self._sleeps:  # it has ended, perhaps just now
            return False
        self.tokens_before = self.tokens_before.plus(Totals.of(self.seen.figures), times=-1)
        self.prefixes = PrefixIndex(self.facts.kv_tokens)
        self.serves, self.rests, self._sleeps = True, False, False
        self._share()
        return True

    def _share(self) -> None:
        """Borrow from now on the memory of other engines that sleep on the device."""
        self.share_nothing()
        if self.process.shares:
            self._borrower = Borrower(self.process.shares, self.process.sleeper.hold)

    def share_nothing(self) -> None:
        """End all leases: of memory lent to other engines, and borrowed from them."""
        if self._borrower is not None:
            self._borrower.close()
        if self._lender is not None:
            self._lender.close()
        self._borrower = self._lender = None

    def _close(self) -> None:
        self.serves = False
        self.tokens_before = self.tokens_before.plus(Totals.of(self.seen.figures))

    def now(self) -> Engine:
        load, facts = self.seen.figures, self.facts
        return Engine(load, facts.slots, facts.kv_tokens + load.kv_extra_tokens, sum_of(self.given.values()))

    def figures(self) -> DeviceFigures:
        """Return the engine's part of what the site reports."""
        load, facts = self.load, self.facts
        if not self.serves:
            free = facts.kv_tokens if self.rests else 0
            load = load._replace(
                running=0, pending=0, kv_free_tokens=free, kv_extra_tokens=0, tokens_per_s=0.0
            )
        return DeviceFigures(
            self.device,
            not (self.serves or self.rests),
            facts.slots,
            load.running,
            load.pending,
            facts.kv_tokens + load.kv_extra_tokens,
            load.kv_free_tokens,
            load.tokens_per_s,
            self.moved_in,
            self.losses,
        )

    def placed(self) -> list[Placed]:
        """Return the requests that the process has. As many as its report says wait: those that came last."""
        answers = [each for each in self.process.answers if not each.ended]
        unbegun = [each.request.id for each in answers if not each.token_ids]
        waiting = set(unbegun[max(0, len(unbegun) - self.seen.figures.pending) :])
        placed = []
        for each in answers:
            name, work = each.request.id, work_of(each.request, len(each.token_ids))
            waits = name in waiting
            placed.append(Placed(name, self.place, work.prompt_tokens, work.response_tokens, waits))
        return placed


def sum_of(works: Iterable[Work]) -> Work:
    return reduce(Work.with_one, works, Work())


def introduce(replicas: Sequence[Replica]) -> None:
    """Have each engine open its ways to the others, before a request waits for that."""
    for each in replicas:
        each.process.meet(other.process for other in replicas if other is not each)


def give_up_hung(replicas: Sequence[Replica]) -> float:
    """Return how long all engines have not moved. One that hangs alone is given up."""
    stalls = [each.process.stalled_s() for each in replicas]
    for replica, stalled_s in zip(replicas, stalls, strict=True):
        replica.stalled = stalled_s > 0
        if stalled_s > HUNG_AFTER_S and min(stalls) == 0:
            replica.process.give_up(f"it has not moved for {stalled_s:.0f} s")
    return min(stalls, default=0.0)


def served(replicas: Sequence[Replica]) -> list[LoadFigures]:
    """Return the figures of the engines that serve."""
    return [each.load for each in replicas if each.serves]


def site_figures(each: Sequence[LoadFigures], replicas: Sequence[Replica]) -> LoadFigures:
    """Return what the site reports: the figures of its engines together, and since its start."""
    figures = join_figures(each)
    totals = reduce(Totals.plus, (replica.tokens_before for replica in replicas), Totals.of(figures))
    return figures._replace(
        **totals._asdict(),
        devices=tuple(replica.figures() for replica in replicas),
    )
