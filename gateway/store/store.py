"""Open and close everything that the gateway stores."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.store.certificates import CertificateRegistry
from gateway.store.clock import DatabaseClock
from gateway.store.database import open_engine
from gateway.store.ended_sessions import EndedSessions
from gateway.store.errors import StoreError
from gateway.store.keys import KeyRing
from gateway.store.model_routes import RouteTable
from gateway.store.orders import OrderTable
from gateway.store.pepper import Pepper
from gateway.store.queries import OperatorReads
from gateway.store.quota_table import QuotaTable
from gateway.store.recorder import Recorder
from gateway.store.retention import Retention, RetentionPeriods
from gateway.store.schema import check_schema
from gateway.store.site_hours import SiteHours
from gateway.store.slices import SliceTable
from gateway.store.snapshots import SnapshotTable
from gateway.store.writer import DatabaseWriter


@dataclass(frozen=True, slots=True)
class Store:
    """All parts of the store, over one engine. `clock` is unix time, the same at all replicas."""

    clock: DatabaseClock
    keys: KeyRing
    recorder: Recorder
    read: OperatorReads
    orders: OrderTable
    snapshots: SnapshotTable
    certificates: CertificateRegistry
    quotas: QuotaTable
    slices: SliceTable
    ended_sessions: EndedSessions
    routes: RouteTable
    hours: SiteHours


@asynccontextmanager
async def open_store(
    url: str,
    folder: Path,
    *,
    name: str = "gateway",
    pepper: str | None = None,
    serving: bool = True,
    journal: int = 1,
) -> AsyncIterator[Store]:
    """Open the store. `folder` holds the pepper, unless one is given, and the journals, one for each process.

    Replicas that share a database share one pepper, and each leases quotas under its own `name`.
    `serving=False` is for commands beside a running gateway: no background work and no recording.
    `certificates` and `routes` refresh themselves once their `start` was called by who needs that; like all
    parts they end with the store. The tables must exist (`migrations.upgrade(url)`). Raises StoreError.
    """
    engine, clock = open_engine(url), DatabaseClock()
    certificates, routes = CertificateRegistry(engine), RouteTable(engine, clock=clock)
    with _usable(folder):
        keys = KeyRing(engine, Pepper(pepper) if pepper else Pepper.of_folder(folder), clock=clock)
    recorder = Recorder(_journal(folder, journal), DatabaseWriter(engine))
    retention = Retention(engine, RetentionPeriods(), clock=clock)
    try:
        await check_schema(engine)
        if serving:
            await keys.start()
            with _usable(folder):
                await recorder.start()
            retention.start()
        yield Store(
            clock=clock,
            keys=keys,
            recorder=recorder,
            read=OperatorReads(engine),
            orders=OrderTable(engine),
            snapshots=SnapshotTable(engine),
            certificates=certificates,
            quotas=QuotaTable(engine, clock=clock),
            slices=SliceTable(engine, name, heard=clock.read),
            ended_sessions=EndedSessions(engine, unix_time=clock),
            routes=routes,
            hours=SiteHours(engine),
        )
    finally:
        await routes.close()
        await certificates.close()
        await retention.close()
        await recorder.close()
        await keys.close()
        await engine.dispose()


async def store_unread_journals(url: str, folder: Path, above: int) -> None:
    """Store the records in journals that no process will open: those numbered above `above`, of workers that
    are not started any more. What the database does not take stays for the next time. Raises StoreError.
    """
    left = _journals_above(folder, above)
    if not left:
        return
    engine = open_engine(url)
    try:
        for each in left:
            recorder = Recorder(each, DatabaseWriter(engine))
            with _usable(folder):
                await recorder.start(background=False)
            await recorder.close()
    finally:
        await engine.dispose()


def _journals_above(folder: Path, number: int) -> list[Path]:
    numbered = ((each, each.name.removeprefix("journal-")) for each in folder.glob("journal-*"))
    return [each for each, name in numbered if name.isdecimal() and int(name) > number]


def _journal(folder: Path, number: int) -> Path:
    return folder / ("journal" if number == 1 else f"journal-{number}")


@contextmanager
def _usable(folder: Path) -> Iterator[None]:
    """Translate errors of the disk at the start. Raises StoreError."""
    try:
        yield
    except OSError as exc:
        raise StoreError(f"can't use the data folder {folder}: {exc}") from exc
