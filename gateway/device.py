"""The load of one device of a site that has several, as the site reports it. A pure value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """`lost`: its engine starts again, and serves nothing. `moved_in` and `losses` count since the boot:
    running requests that came over from other devices, and engines that were lost here.
    """

    device: str
    lost: bool
    slots: int
    running: int
    pending: int
    kv_tokens: int
    kv_free_tokens: int
    tokens_per_s: float
    moved_in: int
    losses: int
