"""Start a lost engine of a pool again, alone: the others serve meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from site_engine.engine.process_client import EngineProcess
from site_engine.engine_client import LoadSeen
from site_engine.errors import ConfigError, VariantRefused
from site_engine.pool.figures import idle_figures
from site_engine.pool.replica import Replica
from site_engine.pool.variants import PoolVariants

log = logging.getLogger(__name__)

SETTLED_AFTER_S = 300.0
"""An engine that has served so long was not lost soon: it is started again at once."""
MAX_WAIT_S = 60.0
"""Between two starts of an engine that is lost soon, or does not start."""


class ReplicaStarter:
    """Starts processes in the places of those that have ended."""

    def __init__(
        self,
        launch: Callable[[int], Coroutine[Any, Any, EngineProcess]],
        variants: PoolVariants,
        clock: Callable[[], float],
        *,
        is_wanted: Callable[[], bool],
        join: Callable[[Replica], None],
    ) -> None:
        """`launch` starts the process of the device at a place, and returns before it has loaded.

        A lost engine is started while `is_wanted`; `join` lets one that has begun serve with the others.
        """
        self.launch = launch
        self.limit_tokens = 0  # of a request; an engine without room for so many cannot join
        self._variants = variants
        self._clock = clock
        self._is_wanted = is_wanted
        self._join = join

    async def restart(self, replica: Replica) -> None:
        """Start a lost engine until it serves: at once, and ever more rarely if it is lost soon again."""
        if self._clock() - replica.began_s > SETTLED_AFTER_S:
            replica.wait_s = 0.0
        while True:
            await asyncio.sleep(replica.wait_s)
            replica.wait_s = min(max(1.0, 2 * replica.wait_s), MAX_WAIT_S)
            async with replica.turning:
                if replica.serves or not self._is_wanted():
                    return
                try:
                    await self.start(replica)
                except (ConfigError, VariantRefused, OSError) as exc:
                    log.error("engine %d does not start again: %s", replica.place, exc)
                else:
                    log.warning("engine %d serves again", replica.place)
                    return

    async def start(self, replica: Replica) -> None:
        """Start an engine and let it serve. Raises ConfigError and VariantRefused."""
        process = await self.launch(replica.place)
        try:
            facts = await process.ready()
            if min(facts.context_tokens, facts.kv_tokens) < self.limit_tokens:
                raise ConfigError(f"it has room for {facts.kv_tokens} tokens of keys and values only")
            async with self._variants.changing:
                await self._variants.load(process)
                replica.begin(process, facts, LoadSeen(idle_figures(facts), self._clock()))
                self._join(replica)
        except BaseException as exc:
            process.kill()
            if not isinstance(exc, ConfigError | VariantRefused):
                process.stop()  # which waits for its end: the event loop may end before that
            raise
