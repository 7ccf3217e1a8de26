"""A database with every table, copied for each test, and replicas that look at it often."""

from __future__ import annotations

from pathlib import Path

import pytest

from migrations import upgrade
from tests.support.fakes.federation import DEADLINE_S


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("database") / "mico.db"
    upgrade(f"sqlite:///{path}")
    return path.read_bytes()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refresh orders and snapshots often, with long timeouts."""
    monkeypatch.setattr("gateway.admin.order_service.REFRESH_S", 0.05)
    monkeypatch.setattr("gateway.admin.order_service.REFRESH_TIMEOUT_S", DEADLINE_S)
    monkeypatch.setattr("gateway.telemetry.publisher.SNAPSHOT_INTERVAL_S", 0.05)


@pytest.fixture
def url(template: bytes, tmp_path: Path) -> str:
    (tmp_path / "mico.db").write_bytes(template)
    return f"sqlite:///{tmp_path}/mico.db"
