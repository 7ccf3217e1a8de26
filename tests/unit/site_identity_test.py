"""The key that a site makes itself, and the files that an interrupted start leaves behind."""

from __future__ import annotations

import asyncio
import errno
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from site_engine.errors import ConfigError
from site_engine.federation import identity
from site_engine.federation.identity import KEY, Enrolment, Identity


def identity_in(folder: Path) -> Identity:
    return Identity(folder, Enrolment("alpha", "", "", (), None), lambda *_: None)


def test_a_key_that_could_not_be_written_is_made_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(key: Any) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(identity, "_pem", full)
        with pytest.raises(ConfigError, match="No space left"):
            identity_in(tmp_path)
    identity_in(tmp_path)
    kept = (tmp_path / KEY).read_bytes()
    identity_in(tmp_path)
    assert (tmp_path / KEY).read_bytes() == kept
    assert (tmp_path / KEY).stat().st_mode & 0o777 == 0o600


def test_a_site_whose_clock_is_wrong_does_not_ask_for_certificates_without_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each that it gets has ended already, by that clock."""
    pauses: list[float] = []
    issued = asyncio.Event()

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 3:
            issued.set()
            await asyncio.Event().wait()

    async def main() -> None:
        site = identity_in(tmp_path)

        async def renew() -> None:
            site._store(certificate_of(site._key, hours=24))

        monkeypatch.setattr(site, "renew", renew)
        monkeypatch.setattr(site, "_unix_time", lambda: time.time() + 30 * 3600)
        monkeypatch.setattr(asyncio, "sleep", sleep)
        renewing = asyncio.create_task(site.renew_forever())
        await asyncio.wait_for(issued.wait(), 60)
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)

    asyncio.run(main())
    assert pauses == sorted(pauses)
    assert pauses[0] >= 0.5
    assert "clock" in caplog.text


def test_a_site_whose_machine_was_suspended_renews_its_certificate_when_it_wakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timers of the event loop do not count that time: the next would be due hours after its end."""
    monkeypatch.setattr(identity, "LOOK_EVERY_S", 0.001, raising=False)

    async def main() -> None:
        site, suspended_s = identity_in(tmp_path), 0.0
        monkeypatch.setattr(site, "_unix_time", lambda: time.time() + suspended_s)
        site._store(certificate_of(site._key, hours=24))
        renewed = asyncio.Event()

        async def renew() -> None:
            renewed.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(site, "renew", renew)
        renewing = asyncio.create_task(site.renew_forever())
        await asyncio.sleep(0)
        assert not renewed.is_set()
        suspended_s = 30 * 3600.0
        await asyncio.wait_for(renewed.wait(), 60)
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)

    asyncio.run(main())


def test_a_running_site_shows_what_mico_pki_renew_has_stored_beside_it(tmp_path: Path) -> None:
    """Revoked by mistake and invited again, it kept its void certificate until it was restarted."""

    async def main() -> None:
        site = identity_in(tmp_path)
        site._store(certificate_of(site._key, hours=24))
        beside = identity_in(tmp_path)
        beside._store(certificate_of(site._key, hours=24, after_s=5))
        site.credentials()
        assert site._certificate == beside._certificate
        beside._store(certificate_of(site._key, hours=24))
        site.credentials()
        assert site._certificate != beside._certificate, "an older one is not taken up"

    asyncio.run(main())


def certificate_of(key: Any, hours: float, after_s: float = 0.0) -> bytes:
    name, now = x509.Name([]), datetime.now(UTC) + timedelta(seconds=after_s)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now).not_valid_after(now + timedelta(hours=hours))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
