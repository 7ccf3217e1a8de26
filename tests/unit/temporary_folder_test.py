"""Folders for the time of a process: of one that is killed the next one removes them, of no other."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from site_engine.training.temporary_folder import temporary_folder

PREFIX = "mico-test-"
OTHER = f"""
from site_engine.training.temporary_folder import temporary_folder
with temporary_folder({PREFIX!r}) as folder:
    (folder / "adapter").write_text("weights")
    print(folder, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def _folder_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@contextmanager
def other_process(tmp_path: Path) -> Iterator[Path]:
    """Run a process with a folder of its own, and kill it in the end."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", OTHER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdout is not None
        try:
            yield Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_a_folder_goes_with_its_contents() -> None:
    with temporary_folder(PREFIX) as folder, temporary_folder(PREFIX) as other:
        (other / "adapter").mkdir()
        assert folder.is_dir()
        assert folder != other
    assert not folder.exists()
    assert not other.exists()


def test_a_folder_goes_after_its_process_was_killed_and_not_before(tmp_path: Path) -> None:
    with other_process(tmp_path) as its, temporary_folder(PREFIX):
        assert (its / "adapter").read_text() == "weights"
    assert (its / "adapter").exists()
    with temporary_folder(PREFIX) as folder:
        assert list(tmp_path.iterdir()) == [folder]


def test_what_is_no_folder_of_a_process_stays(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(kept)
    (tmp_path / f"{PREFIX}file").touch()
    before = sorted(tmp_path.iterdir())
    with temporary_folder(PREFIX):
        pass
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_another_process_removes_before_it_is_locked_is_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, made = tempfile.mkdtemp, list[str]()

    def mkdtemp(**given: str) -> str:
        made.append(make(**given))
        if len(made) == 1:
            with temporary_folder(PREFIX):
                assert not Path(made[0]).exists()
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with temporary_folder(PREFIX) as folder:
        assert folder == Path(made[-1])
        assert folder.is_dir()


def test_a_folder_of_another_host_stays_whose_locks_are_not_seen_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where hosts share the folder of all by NFS, each locks folders for itself."""
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, operation: None)
    with temporary_folder(PREFIX) as folder:
        monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
        with temporary_folder(PREFIX):
            assert folder.is_dir()
