"""An engine behind the interface that sites use, with everything that it reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from site_engine.app import event_loop_factory
from site_engine.core.request import Finish, Output, Request, Sampling
from site_engine.engine_client import Listener, LoadSeen
from site_engine.errors import NotServed, VariantRefused

WITHIN_S = 120.0


@dataclass
class HeardEngine:
    """`engine`: a process or a pool of them."""

    engine: Any
    outputs: list[Output] = field(default_factory=list)
    loads: list[LoadSeen] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    refused: list[tuple[str, VariantRefused]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def listener(self) -> Listener:
        def note(found: list, *new: object) -> None:
            found.extend(new)
            self.changed.set()

        return Listener(
            lambda outputs: note(self.outputs, *outputs),
            lambda seen: note(self.loads, seen),
            lambda reason: note(self.broken, reason),
            refused=lambda *refused: note(self.refused, refused),
        )

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not holds():
                self.changed.clear()
                await self.changed.wait()

    async def submit(self, name: str, text: str = "abc", chain: str = "", **rules: Any) -> NotServed | None:
        answer: asyncio.Future[NotServed | None] = asyncio.get_running_loop().create_future()
        request = Request(name, tuple(map(ord, text)), Sampling(**rules), chain=chain)
        self.engine.submit([request], answer.set_result)
        return await asyncio.wait_for(answer, WITHIN_S)

    def text(self, name: str) -> str:
        return "".join(each.text for each in self.outputs if each.request_id == name)

    def finishes(self, name: str) -> list[Finish]:
        return [each.finish for each in self.outputs if each.request_id == name and each.finish]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run on the event loop that sites have."""
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(scenario)
