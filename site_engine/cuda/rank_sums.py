"""Sum products over the ranks of a tensor group in the kernel of the norm that follows.

Each rank stores its part in the memory of the others, followed by a flag. A separate collective would take
longer than the transfer of a decode step's rows. Steps with more rows than an inbox has use the collective.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from site_engine.cuda.shared_memory import memory_of_ranks
from site_engine.errors import NoMemory
from site_engine.model.tensor_group import TensorGroup

log = logging.getLogger(__name__)

INBOX_ROWS = 512
"""Maximum rows of an inbox. Steps with more rows are summed by NCCL."""


class RankSums:
    """Sum rows of `size` numbers over the ranks of a group, in a norm's kernel or with a collective."""

    def __init__(
        self, group: TensorGroup, rows: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate inboxes for `rows` rows, if any. All ranks must do this at the same time.

        If the devices cannot access each other's memory, all rows are summed with a collective.
        """
        self.group = group
        self._rows = 0
        inbox_bytes = 2 * group.size * rows * size * dtype.itemsize
        self.arguments: dict[str, Any] = {}  # for `exchange_parts_norm`, besides those of a norm
        if not rows:
            return
        self._memory = _memory(group, inbox_bytes + group.size * rows * 4, device)
        if not self._memory:
            return
        self._rows = rows
        own, addresses = self._memory[group.rank], [each.data_ptr() for each in self._memory]
        distances = [address - own.data_ptr() for address in addresses]
        self.arguments = {
            "inbox": own[:inbox_bytes].view(dtype),
            "arrivals": own[inbox_bytes:].view(torch.int32),
            "distances": torch.tensor(distances, dtype=torch.int64, device=device),
            "turns": torch.zeros(rows, dtype=torch.int32, device=device),
            "capacity": rows,
            "RANK": group.rank,
            "RANKS": group.size,
        }

    def exchanges(self, rows: int) -> bool:
        """Return whether the norm's kernel sums steps of `rows` rows."""
        return rows <= self._rows


def _memory(group: TensorGroup, size_bytes: int, device: torch.device) -> list[torch.Tensor]:
    """Return the memory of every rank, or an empty list on all ranks if any rank cannot access another's."""
    memory: list[torch.Tensor] = []
    try:
        memory = memory_of_ranks(group, size_bytes, device)
    except (NoMemory, OSError, RuntimeError) as exc:
        log.warning("rank %d cannot write into the others' memory: %s", group.rank, exc)
    return memory if group.least(len(memory)) else []
