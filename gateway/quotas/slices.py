"""The interface of the table of slices that replicas share. `gateway/store/slices.py` implements it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from gateway.quotas.limits import Claim, Grant, LimitId


class GrantedSlice(NamedTuple):
    id: LimitId
    claim: Claim
    grant: Grant


class PreviousSlice(NamedTuple):
    """The slice of a limit that an earlier process of this replica held, and its use `age_s` seconds ago."""

    id: LimitId
    amount: int
    used: int
    age_s: float


class LeaseRound(NamedTuple):
    """The result of one round. `limits` is None if they are unchanged since the last round.

    `restored`: the tables differ from what this replica wrote, as after a backup was restored. `freed`: the
    replica was away for so long that its slices were freed, and its use of the month is counted with the
    replicas that are gone.
    """

    replicas: tuple[str, ...]  # the live replicas, including this one
    grants: list[GrantedSlice]
    limits: dict[LimitId, int] | None = None
    restored: bool = False
    freed: bool = False


class SlicesUnavailable(Exception):
    """The database does not answer now. The call may be repeated later."""


class NameTaken(Exception):
    """Another process renews the leases of this replica's name."""


class Slices(Protocol):
    """All async methods raise SlicesUnavailable if the database does not answer in time."""

    @property
    def lease_s(self) -> float:
        """Return the seconds without a renewal after which the slices of a replica are free."""

    async def join(self) -> list[PreviousSlice]:
        """Register this replica, and return the slices that an earlier process of its name held."""

    async def leave(self) -> None:
        """Free the unused part of the leased slices."""

    def rename(self) -> None:
        """Continue under another name, as another process has this one."""

    async def limits(self) -> dict[LimitId, int]: ...

    async def round(
        self, unsettled: Iterable[LimitId], claim_of: Callable[[LimitId], Claim | None]
    ) -> LeaseRound:
        """Renew the lease, and settle the slices of these limits and of limits that others want more of.

        Raises NameTaken.
        """
