"""Periodic work of a gateway continues after an unforeseen error, and logs it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from gateway.batches import expiry
from gateway.query.forecasting import ForecastService
from gateway.store import certificates, retention
from gateway.store.certificates import CertificateRegistry
from gateway.store.retention import Retention, RetentionPeriods
from predictor.histogram import HistogramForecaster
from predictor.hot_reload import HotReloadForecaster

ENGINE = create_async_engine("sqlite+aiosqlite://")


class Once:
    """A call that fails once and then works; `again` is set at the call after the failure."""

    def __init__(self, foreseen: int = 0) -> None:
        self.left = foreseen
        self.failed = False
        self.again = asyncio.Event()

    def call(self) -> None:
        if self.left > 0:
            self.left -= 1
        elif not self.failed:
            self.failed = True
            raise KeyError("nobody thought of this")
        else:
            self.again.set()


async def certificates_are_looked_at(once: Once) -> None:
    class Register(CertificateRegistry):
        async def refresh(self) -> None:
            once.call()

    once.left = 1  # the first look is at the start, where an error is the caller's
    register = Register(ENGINE)
    await register.start()
    await once.again.wait()
    await register.close()


async def old_rows_are_removed(once: Once) -> None:
    class Sweeping(Retention):
        async def sweep(self) -> int:
            once.call()
            return 0

    sweeping = Sweeping(ENGINE, RetentionPeriods(), clock=lambda: 0.0)
    sweeping.start()
    await once.again.wait()
    await sweeping.close()


async def old_batches_are_removed(once: Once) -> None:
    class Empty:
        async def find_expired(self, *_: object) -> list[str]:
            once.call()
            return []

        async def find_with_leftover_lines(self, limit: int) -> list[str]:
            return []

    nothing: Any = Empty()
    sweeping = asyncio.create_task(expiry.expire_for_ever(nothing, nothing, 1.0))
    await once.again.wait()
    sweeping.cancel()
    await asyncio.gather(sweeping, return_exceptions=True)


async def a_new_artifact_is_looked_for(once: Once) -> None:
    class Looking(HotReloadForecaster):
        def __init__(self) -> None:
            """Without an artifact."""

        def refresh(self) -> bool:
            loop.call_soon_threadsafe(ended.set)
            once.call()
            return False

    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    forecasts = ForecastService(Looking(), HistogramForecaster(), reload_every_s=0.001)
    forecasts.start()
    while not once.again.is_set():
        await ended.wait()
        ended.clear()
    await forecasts.close()


@pytest.mark.parametrize(
    "round_of",
    [
        certificates_are_looked_at,
        old_rows_are_removed,
        old_batches_are_removed,
        a_new_artifact_is_looked_for,
    ],
)
def test_a_round_follows_one_that_went_wrong(
    round_of: Callable[[Once], Coroutine[Any, Any, None]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(certificates, "REFRESH_S", 0.0)
    monkeypatch.setattr(retention, "SWEEP_INTERVAL_S", 0.0)
    monkeypatch.setattr(retention, "FIRST_SWEEP_S", 0.0)
    monkeypatch.setattr(expiry, "INTERVAL_S", 0.0)

    async def main() -> None:
        async with asyncio.timeout(60):
            await round_of(Once())

    with caplog.at_level(logging.ERROR, "gateway"):
        asyncio.run(main())
    (line,) = [each for each in caplog.records if each.name.startswith("gateway")]
    assert "unforeseen" in line.message
    assert line.exc_info is not None and line.exc_info[0] is KeyError
