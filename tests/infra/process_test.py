"""The program behind Terraform's local processes, used as its provisioners use it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.terraform.tests.workspace import SOURCE
from mico.local.plan import free_port

PROGRAM = SOURCE / "modules/process/process.py"
SERVER = """
import sys
from http.server import SimpleHTTPRequestHandler, test
test(SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind="127.0.0.1")
"""


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, check=False, timeout=600
    )


@pytest.fixture
def port() -> int:
    return free_port()


def spec(folder: Path, port: int, *command: str, contains: str = "") -> str:
    ready = {"url": f"http://127.0.0.1:{port}/", "contains": contains}
    return json.dumps(
        {
            "folder": str(folder),
            "command": command or [sys.executable, "-c", SERVER, str(port)],
            "environment": {},
            "ready": ready,
            "start_s": 30,
            "stop_s": 5,
        }
    )


@contextmanager
def ending(pid: int) -> Iterator[Callable[[], bool]]:
    """Return whether a process that runs now has ended, waiting for it if need be."""
    handle = os.pidfd_open(pid)
    try:
        yield lambda: bool(select.select([handle], [], [], 10)[0])
    finally:
        os.close(handle)


def pid(folder: Path) -> int:
    return int(json.loads((folder / "record.json").read_text())["pid"])


def test_start_returns_when_ready_and_stop_leaves_nothing(tmp_path: Path, port: int) -> None:
    folder = tmp_path / "one"
    assert process("start", spec(folder, port)).returncode == 0
    with ending(pid(folder)) as ended, socket.create_connection(("127.0.0.1", port)):
        assert process("stop", spec(folder, port)).returncode == 0
        assert ended()
    assert not (folder / "record.json").exists()


def test_a_process_that_ends_at_once_fails_the_start_and_says_where_to_look(
    tmp_path: Path, port: int
) -> None:
    done = process("start", spec(tmp_path / "one", port, sys.executable, "-c", "raise SystemExit(3)"))
    assert done.returncode != 0
    assert done.stderr.startswith("one: exited with 3 before it was ready; see ")
    assert not (tmp_path / "one/record.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_start_that_is_interrupted_leaves_nothing(
    number: signal.Signals, tmp_path: Path, port: int
) -> None:
    """Ctrl-C while Terraform waited left the process, which `terraform destroy` does not end then."""
    folder, hung = tmp_path / "one", (sys.executable, "-c", "import signal; signal.pause()")
    command = [sys.executable, str(PROGRAM), "start", spec(folder, port, *hung)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as starting:
        while not (folder / "record.json").exists() or not (folder / "record.json").read_text():
            assert starting.poll() is None
        with ending(pid(folder)) as ended:
            starting.send_signal(number)
            assert starting.wait() != 0
            assert ended()
    assert not (folder / "record.json").exists()


def test_another_program_at_the_port_is_not_taken_for_the_process(tmp_path: Path, port: int) -> None:
    process("start", spec(tmp_path / "other", port))
    done = process("start", spec(tmp_path / "one", port))
    process("stop", spec(tmp_path / "other", port))
    assert done.returncode != 0
    assert done.stderr.startswith(f"one: something else answers at http://127.0.0.1:{port}/ already")


def test_a_death_is_counted_once_and_a_live_process_is_left_alone(tmp_path: Path, port: int) -> None:
    folder = tmp_path / "one"
    process("start", spec(folder, port))
    assert process("refresh", str(tmp_path)).stdout == ""
    with ending(pid(folder)) as ended:
        os.killpg(pid(folder), signal.SIGKILL)
        assert ended()
    assert process("refresh", str(tmp_path)).stdout == "one died\n"
    assert process("refresh", str(tmp_path)).stdout == ""
    assert (folder / "deaths").read_text() == "1"


def test_a_pid_that_is_somebody_elses_now_is_not_signalled(tmp_path: Path, port: int) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        (folder / "record.json").write_text(json.dumps({"pid": other.pid, "started_at": 1}))
        process("stop", spec(folder, port))
        assert other.poll() is None
