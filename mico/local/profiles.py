"""Profiles of the sites that `mico up` starts: different clouds, prices and speeds (an iteration floor)."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Profile:
    """A site. `iteration_floor_s`, the minimum time of an engine iteration, imitates a slower GPU."""

    name: str
    cloud: str
    region: str
    slots: int
    iteration_floor_s: float
    input_usd_per_mtok: float
    output_usd_per_mtok: float


PROFILES = (
    Profile("aws-us-east-1", "aws", "us-east-1", 8, 0.02, 0.30, 1.20),
    Profile("gcp-europe-west4", "gcp", "europe-west4", 6, 0.03, 0.20, 0.80),
    Profile("on-prem-local", "on-prem", "local", 4, 0.05, 0.05, 0.20),
    Profile("azure-westeurope", "azure", "westeurope", 6, 0.03, 0.25, 1.00),
)


def profiles(count: int) -> list[Profile]:
    """Return the first `count` profiles; beyond the list they repeat under a numbered name."""
    rounds = [(PROFILES[i % len(PROFILES)], i // len(PROFILES)) for i in range(count)]
    return [replace(site, name=f"{site.name}-{lap + 1}") if lap else site for site, lap in rounds]
