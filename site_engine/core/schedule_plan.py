"""The plan of one iteration: which tokens of which requests are computed.

Plain values, made by the scheduler. A runner needs nothing else from the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from site_engine.core.request import Request


class ScheduledChunk(NamedTuple):
    """`length` tokens of a request from index `start` on; `samples` if they yield its next token."""

    request: Request
    start: int
    length: int
    samples: bool


class SchedulePlan:
    """The chunks of one iteration: one token of each request in `decoding`, which all sample, at the indices
    `starts`; and `prefills`.

    Decodes are in columns, since an object for each row takes longer to make than a row takes to plan.
    """

    __slots__ = ("decoding", "prefills", "starts")

    def __init__(
        self, decodes: Sequence[ScheduledChunk] = (), prefills: Sequence[ScheduledChunk] = ()
    ) -> None:
        self.decoding = [chunk.request for chunk in decodes]
        self.starts = [chunk.start for chunk in decodes]
        self.prefills = list(prefills)

    def __bool__(self) -> bool:
        return bool(self.decoding or self.prefills)

    @property
    def decodes(self) -> list[ScheduledChunk]:
        pairs = zip(self.decoding, self.starts, strict=True)
        return [ScheduledChunk(request, start, 1, True) for request, start in pairs]

    @property
    def chunks(self) -> list[ScheduledChunk]:
        return self.decodes + self.prefills

    @property
    def requests(self) -> list[Request]:
        """Return the request of each chunk."""
        return self.decoding + [chunk.request for chunk in self.prefills]

    @property
    def sampled(self) -> list[Request]:
        """Return the requests whose next token is sampled, in the order of the sampled rows."""
        return self.decoding + [chunk.request for chunk in self.prefills if chunk.samples]

    @property
    def tokens(self) -> int:
        return len(self.decoding) + sum([chunk.length for chunk in self.prefills])

    @property
    def kv_tokens(self) -> int:
        """Return the number of tokens whose keys and values attention reads, new ones included."""
        prompts = sum([chunk.start + chunk.length for chunk in self.prefills])
        return sum(self.starts) + len(self.starts) + prompts

    @property
    def samples(self) -> int:
        return len(self.decoding) + sum([chunk.samples for chunk in self.prefills])

    def sort_decodes(self) -> None:
        """Order decodes by the tokens before them."""
        order = sorted(range(len(self.starts)), key=self.starts.__getitem__)
        self.decoding[:] = [self.decoding[at] for at in order]
        self.starts.sort()

    def of(self, wanted: Callable[[Request], bool]) -> SchedulePlan:
        """Return a plan with only the chunks of the requests for which `wanted` is true."""
        decodes = [chunk for chunk in self.decodes if wanted(chunk.request)]
        return SchedulePlan(decodes, [chunk for chunk in self.prefills if wanted(chunk.request)])
