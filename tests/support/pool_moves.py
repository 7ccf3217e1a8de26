"""Requests of every kind through a pool, moved from engine to engine and deprived of engines meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from site_engine.config import SiteConfig
from site_engine.native import NativeEngine, engine_settings, prompt_tokenizer
from site_engine.pool.ownership import MAX_LOSSES
from site_engine.pool.pool import EnginePool
from tests.support.engine_models import family, tokenizer
from tests.support.engine_split import WITHIN_S, Case, Result, answer_all
from tests.support.family_process import spawn_family

STEPS = ("source, asked", "target, asked", "target, placed", "source, left")
"""Which engine is killed, and when: as soon as the move is asked for, or once the request has come over."""


@dataclass(slots=True)
class Counts:
    """Moves that were asked for, those that brought the request over, and engines killed at each step."""

    asked: int = 0
    moved: int = 0
    killed: tuple[int, ...] = (0,) * len(STEPS)


@asynccontextmanager
async def pool_of(name: str, count: int, **settings: Any) -> AsyncIterator[tuple[NativeEngine, EnginePool]]:
    """A pool of engines with a tiny model, not started yet, and the client of it."""
    chosen = {"slots": 6, "token_budget": 48, "page_size": 4, "kv_tokens": 240, "max_pending": 64} | settings
    config = SiteConfig(site="alpha", gateways=("127.0.0.1:1",), model=name, **chosen)
    pool = await EnginePool.launch([engine_settings(config)] * count, time.monotonic, spawn_family)
    facts, pool.vocabulary = await pool.ready(), family(name).served.vocabulary
    assert all(each.process.inbox for each in pool._replicas)  # requests move with their keys and values
    post = asyncio.get_running_loop().call_soon_threadsafe
    client = NativeEngine(prompt_tokenizer(tokenizer(), facts, post, allow_special_tokens=False), pool)
    try:
        yield client, pool
    finally:
        await asyncio.to_thread(client.stop)


class Mover:
    """Moves requests that run, and with each `kill_every`th move kills an engine, at each step in turn.

    A kill waits for a later move while a request has lost so many engines that it would fail of the next.
    """

    def __init__(
        self, pool: EnginePool, cases: Sequence[Case], most: int, kill_every: int, seed: int
    ) -> None:
        self.counts = Counts()
        self._pool = pool
        self._ids = [f"{at}/{choice}" for at, case in enumerate(cases) for choice in range(case.choices)]
        self._most = most
        self._kill_every = kill_every
        self._draw = Random(seed)
        self._killed = 0

    async def run(self) -> None:
        while self.counts.asked < self._most:
            await asyncio.sleep(0.001)
            running = [each for each in self._ids if self._pool.requests.where(each) is not None]
            places = list(self._pool.pids)
            if not running or len(places) < 2:
                continue
            request_id = self._draw.choice(running)
            source = self._pool.requests.where(request_id)
            target = self._draw.choice([each for each in places if each != source])
            if source in places and self._pool.requests.move(request_id, target):
                await self._moving(request_id, source, target)

    async def _moving(self, request_id: str, source: int, target: int) -> None:
        """Wait for the end of a move, and kill an engine at a step of it if one is due."""
        self.counts.asked += 1
        kills = sum(self.counts.killed)
        step = kills % len(STEPS) if self.counts.asked // self._kill_every > kills else None
        pids = self._pool.pids
        if step in {0, 1}:
            self._kill(step, source if step == 0 else target, pids)
        while self._pool.requests.is_moving(request_id):  # noqa: ASYNC110 - nothing reports it
            await asyncio.sleep(0.0005)
        self.counts.moved += self._pool.requests.where(request_id) == target
        if step in {2, 3}:
            self._kill(step, target if step == 2 else source, pids)
        while self._killed in self._pool.pids.values():  # noqa: ASYNC110 - its requests aren't elsewhere yet
            await asyncio.sleep(0.0005)

    def _kill(self, step: int, place: int, pids: Mapping[int, int]) -> None:
        if any(each.losses + 1 >= MAX_LOSSES for each in self._pool.requests.owned.values()):
            return
        self._killed = pids[place]
        os.kill(self._killed, signal.SIGKILL)
        killed = self.counts.killed
        self.counts.killed = (*killed[:step], killed[step] + 1, *killed[step + 1 :])


async def moved_answers(
    name: str, cases: Sequence[Case], grammars: Any, *, moves: int, kill_every: int, seed: int
) -> tuple[list[list[Result]], Counts]:
    """Return the results of cases in a pool of three engines, and what was done to them.

    Lost engines start again at once. No case begins while fewer than two are there to move it between.
    """
    with pytest.MonkeyPatch.context() as hurried:
        hurried.setattr("site_engine.pool.replica_starter.SETTLED_AFTER_S", 0.0)
        return await _moved_answers(name, cases, grammars, moves=moves, kill_every=kill_every, seed=seed)


async def _moved_answers(
    name: str, cases: Sequence[Case], grammars: Any, *, moves: int, kill_every: int, seed: int
) -> tuple[list[list[Result]], Counts]:
    async with pool_of(name, 3) as (client, pool):
        mover = Mover(pool, cases, moves, kill_every, seed)
        moving = asyncio.create_task(mover.run())
        try:
            async with asyncio.timeout(WITHIN_S):
                answers = await answer_all(client, cases, grammars, lambda: len(pool.pids) > 1)
                return answers, mover.counts
        finally:
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)
