"""An assignment costs what it adds to its site, not what was assigned there before: bursts are thousands."""

from __future__ import annotations

import asyncio

from gateway.decision import Decision
from gateway.domain import Caller, Credit, Query, Sampling, SiteIdentity
from gateway.federation.directory import Directory
from gateway.federation.link import Link
from gateway.federation.offloading import Offloading
from gateway.routing.demand import Demand
from predictor.forecast import Forecast
from wire import federation_pb2 as pb

BURST = 500
READS_OF_ONE = 4
IDENTITY = SiteIdentity("s", "b", "c", "r", {}, slots=4, kv_capacity_tokens=100)
FORECAST = Forecast((0, 10), (1.0,), "test")


class CountedDemand(Demand):
    """A demand that counts how often its answer's length is read."""

    reads = 0

    @property
    def response_tokens(self) -> float:  # type: ignore[override]
        CountedDemand.reads += 1
        return 5.5

    @response_tokens.setter
    def response_tokens(self, _: float) -> None:
        pass


def test_a_burst_at_one_site_sums_each_demand_a_few_times() -> None:
    async def scenario() -> None:
        directory = Directory()
        directory.join(IDENTITY, 0.0)
        link = Link(IDENTITY, directory, Offloading({}, directory, lambda: 0.0), lambda: 0.0)
        CountedDemand.reads = 0
        attempts = []
        for number in range(BURST):
            query = Query(f"q{number}", "m", "hi", Sampling(), Caller("k", "t"), 0.0, 100.0)
            decision = Decision(query.id, f"a{number}", "s", "mico", "test", (), {}, 0.0)
            attempts.append(link.assign(query, decision, CountedDemand("m", 5, 5.5, 10), FORECAST))
        assert directory.sites[0].credit == Credit(BURST, 5.0 * BURST, 5.5 * BURST)
        link.receive(pb.SiteMessage(load=pb.Load(seq=1)))
        for attempt in attempts[1:]:
            attempt.cancel()
        assert directory.sites[0].credit == Credit(1, 5.0, 5.5)
        assert CountedDemand.reads <= READS_OF_ONE * BURST
        attempts[0].cancel()
        assert directory.sites[0].credit == Credit()

    asyncio.run(scenario())
