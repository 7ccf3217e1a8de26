"""Load and remove variants in all engines of a pool, one change at a time, so that all serve the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from site_engine.core.chain import Chain, Variant
from site_engine.engine.process_client import EngineProcess
from site_engine.errors import VariantRefused

T = TypeVar("T")


class PoolVariants:
    """The variants of a pool. An engine that joins holds `changing` until it has loaded them and serves."""

    def __init__(
        self,
        serving: Callable[[], Sequence[EngineProcess]],
        holding: Callable[[], Sequence[EngineProcess]],
    ) -> None:
        """`serving` returns the processes of the engines that serve, `holding` also those of engines that
        sleep, which have their variants in memory.
        """
        self.on_refused: Callable[[str, VariantRefused], None] = lambda variant_id, refused: None
        self._serving = serving
        self._holding = holding
        self.changing = asyncio.Lock()
        self._wanted: dict[str, Variant] = {}

    async def add(self, variant: Variant) -> Chain | VariantRefused:
        """Load a variant in every engine; a refusal of one that goes on serving takes it from the others."""
        async with self.changing:
            asked = self._serving()
            answers = await asyncio.gather(*(_added(each, variant) for each in asked))
            left = self._serving()
            found = [(each, answer) for each, answer in zip(asked, answers, strict=True) if each in left]
            refusals = [answer for _, answer in found if isinstance(answer, VariantRefused)]
            chains = [answer for _, answer in found if isinstance(answer, Chain)]
            if chains and not refusals:
                self._wanted[variant.id] = variant
                return chains[0]
            await asyncio.gather(
                *(_removed(each, variant.id) for each, answer in found if isinstance(answer, Chain))
            )
            return refusals[0] if refusals else VariantRefused("all engines of this site are lost")

    async def remove(self, variant_id: str) -> VariantRefused | None:
        async with self.changing:
            if variant_id not in self._wanted:
                return None  # an engine that joined has refused it meanwhile
            answers = await self._remove(variant_id)
            return None if None in answers else next(iter(answers), VariantRefused("all engines are lost"))

    async def load(self, process: EngineProcess) -> None:
        """Load all variants in an engine that joins, under `changing`. One that it refuses, as its files have
        changed, is taken from the others, too. Raises VariantRefused if the engine is lost.
        """
        for variant in list(self._wanted.values()):
            answer = await _added(process, variant)
            if isinstance(answer, VariantRefused):
                if process.is_lost:
                    raise answer
                self.on_refused(variant.id, answer)  # first, so that no more requests come for it
                await self._remove(variant.id)

    async def _remove(self, variant_id: str) -> list[VariantRefused | None]:
        del self._wanted[variant_id]
        return await asyncio.gather(*(_removed(each, variant_id) for each in self._holding()))


def _added(process: EngineProcess, variant: Variant) -> asyncio.Future[Chain | VariantRefused]:
    return _asked(lambda reply: process.add_variant(variant, reply))


def _removed(process: EngineProcess, variant_id: str) -> asyncio.Future[VariantRefused | None]:
    return _asked(lambda reply: process.remove_variant(variant_id, reply))


def _asked(ask: Callable[[Callable[[T], None]], None]) -> asyncio.Future[T]:
    answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    ask(answer.set_result)
    return answer
