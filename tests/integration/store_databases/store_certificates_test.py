"""The certificate registry on both databases: one row a site, and revocations reach other replicas."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.store import certificates
from gateway.store.certificates import REFRESH_S, REFRESH_TIMEOUT_S, CertificateRegistry, RegisteredSite
from gateway.store.database import database_time, open_engine
from gateway.store.retention import DAY_S
from gateway.store.store import open_store
from tests.support.fakes.federation import until

FUTURE = 4_000_000_000.0
"""Issued by a gateway whose clock is far ahead."""


async def issue(register: CertificateRegistry, site: str, at: float, *, renewal: bool) -> None:
    await register.record_issued(site, serial=f"{at:.0f}", issued_at=at, expires_at=at + 100, renewal=renewal)


def test_a_site_has_one_row_through_renewals_and_revocations(url: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with open_store(url, tmp_path, serving=False) as store:
            register = store.certificates
            assert register.revoked_until("a") == register.expires_at("a") == float("-inf")
            await issue(register, "a", 1000.0, renewal=False)
            await issue(register, "b", 1000.0, renewal=False)
            for number in (1, 2):
                await issue(register, "a", 1000.0 + number, renewal=True)
            first, other = await register.list_sites()
            assert (first.site, first.serial, first.renewals, first.expires_at) == ("a", "1002", 2, 1102.0)
            assert (other.site, other.renewals) == ("b", 0)
            at = await register.revoke("a", "why")
            later = await register.revoke("never seen", "")
            assert register.revoked_until("a") == at
            assert register.revoked_until("never seen") == later >= at
            assert register.expires_at("a") == float("-inf")
            await issue(register, "a", FUTURE, renewal=False)
            row = (await register.list_sites())[0]
            assert (row.renewals, row.revoked_at, row.reason) == (0, at, "why")
            assert register.expires_at("a") == FUTURE + 100
            assert await register.revoke("a", "again") == FUTURE  # whatever was issued is void

    asyncio.run(main())


def test_a_pool_is_revoked_with_each_of_its_machines(url: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with open_store(url, tmp_path, serving=False) as store:
            register = store.certificates
            for site in ("gpu_1", "gpu_2", "GPU_3", "gpux4", "other"):
                await issue(register, site, 1000.0, renewal=False)
            await issue(register, "gpu_2", FUTURE, renewal=True)
            at = await register.revoke("gpu_*", "stolen")
            found = {
                row.site: (row.serial, row.revoked_at, row.reason) for row in await register.list_sites()
            }
            void, good = (None, at, "stolen"), ("1000", None, "")
            assert found == {
                "gpu_*": void,
                "gpu_1": void,
                "gpu_2": (None, FUTURE, "stolen"),
                "GPU_3": good,
                "gpux4": good,
                "other": good,
            }

    asyncio.run(main())


def test_another_replica_learns_of_a_revocation_within_seconds(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert REFRESH_S + REFRESH_TIMEOUT_S <= 5.0  # what is promised
    monkeypatch.setattr("gateway.store.certificates.REFRESH_S", 0.05)

    async def main() -> None:
        async with (
            open_store(url, tmp_path / "one", serving=False) as one,
            open_store(url, tmp_path / "two", serving=False) as two,
        ):
            await two.certificates.start()
            at = await one.certificates.revoke("a", "")
            await until(lambda: two.certificates.revoked_until("a") == at, "the other replica knows")

    asyncio.run(main())


def test_a_certificate_that_ended_long_ago_is_not_read_again_but_its_name_stays_taken(url: str) -> None:
    """Each machine of a pool has a name of its own; all replicas read what counts all the time."""

    async def main() -> None:
        now = 20 * DAY_S
        engine = open_engine(url)
        register = CertificateRegistry(engine, clock=lambda: now)
        for day in range(20):
            await issue(register, f"pool-{day}", (day + 1) * DAY_S, renewal=False)
        await register.revoke("pool-3", "stolen")
        for each in (register, CertificateRegistry(engine, clock=lambda: now)):
            await each.refresh()
            assert set(each._known) == {"pool-3", "pool-18", "pool-19"}
            assert all(each.has(f"pool-{day}") for day in range(20))
            assert not each.has("pool-20")
            assert each.revoked_until("pool-3") > 0
            assert each.expires_at("pool-18") > float("-inf") == each.expires_at("pool-17")
        assert len(await register.list_sites()) == 20
        await engine.dispose()

    asyncio.run(main())


class CountingRegistry(CertificateRegistry):
    """Counts the rows that were read."""

    rows = 0

    async def _read(self, rows: Select[Any]) -> list[RegisteredSite]:
        found = await super()._read(rows)
        self.rows += len(found)
        return found


def test_a_revocation_of_long_ago_is_not_read_again_and_holds(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that was revoked leaves a row for each machine that it ever had."""
    passed_s = 0.0

    async def shown(connection: AsyncConnection) -> float:
        return await database_time(connection) + passed_s

    async def main() -> None:
        nonlocal passed_s
        monkeypatch.setattr(certificates, "database_time", shown)
        monkeypatch.setattr(certificates, "ROWS_AT_ONCE", 7)
        engine = open_engine(url)
        replicas = CountingRegistry(engine), CountingRegistry(engine)
        for number in range(20):
            await issue(replicas[0], f"pool-{number}", 1000.0, renewal=False)
        at = await replicas[0].revoke("pool-*", "stolen")
        for now_s, rows in ((0.0, 21), (3 * DAY_S, 21), (3 * DAY_S, 0)):
            passed_s = now_s
            for each in replicas:  # after days without a refresh all is read again
                each.rows = 0
                await each.refresh()
                assert each.rows == rows
                assert all(each.revoked_until(f"pool-{number}") == at for number in range(20))
        again_at = await replicas[0].revoke("pool-7", "again")
        replicas[1].rows = 0
        await replicas[1].refresh()
        assert (replicas[1].rows, replicas[1].revoked_until("pool-7")) == (1, again_at)
        passed_s = 0.0  # the clock of the database is set back
        back_at = await replicas[0].revoke("pool-8", "again")
        await replicas[1].refresh()
        assert at <= back_at < again_at
        assert (replicas[1].revoked_until("pool-8"), replicas[1].revoked_until("pool-7")) == (
            back_at,
            again_at,
        )
        await engine.dispose()

    asyncio.run(main())


