"""One rank of a tensor group: the sums that its layers need, and the steps that it leads or follows.

The first rank leads: it schedules, samples and serves, and announces the numbers of each step to the others,
which compute the same step over their parts of the layers. The ranks' sums are equal bit by bit, and with
them everything that no rank has a part of alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import distributed


class Follower(Protocol):
    """Takes the messages of its leader, in order: a `multiprocessing.connection.Connection`."""

    def send(self, message: Any) -> None: ...


class TensorGroup:
    """`ranks` are the processes; `followers` are those of the leader, empty in a follower.

    A step that fails on one rank leaves the others in the middle of a sum, which no later step can mend:
    `on_failure` has to end the process, and with it the group.
    """

    def __init__(
        self,
        ranks: distributed.ProcessGroup,
        device: torch.device,
        followers: Sequence[Follower],
        on_failure: Callable[[BaseException], None],
        exchange: Callable[[int], list[int]] = lambda descriptor: [descriptor],
    ) -> None:
        """`exchange` gives a file descriptor to the other ranks and returns those of all."""
        self.exchange = exchange
        self.rank, self.size = ranks.rank(), ranks.size()
        self._ranks = ranks
        self._device = device
        self._followers = followers
        self._on_failure = on_failure
        self._sum, self._least = distributed.AllreduceOptions(), distributed.AllreduceOptions()
        self._least.reduceOp = distributed.ReduceOp.MIN
        self._from_leader = distributed.BroadcastOptions()
        for options in (self._sum, self._least, self._from_leader):
            options.asyncOp = False  # on the current stream, so that a CUDA graph has it

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks in place (all-reduce). All ranks get identical numbers."""
        _finish(self._ranks.allreduce([tensor], self._sum))
        return tensor

    def share(self, tensor: torch.Tensor) -> None:
        """Broadcast the leader's tensor into the followers'."""
        _finish(self._ranks.broadcast([tensor], self._from_leader))

    def least(self, number: int) -> int:
        """Return the minimum of the ranks' numbers, on every rank."""
        found = torch.tensor([number], dtype=torch.int64, device=self._device)
        _finish(self._ranks.allreduce([found], self._least))
        return int(found)

    @contextmanager
    def step(self, message: Any) -> Iterator[None]:
        """Have the followers execute `message` while this rank executes the body of the `with` statement."""
        try:
            for follower in self._followers:
                follower.send(message)
            yield
        except BaseException as failure:
            self._on_failure(failure)
            raise


def _finish(work: Any) -> None:
    """Make the current stream wait for `work`; on a CPU, block this thread."""
    if work is not None:
        work.wait()
