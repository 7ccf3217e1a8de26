"""The plan of one iteration: which tokens of which requests are computed.

Plain values, made by the scheduler. A runner needs nothing else from the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from site_engine.core.request import Request


class ScheduledChunk(NamedTuple):
    """`length` tokens of a request from index `start` on; `samples` if they yield its next token."""

    request: Request
    start: int
    length: int
    samples: bool


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """The chunks of one iteration: `decodes` of one token each, which all sample, and `prefills`."""

    decodes: list[ScheduledChunk] = field(default_factory=list)
    prefills: list[ScheduledChunk] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)

    @property
    def chunks(self) -> list[ScheduledChunk]:
        return self.decodes + self.prefills

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(entry.length for entry in self.prefills)

    @property
    def kv_tokens(self) -> int:
        """Return the number of tokens whose keys and values attention reads, new ones included."""
        return sum([entry.start + entry.length for entry in self.chunks])

    @property
    def samples(self) -> int:
        return len(self.decodes) + sum([entry.samples for entry in self.prefills])

    def of(self, wanted: Callable[[Request], bool]) -> SchedulePlan:
        """Return a plan with only the chunks of the requests for which `wanted` is true."""
        decodes = [chunk for chunk in self.decodes if wanted(chunk.request)]
        return SchedulePlan(decodes, [chunk for chunk in self.prefills if wanted(chunk.request)])
