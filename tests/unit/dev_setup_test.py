"""`./dev` installs what a command needs, from where pip is told to, and leaves nothing half made."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
UV = """#!/bin/sh
echo "$@" >> "$UV_CALLS"
case "$*" in *--dry-run*) exit ${UV_PROBE:-0};; esac
exit ${UV_STATUS:-0}
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `dev`, what it reads, and a `uv` on the PATH that notes its calls and does nothing."""
    for name in ("dev", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/uv").write_text(UV)
    (tmp_path / "bin/uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("UV_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def dev(checkout: Path) -> SimpleNamespace:
    """Load the script. A virtual environment is a folder with a link to this Python, made at once."""
    names = runpy.run_path(str(checkout / "dev"), run_name="dev")
    loaded = names["setup"].__globals__

    def make_venv() -> None:
        loaded["BIN"].mkdir(parents=True)
        loaded["PYTHON"].symlink_to(sys.executable)
        (loaded["VENV"] / "pyvenv.cfg").write_text("version = 3")

    loaded["make_venv"] = make_venv
    return SimpleNamespace(names=loaded, **{name: loaded[name] for name in names if name.isidentifier()})


def calls(checkout: Path) -> list[str]:
    """Return the installations, without looks at what an index has."""
    noted = (checkout / "calls").read_text().splitlines() if (checkout / "calls").exists() else []
    return [line for line in noted if "--dry-run" not in line]


def test_a_federation_is_started_without_what_tests_need_and_they_add_the_rest(checkout: Path) -> None:
    loaded = dev(checkout)
    loaded.setup(loaded.FEDERATION)
    loaded.setup(loaded.FEDERATION)
    loaded.setup(loaded.EVERYTHING)
    loaded.setup(loaded.FEDERATION)
    assert [line.rpartition("--editable ")[2] for line in calls(checkout)] == [
        ".[engine,postgres]",
        ".[aws,dev,engine,otel,plots,postgres,train]",
    ]


def test_a_changed_lock_is_installed_again_with_all_that_was_there(checkout: Path) -> None:
    loaded = dev(checkout)
    loaded.setup(loaded.EVERYTHING)
    with (checkout / "constraints.txt").open("a") as lock:
        lock.write("# changed\n")
    loaded.setup(loaded.FEDERATION)
    assert len(calls(checkout)) == 2
    assert calls(checkout)[0] == calls(checkout)[1]


def test_the_extras_are_those_of_the_package() -> None:
    import tomllib

    names = runpy.run_path(str(ROOT / "dev"), run_name="dev")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]) == names["EVERYTHING"] > names["FEDERATION"]


def test_a_failed_installation_leaves_no_environment_and_says_why(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    loaded = dev(checkout)
    monkeypatch.setenv("UV_STATUS", "2")
    with pytest.raises(SystemExit):
        loaded.setup(loaded.FEDERATION)
    assert not (checkout / ".venv").exists()
    assert "error: the packages could not be installed" in capfd.readouterr().err
    loaded.names["FULL_BYTES"] = 2**80
    with pytest.raises(SystemExit):
        loaded.setup(loaded.FEDERATION)
    assert "cause: no space is left on the disk" in capfd.readouterr().err


def test_an_environment_that_was_there_stays_and_is_mended_next_time(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = dev(checkout)
    loaded.setup(loaded.FEDERATION)
    monkeypatch.setenv("UV_STATUS", "2")
    with pytest.raises(SystemExit):
        loaded.setup(loaded.EVERYTHING)
    assert loaded.PYTHON.exists()
    monkeypatch.delenv("UV_STATUS")
    loaded.setup(loaded.FEDERATION)
    assert len(calls(checkout)) == 3


@pytest.mark.slow
def test_without_a_network_setup_ends_with_a_reason(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole script, with neither uv nor an index in reach."""
    (checkout / "bin/uv").unlink()
    monkeypatch.setenv("PATH", os.pathsep.join(["/usr/bin", "/bin"]))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    done = subprocess.run(
        [sys.executable, checkout / "dev", "up"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 1
    assert "error: uv could not be fetched" in done.stderr
    assert "tip: check the network" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere there is one build of torch")
@pytest.mark.parametrize(("probe", "chosen"), [("0", "torch=={}+cpu"), ("1", "--torch-backend cpu")])
def test_without_a_gpu_the_small_build_of_torch_is_installed(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, probe: str, chosen: str
) -> None:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has a GPU")
    pin = next(line for line in (ROOT / "constraints.txt").read_text().split() if line.startswith("torch=="))
    loaded = dev(checkout)
    monkeypatch.setenv("UV_PROBE", probe)
    loaded.setup(loaded.FEDERATION)
    assert f" {chosen.format(pin.removeprefix('torch=='))} " in calls(checkout)[0]


def test_packages_come_from_the_indexes_that_pip_is_told_of(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "pip.conf").write_text(
        "[global]\nindex-url = https://one.example/simple\nextra-index-url = https://two.example/simple\n"
        "  https://three.example/simple\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(checkout / "pip.conf"))
    monkeypatch.setenv("PIP_INDEX_URL", "https://four.example/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    options: list[Any] = dev(checkout).pip_sources()
    assert options == [
        *("--default-index", "https://four.example/simple"),
        *("--index", "https://two.example/simple", "--index", "https://three.example/simple"),
        *("--find-links", "/wheels"),
        *("--index-strategy", "unsafe-best-match"),
    ]


def test_without_such_indexes_uv_decides_itself(checkout: Path) -> None:
    assert dev(checkout).pip_sources() == []


def test_a_benchmark_that_is_not_there_is_told(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "bench/studies").mkdir(parents=True)
    assert dev(checkout).bench(["nope"]) == dev(checkout).bench(["studies.nope"]) == 2
    assert "error: there is no benchmark nope\ntip: ./dev bench lists them" in capsys.readouterr().err


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_seen_enough_of_the_help_ends_it_in_silence(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, str(ROOT / "dev"), "help"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (-signal.SIGPIPE, b"")
