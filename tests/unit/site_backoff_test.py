"""How long a site pauses between two tries to reach a gateway."""

from __future__ import annotations

import asyncio
from math import inf, nan
from random import Random
from typing import Any

import pytest

from site_engine import messages as m
from site_engine.errors import LinkLost
from site_engine.federation.link import Link, LinkTimeouts
from site_engine.federation.site import Site
from tests.support.site_fakes import HELLO, FakeClock
from tests.unit.site_site_test import QuietEngine

TIMEOUTS = LinkTimeouts()


def pauses(tries_s: list[float], seed: int = 0) -> list[float]:
    """Return the pauses after tries that fail after these times."""
    clock, left, paused = FakeClock(), iter(tries_s), []

    def fail(address: str) -> Any:
        clock.now += next(left)
        raise OSError("unreachable")

    async def sleep(seconds: float) -> None:
        paused.append(seconds)
        clock.now += seconds

    async def main() -> None:
        link = Link(
            "far:1",
            site=Site(HELLO, QuietEngine(), clock, 1),
            open_channel=fail,
            token="",
            add_peers=lambda _: None,
            clock=clock,
            timeouts=TIMEOUTS,
            random=Random(seed),
            sleep=sleep,
        )
        await link.run(max_failures=len(tries_s))

    asyncio.run(main())
    return paused


def test_a_gateway_that_is_gone_for_long_has_its_sites_back_within_seconds() -> None:
    assert max(pauses([0.0] * 50)) <= TIMEOUTS.backoff_longest_s == 3.0


def test_a_try_that_waited_is_followed_by_the_next() -> None:
    """A gateway that stands still accepts connections: when it goes on, one of every site is waiting."""
    hanging = pauses([TIMEOUTS.hello_s] * 50)
    assert max(hanging) <= TIMEOUTS.backoff_first_s
    assert max(pauses([TIMEOUTS.backoff_longest_s / 2] * 50)) <= TIMEOUTS.backoff_longest_s / 2


def test_sites_that_lost_one_gateway_do_not_come_back_together() -> None:
    last = sorted(pauses([0.0] * 10, seed)[-1] for seed in range(100))
    assert last[0] >= TIMEOUTS.backoff_longest_s / 2
    assert last[-1] - last[0] > 0.45 * TIMEOUTS.backoff_longest_s


def test_a_gateway_that_pings_more_rarely_is_left_after_three_of_its_longer_heartbeats() -> None:
    async def main() -> None:
        clock, slept = FakeClock(), []
        site = Site(HELLO, QuietEngine(), clock, 1)
        connection = site.welcomed(HELLO, m.Welcome("g", (), 1.0, 1.0, ()), lambda: None)

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            clock.now += seconds
            for heartbeat_s in (5.0, 0.0, inf, nan, 1e6):
                connection.paced(m.ReportPace(2, 4, heartbeat_s))

        made = Link(
            "far:1",
            site=site,
            open_channel=lambda _: None,
            token="",
            add_peers=lambda _: None,
            clock=clock,
            timeouts=TIMEOUTS,
            random=Random(0),
            sleep=sleep,
        )
        made._received_s = clock.now - 1.0
        with pytest.raises(LinkLost, match="3 heartbeats of 5 s"):
            await made._watch(connection)
        assert slept == [1.0, 5.0, 5.0]

    asyncio.run(main())
