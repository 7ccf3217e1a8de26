"""`mico up` in the foreground beside other commands in the same folder: what it watches and what it stops."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from mico.commands import federation
from mico.errors import CommandFailed
from mico.local.folder import Folder, Running
from mico.local.interrupts import END_SIGNALS
from mico.local.processes import Process, start_stamp
from mico.session import Session
from mico.settings import Settings
from mico.terminal import Terminal
from tests.support.command_line import run


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Restore the signal handlers, which `mico up` replaces."""
    before = {number: signal.getsignal(number) for number in (*END_SIGNALS, signal.SIGALRM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path / "mico")
    made.make()
    return made


@pytest.fixture
def gateways() -> Iterator[list[Process]]:
    """Two processes that end only when they are told to."""
    with ExitStack() as stack:
        command = [sys.executable, "-c", "input()"]
        children = [stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE)) for _ in range(2)]
        yield [
            Process("gateway", "gateway", each.pid, start_stamp(each.pid) or "", "log") for each in children
        ]
        for each in children:
            each.kill()


def running(started_at: str, gateway: Process) -> Running:
    return Running(started_at, (1,), "demo", "sqlite:///there.db", (gateway,))


def session_in(folder: Folder) -> Session:
    return Session(Terminal(quiet=True), Settings({}, {}, {}), folder)


def start_of(own: Running, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `mico up` start nothing but find that `own` runs."""

    def start(_session: object, _plan: object) -> Running:
        folder.save_state(own)
        return own

    monkeypatch.setattr(federation, "make_plan", lambda *_, **__: None)
    monkeypatch.setattr(federation, "start", start)
    monkeypatch.setattr(federation, "print_ready", lambda *_, **__: None)


def test_a_federation_that_another_started_here_meanwhile_is_not_stopped(
    folder: Folder,
    gateways: list[Process],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`mico down` and `mico up --detach` in another terminal: Ctrl-C in the first stopped the new one."""
    own, other = (running(str(number), gateway) for number, gateway in enumerate(gateways))
    start_of(own, folder, monkeypatch)
    monkeypatch.setattr(federation, "watch_until_interrupted", lambda *_: folder.save_state(other))
    status, _, _ = run(capsys, "--folder", str(folder.path), "--quiet", "up")
    assert status == 0
    assert other.processes[0].alive
    assert folder.running() == other


def test_nothing_is_started_here_while_it_stops(
    folder: Folder,
    gateways: list[Process],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Another `mico up` restarted the gateway of a federation that drained; nothing knew of it afterwards."""
    own, stopped = running("now", gateways[0]), []

    def stop_all(_folder: Folder, found: Running) -> list[Process]:
        with pytest.raises(CommandFailed, match="at work"), folder.locked():
            pytest.fail("another command was let in")
        stopped.append(found)
        return []

    start_of(own, folder, monkeypatch)
    monkeypatch.setattr(federation, "watch_until_interrupted", lambda *_: None)
    monkeypatch.setattr("mico.local.federation.stop_all", stop_all)
    status, _, _ = run(capsys, "--folder", str(folder.path), "--quiet", "up")
    assert (status, stopped) == (0, [own])


def test_what_another_restarted_of_it_is_stopped_too(folder: Folder, gateways: list[Process]) -> None:
    own = running("now", gateways[0])
    folder.save_state(replace(own, processes=tuple(gateways)))
    federation.stop_own(session_in(folder), own)
    assert not any(each.alive for each in gateways)
    assert folder.running() is None


def test_it_is_stopped_where_its_folder_or_its_state_is_gone(folder: Folder, gateways: list[Process]) -> None:
    for damage, gateway in zip(("state", "folder"), gateways, strict=True):
        (folder.path / "state.json").write_text("{")
        session = session_in(folder if damage == "state" else Folder(folder.path / "removed"))
        federation.stop_own(session, running("now", gateway))
        assert not gateway.alive


def test_an_interrupt_while_another_command_is_at_work_kills_at_once(
    folder: Folder, gateways: list[Process]
) -> None:
    own = running("now", gateways[0])
    folder.save_state(own)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    with folder.locked():
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        federation.stop_own(session_in(folder), own)
    assert not own.processes[0].alive
    assert folder.running() is None


def test_another_federation_is_not_watched(folder: Folder, gateways: list[Process]) -> None:
    own, other = (running(str(number), gateway) for number, gateway in enumerate(gateways))
    folder.save_state(other)
    federation.watch_until_interrupted(session_in(folder), own)
    assert other.processes[0].alive
