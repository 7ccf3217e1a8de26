"""The table of slices that replicas share, as leasing needs it. `gateway/store/slices.py` implements it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from gateway.quotas.limits import Claim, Grant, LimitId


class GrantedSlice(NamedTuple):
    id: LimitId
    claim: Claim
    grant: Grant


class PreviousSlice(NamedTuple):
    """The slice of one limit that an earlier process of the same name held, and its use `age_s` ago."""

    id: LimitId
    amount: int
    used: int
    age_s: float


class LeaseRound(NamedTuple):
    """The result of one round. `limits` is None if the limits are the same as in the round before.

    `restored`: the tables are not as this replica left them, as after a backup was restored. `freed`: it
    was away for so long that its slices were freed, and its use of the month is with that of replicas gone.
    """

    replicas: tuple[str, ...]  # that live, this one among them
    grants: list[GrantedSlice]
    limits: dict[LimitId, int] | None = None
    restored: bool = False
    freed: bool = False


class SlicesUnavailable(Exception):
    """The database does not answer now: try again later."""


class NameTaken(Exception):
    """Another process renews the leases of this replica's name."""


class Slices(Protocol):
    """Every method but `rename` raises SlicesUnavailable when the database does not answer in time."""

    @property
    def lease_s(self) -> float:
        """Return the time without a renewal after which the slices of a replica are free, in seconds."""

    async def join(self) -> list[PreviousSlice]:
        """Take this replica's name, and return the slices that an earlier process held under it."""

    async def leave(self) -> None:
        """Free what is leased and not used."""

    def rename(self) -> None:
        """Go on under another name: another process has this one."""

    async def limits(self) -> dict[LimitId, int]: ...

    async def round(
        self, unsettled: Iterable[LimitId], claim_of: Callable[[LimitId], Claim | None]
    ) -> LeaseRound:
        """Renew the lease, and settle the slices of these limits and of those that others want more of.

        Raises NameTaken.
        """
