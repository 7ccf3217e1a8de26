"""The directory over weeks: sites come and go under ever new names; what is gone for good is forgotten."""

from __future__ import annotations

import asyncio

from gateway.domain import Credit, LoadReport, Model, SiteIdentity, SiteState
from gateway.federation.directory import DOWN_KEPT_S, MAX_SITES, Directory
from gateway.federation.server import Federation, FederationSettings
from gateway.routing.decide import MAX_EXCLUSIONS, decide
from gateway.routing.demand import Demand
from gateway.routing.policies import mico
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.publisher import SnapshotPublisher
from gateway.telemetry.snapshot import Banner

HOUR_S = 3_600.0


class Fleet:
    """A directory whose gateway looks after it, on a clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.directory = Directory()
        self._federation = Federation(FederationSettings("g", ("token",)), self.directory, self.clock)

    def clock(self) -> float:
        return self.now_s

    def join(self, name: str, model: str = "m") -> None:
        served = {model: Model(model, "1", 100, 0, "test")}
        self.directory.join(SiteIdentity(name, "boot", "cloud", "r", served, 4, 100), self.now_s)
        self.directory.report(name, LoadReport(seq=1, received_s=self.now_s), Credit())

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self._federation.check_progress()

    async def banner(self) -> Banner:
        publisher = SnapshotPublisher(self.directory, "g", clock=self.clock, unix_time=self.clock)
        return publisher.tick().banner

    def names(self) -> list[str]:
        return [site.name for site in self.directory.sites]


def test_machines_that_left_more_than_a_day_ago_are_forgotten() -> None:
    fleet = Fleet()
    for number in range(200):
        fleet.join(name := f"spot-{number}", model=f"adapter-{number}")
        fleet.wait(HOUR_S)
        fleet.directory.leave(name)
    fleet.join("stays")
    last_day = [f"spot-{number}" for number in range(200 - 24, 200)]
    assert fleet.names() == sorted([*last_day, "stays"])
    assert set(fleet.directory.down_reasons) == set(last_day)
    fleet.wait(DOWN_KEPT_S)
    fleet.directory.report("stays", LoadReport(seq=2, received_s=fleet.now_s), Credit())
    assert set(fleet.directory.models) == {"m"}
    assert asyncio.run(fleet.banner()).level == "calm"
    assert b"spot-" not in Metrics(fleet.directory, lambda: 0).text()


def test_a_site_that_came_back_is_not_forgotten() -> None:
    fleet = Fleet()
    fleet.join("a")
    fleet.directory.leave("a")
    fleet.wait(DOWN_KEPT_S / 2)
    fleet.join("a")
    fleet.wait(DOWN_KEPT_S)
    assert fleet.directory.sites[0].state is SiteState.READY
    fleet.directory.leave("a")
    fleet.wait(1.0)
    assert not fleet.names()


def test_the_sites_that_left_first_are_pushed_out_by_too_many() -> None:
    fleet = Fleet()
    for number in range(MAX_SITES):
        fleet.join(f"site-{number}")
    for name in ("site-7", "site-3"):
        fleet.directory.leave(name)
    fleet.join("another")
    assert len(fleet.names()) == MAX_SITES
    assert "site-7" not in fleet.names() and "site-3" in fleet.names()


def test_sites_that_are_gone_hide_no_reason_of_one_that_is_there() -> None:
    fleet = Fleet()
    for number in range(2 * MAX_EXCLUSIONS):
        fleet.join(f"spot-{number}")
        fleet.directory.leave(f"spot-{number}")
    fleet.wait(HOUR_S)
    fleet.join("here")
    fleet.directory.set_state("here", SiteState.DRAINING)
    demand = Demand("m", prompt_tokens=1, response_tokens=1.0, kv_tokens=2)
    placed = decide(demand, fleet.directory.fleet, mico, now_s=fleet.now_s, turn=0)
    assert "here: draining" in placed.reason
    assert len(placed.excluded) == MAX_EXCLUSIONS
