"""The key that a site makes itself, and the files that an interrupted start leaves behind."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

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