def test_a_name_that_came_and_went_while_the_database_was_away_is_taken(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000_000_000.0

    async def shown(_: AsyncConnection) -> float:
        return now

    async def main() -> None:
        nonlocal now
        monkeypatch.setattr(certificates, "database_time", shown)
        engine = open_engine(url)
        here, away = (CertificateRegistry(engine, clock=lambda: now) for _ in range(2))
        await issue(here, "early", now, renewal=False)
        await away.refresh()
        await issue(here, "late", now, renewal=False)
        now += 3 * DAY_S
        await away.refresh()
        assert away.has("early")
        assert away.has("late")
        await engine.dispose()

    asyncio.run(main())


class SlowRegistry(CertificateRegistry):
    """Keeps the first page that it reads until `goes_on`."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(engine)
        self.has_read, self.goes_on = asyncio.Event(), asyncio.Event()

    async def _read(self, rows: Select[Any]) -> list[RegisteredSite]:
        found = await super()._read(rows)
        if not self.has_read.is_set():
            self.has_read.set()
            await self.goes_on.wait()
        return found


def test_a_refresh_that_read_before_a_revocation_does_not_undo_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "REFRESH_TIMEOUT_S", 60.0)

    async def main() -> None:
        engine = open_engine(url)
        await issue(CertificateRegistry(engine), "a", FUTURE, renewal=False)
        register = SlowRegistry(engine)
        slow = asyncio.create_task(register.refresh())
        await register.has_read.wait()
        at = await register.revoke("a", "stolen")
        register.goes_on.set()
        await slow
        assert register.revoked_until("a") == at
        await engine.dispose()

    asyncio.run(main())
