"""The load of one device of a site with several devices, as reported by the site. A pure value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """`lost`: the device's engine is restarting and serves nothing. `moved_in` and `losses` count since boot:
    running requests moved here from other devices, and engines lost on this device.
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
