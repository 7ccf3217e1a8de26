"""`mico pki`: an authority, join secrets that are shown once, and what the database knows of sites."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.security.pki import invitation
from gateway.security.pki.authority import Authority
from gateway.store.store import open_store
from mico.commands.doctor import Verdict, check_certificates
from tests.support.command_line import run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("MICO_DATABASE_URL", "MICO_FOLDER", "MICO_GATEWAY_PKI", "MICO_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_invitation_is_for_one_site_and_goes_to_stdout_alone(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    assert run(capsys, "pki", "invite", "alpha")[0] == 1  # there is no authority yet
    status, out, err = run(capsys, "pki", "init")
    assert (status, out) == (0, "")
    assert "ca-key.pem is secret" in err
    assert run(capsys, "pki", "init")[0] == 1
    status, out, err = run(capsys, "pki", "invite", "alpha", "--days", "2")
    secret = out.strip()
    assert status == 0 and secret not in err
    key = Authority.open(here / "pki").secret(invitation.PURPOSE)
    made = invitation.verify(secret, key, time.time())
    assert (made.site, made.expires_at - made.issued_at) == ("alpha", 2 * 86_400)


@pytest.mark.parametrize("name", ["", "a" * 65, "ü" * 33, "\udcff"])
def test_a_name_that_no_certificate_can_have_is_refused(
    name: str, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    status, _, err = run(capsys, "pki", "init", "--name", name)
    assert status == 1 and "an authority can't be named" in err
    assert not (here / "pki").exists()


def test_an_authority_that_found_no_room_does_not_stand_in_the_way_of_the_next(
    capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    """A key without a certificate was an authority to `init`, and none to `invite`, which named `init`."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for write in ("pathlib.Path.write_bytes", "os.fdopen"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(write, full)
            status, _, err = run(capsys, "pki", "init")
            assert status == 1 and "No space left on device" in err
        assert list((here / "pki").iterdir()) == []
    assert run(capsys, "pki", "init")[0] == 0


def test_what_was_issued_is_listed_and_revoked(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    run(capsys, "db", "upgrade")
    assert run(capsys, "pki", "list", "--json")[1].strip() == "[]"
    now = time.time()
    asyncio.run(issue(here, "alpha", now + 86_400))
    (row,) = json.loads(run(capsys, "pki", "list", "--json")[1])
    assert (row["site"], row["state"], row["serial"]) == ("alpha", "ready", "ab")
    assert " ".join(sorted(row)) == "expires_at issued_at reason renewals revoked_at serial site state"
    for nobody in ("alph", "b*"):
        status, _, err = run(capsys, "pki", "revoke", nobody)
        assert status == 0 and f"no certificate was issued to {nobody}: only its join secrets are void" in err
    status, _, err = run(capsys, "pki", "revoke", "alpha", "--reason", "sold")
    assert status == 0 and "no certificate" not in err
    _, row, _ = json.loads(run(capsys, "pki", "list", "--json")[1])
    assert (row["site"], row["state"], row["reason"], row["serial"]) == ("alpha", "revoked", "sold", None)
    assert row["revoked_at"] is not None


def test_the_doctor_names_sites_that_do_not_renew(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    run(capsys, "db", "upgrade")
    url = f"sqlite:///{here / '.mico' / 'mico.db'}"
    session: Any = SimpleNamespace(
        settings=SimpleNamespace(value=lambda _: url), folder=SimpleNamespace(path=here / ".mico")
    )
    assert list(check_certificates(session)) == []
    asyncio.run(issue(here, "alpha", time.time() + 86_400))
    (finding,) = check_certificates(session)
    assert (finding.verdict, finding.detail) == (Verdict.OK, "1 site has one")
    asyncio.run(issue(here, "beta", time.time() + 3_600))
    (finding,) = check_certificates(session)
    assert (finding.verdict, finding.detail) == (Verdict.WARN, "not renewed: beta")


async def issue(here: Path, site: str, until: float) -> None:
    async with open_store(f"sqlite:///{here / '.mico' / 'mico.db'}", here / ".mico", serving=False) as store:
        await store.certificates.record_issued(
            site, serial="ab", issued_at=time.time(), expires_at=until, renewal=False
        )
