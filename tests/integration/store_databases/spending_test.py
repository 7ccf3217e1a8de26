"""What was spent, from the rows of queries and the hours of own sites, on both databases."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine
from typer.testing import CliRunner

from gateway.domain import SiteIdentity
from gateway.outcome import Outcome
from gateway.prices import NANO_USD
from gateway.store.database import open_engine
from gateway.store.queries import TotalBy
from gateway.store.site_hours import SiteHours
from gateway.store.spending import CloudSpending, spending
from gateway.store.store import Store, open_store
from mico.cli import app
from tests.support.fakes.store import attempt, outcome

HOUR = 470_000 * 3_600.0
MINUTE = int(HOUR // 60)
OWN = SiteIdentity("own", "boot", "on-prem", "here", {}, 8, 1_000, usd_per_hour=3.0)


def paid(query_id: str, site: str, nano_usd: int, *, at: float = HOUR, **more: Any) -> Outcome:
    """An answer of one attempt at a site."""
    done = attempt(query_id, 0)
    done = replace(done, decision=replace(done.decision, site=site), nano_usd=nano_usd)
    bounds = {"cheapest_nano_usd": nano_usd // 2, "dearest_nano_usd": 3 * nano_usd}
    return replace(outcome(query_id, received_at=at, **bounds, **more), attempts=(done,))


async def record(store: Store, *outcomes: tuple[Outcome, str]) -> None:
    for each, cloud in outcomes:
        store.recorder.record(each, cloud)
    assert await store.recorder.flush()


async def hours_of(url: str) -> tuple[AsyncEngine, SiteHours]:
    engine = open_engine(url)
    return engine, SiteHours(engine)


def test_priced_tokens_and_the_idle_remainder_are_the_paid_hours(url: str, tmp_path: Path) -> None:
    """Two replicas see the site; each misses minutes that the other has, and the price changes."""

    async def main() -> None:
        engine, other = await hours_of(url)
        async with open_store(url, tmp_path) as store:
            for minute in range(90):
                dear = with_fields(OWN, usd_per_hour=6.0) if minute >= 60 else OWN
                if minute % 3 != 0:
                    await store.hours.mark(MINUTE + minute, [dear])
                if minute % 3 != 1:
                    await other.mark(MINUTE + minute, [dear])
            (whole,) = await store.hours.paid(HOUR)
            assert whole == ("own", "on-prem", 6 * NANO_USD)
            (later,) = await store.hours.paid(HOUR + 30 * 60)
            assert later.nano_usd == 4.5 * NANO_USD
            (within_a_minute,) = await store.hours.paid(HOUR + 29 * 60 + 40)
            assert within_a_minute.nano_usd == 4.5 * NANO_USD + 3 * NANO_USD // 180
            spent = (paid("q1", "own", 10**9), "on-prem"), (paid("q2", "own", 5 * 10**8), "on-prem")
            await record(store, *spent, (paid("q3", "there", 7), "aws"))
            for by in (TotalBy.SITE, TotalBy.CLOUD):
                found = await spending(store.read, store.hours, [by], HOUR)
                own = next(total for total in found.totals if total.name in ("own", "on-prem"))
                assert own.nano_usd == 1.5 * NANO_USD
                assert found.idle_nano_usd == {own.name: 4.5 * NANO_USD}
                assert own.nano_usd + found.all_idle_nano_usd == whole.nano_usd
        await engine.dispose()

    asyncio.run(main())


def test_an_own_site_that_answered_nothing_is_all_idle(url: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with open_store(url, tmp_path) as store:
            for minute in range(20):
                await store.hours.mark(MINUTE + minute, [OWN])
            found = await spending(store.read, store.hours, [TotalBy.CLOUD], HOUR)
            assert [(total.name, total.queries) for total in found.totals] == [("on-prem", 0)]
            assert found.idle_nano_usd == {"on-prem": NANO_USD}
            assert await CloudSpending(store.read, store.hours, lambda: HOUR + 600).read() == {
                "today": (clouds := [facts(idle_usd=1.0)]),
                "month": clouds,
            }

    asyncio.run(main())


def facts(**more: Any) -> dict[str, Any]:
    none = dict.fromkeys(("usd", "idle_usd", "cheapest_usd", "dearest_usd"), 0.0)
    counts = dict.fromkeys(("queries", "prompt_tokens", "completion_tokens"), 0)
    return {"cloud": "on-prem", "name": "on-prem", **counts, **none, **more}


def test_minutes_that_the_database_missed_are_stored_with_the_next(url: str, tmp_path: Path) -> None:
    async def main() -> None:
        engine, hours = await hours_of(url)
        async with open_store(url, tmp_path):
            async with engine.begin() as connection:
                await connection.execute(text("ALTER TABLE site_hours RENAME TO away"))
            with pytest.raises(SQLAlchemyError):
                await hours.mark(MINUTE, [OWN])
            async with engine.begin() as connection:
                await connection.execute(text("ALTER TABLE away RENAME TO site_hours"))
            await hours.mark(MINUTE + 1, [OWN])
            assert await hours.paid(HOUR) == [("own", "on-prem", 2 * 3 * NANO_USD // 60)]
        await engine.dispose()

    asyncio.run(main())


def test_money_is_summed_by_several_things_at_once(url: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with open_store(url, tmp_path) as store:
            now = store.clock()
            await record(
                store,
                (paid("q1", "s", 400_000_000, at=now, tenant="shop"), "aws"),
                (paid("q2", "s", 200_000_000, at=now, tenant="shop"), "gcp"),
                (paid("q3", "s", 100_000_000, at=now, tenant="shop"), "gcp"),
                (paid("q4", "s", 1, at=now, tenant="lab"), "gcp"),
            )

    asyncio.run(main())
    command = ["--folder", str(tmp_path), "usage", "--money", "--by", "tenant,cloud", "--database", url]
    rows = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    spent = {(row["tenant"], row["cloud"]): row for row in rows}
    assert {key: row["usd"] for key, row in spent.items()} == {
        ("shop", "aws"): 0.4,
        ("shop", "gcp"): 0.3,
        ("lab", "gcp"): 1e-9,
    }
    assert (spent["shop", "gcp"]["cheapest_usd"], spent["shop", "gcp"]["dearest_usd"]) == (0.15, 0.9)
    shown = CliRunner().invoke(app, command).stdout
    assert "shop" in shown and "$0.300000" in shown
