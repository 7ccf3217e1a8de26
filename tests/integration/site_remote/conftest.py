"""The remote engine looks at its server often."""

from __future__ import annotations

import pytest

from site_engine import remote_site


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_EVERY_S", "PROBE_EVERY_S", "LIST_EVERY_S", "REFRESH_EVERY_S", "BACKOFF_FIRST_S"):
        monkeypatch.setattr(remote_site, name, 0.02)
