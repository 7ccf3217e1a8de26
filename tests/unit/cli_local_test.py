"""The pieces of a local federation: its plan, its folder, and the identity of its processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import load as load_gateway
from mico.errors import CommandFailed
from mico.local.folder import Folder, Running, write_private
from mico.local.interrupts import END_SIGNALS, interrupt_at_end_signals, uninterrupted
from mico.local.plan import Plan, Ports, choose_ports, is_free, to_toml
from mico.local.processes import Process, end, last_lines, previous_log, roll_log, start_stamp
from mico.local.profiles import profiles
from mico.terminal import Terminal
from site_engine.config_sources import load as load_site


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,12}", fullmatch=True), st.text() | st.integers(0, 9) | st.booleans()
    )
)
def test_settings_survive_the_way_through_toml(settings: dict[str, object]) -> None:
    assert tomllib.loads(to_toml(settings)) == settings


@given(st.integers(1, 32))
def test_sites_have_names_of_their_own_and_the_first_three_differ_in_cloud_and_speed(count: int) -> None:
    sites = profiles(count)
    assert len({site.name for site in sites}) == count
    first = sites[:3]
    assert len({site.cloud for site in first}) == len({site.slots / site.iteration_floor_s for site in first})


def test_each_process_understands_its_file(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "mico")
    folder.make()
    plan = Plan(folder, (Ports(8080, 8081),), "some/model", tuple(profiles(3)), "sqlite:///there.db")
    plan.write()
    gateway = load_gateway(folder.config("gateway"))
    assert gateway.database_url == "sqlite:///there.db"
    assert gateway.tokens() == (folder.token_file.read_text(),)
    for profile in plan.sites:
        site = load_site(folder.config(profile.name), {})
        assert (site.site, site.slots, site.threads) == (profile.name, profile.slots, 1)
        assert site.gateways == (f"127.0.0.1:{gateway.grpc_port}",)
        assert site.secret() in gateway.tokens()


def test_gateway_replicas_share_keys_and_sites_but_no_journal(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "mico")
    folder.make()
    write_private(folder.pepper_file, "a pepper of many characters")
    ports = (Ports(8080, 8081), Ports(8090, 8091))
    plan = Plan(folder, ports, "some/model", tuple(profiles(2)), folder.database_url)
    plan.write()
    first, second = (load_gateway(folder.config(name)) for name in plan.gateway_names)
    assert first.key_pepper == second.key_pepper == folder.pepper_file.read_text()
    assert (first.peers, second.peers) == (("127.0.0.1:8091",), ("127.0.0.1:8081",))
    assert first.folder != second.folder
    site = load_site(folder.config(plan.sites[0].name), {})
    assert site.gateways == ("127.0.0.1:8081", "127.0.0.1:8091")


def test_only_the_owner_can_read_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "mico"
    path.mkdir(mode=0o755)
    folder = Folder(path)
    folder.make()
    write_private(folder.key_file, "secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert (
        stat.S_IMODE(folder.key_file.stat().st_mode)
        == stat.S_IMODE(folder.token_file.stat().st_mode)
        == 0o600
    )


def test_what_runs_is_remembered_and_forgotten(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert folder.running() is None
    process = Process("gateway", "gateway", 1, "stamp", "log")
    running = Running("2026-11-21T11:00:00+00:00", (8080, 8090), "demo", "sqlite:///there.db", (process,))
    folder.save_state(running)
    assert folder.running() == running
    assert folder.client_settings()["base_url"] == "http://127.0.0.1:8080/v1"
    folder.delete_state()
    assert folder.running() is None


def test_one_up_or_down_at_a_time(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    with folder.locked(), pytest.raises(CommandFailed, match="at work"), folder.locked():
        pytest.fail("the lock was given twice")


def test_a_port_in_use_is_refused_and_zero_finds_a_free_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(CommandFailed, match="in use"):
            choose_ports(taken.getsockname()[1])
    assert len(set(choose_ports(0))) == 3
    with pytest.raises(CommandFailed, match="no port"):
        choose_ports(70_000)


def test_the_last_port_there_is_can_be_chosen() -> None:
    if is_free(65_535):
        assert choose_ports(65_535).http == 65_535


def test_an_interrupt_waits_for_what_must_not_be_cut() -> None:
    """A process that was started and not noted yet was left running by Ctrl-C."""
    before = signal.getsignal(signal.SIGINT)
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append("all of it")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is before


def test_the_end_of_the_terminal_is_an_interrupt_unless_nohup_says_otherwise() -> None:
    before = {number: signal.getsignal(number) for number in END_SIGNALS}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
        interrupt_at_end_signals()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        interrupt_at_end_signals()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number, own in before.items():
            signal.signal(number, own)


def test_nobody_to_read_what_is_said_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mico up 2>&1 | head` failed while it stopped, and left its processes running."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:  # noqa: PTH123 - a descriptor has no path
        monkeypatch.setattr("sys.stderr", closed)
        Terminal().info("stopping")
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):
            closed.close()


def test_a_port_that_was_chosen_is_given_to_nobody_else_meanwhile() -> None:
    for port in choose_ports(0):
        with socket.socket() as another, pytest.raises(OSError, match="in use"):
            another.bind(("127.0.0.1", port))
        socket.create_server(("127.0.0.1", port)).close()


def child() -> subprocess.Popen[bytes]:
    """A process that ends only when it is told to."""
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def test_a_process_is_ended_only_under_its_own_start_time() -> None:
    with child() as running:
        mine = Process("site", "site", running.pid, start_stamp(running.pid) or "", "log")
        assert mine.alive
        recycled = replace(mine, started="another time")
        assert not recycled.alive
        assert end([recycled], 0.0) == []
        assert mine.alive
        end([mine], 5.0)
        assert not mine.alive
        running.returncode = -signal.SIGTERM  # it was collected by pid


def test_what_does_not_listen_is_killed() -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); input()"
    command = [sys.executable, "-c", deaf]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        process = Process("site", "site", running.pid, start_stamp(running.pid) or "", "log")
        assert end([process], 0.2) == [process]
        assert not process.alive
        running.returncode = -signal.SIGKILL


def test_nobody_has_the_pid_of_nobody() -> None:
    assert start_stamp(2**22 + 1) is None
    assert start_stamp(os.getpid()) == start_stamp(os.getpid()) is not None


def test_the_end_of_a_log_reads_as_words(tmp_path: Path) -> None:
    log = tmp_path / "site.log"
    trace = "Traceback …\nValueError: no such model"
    entries = [
        {"level": "info", "message": "loading"},
        {"level": "error", "message": "failed", "fault": trace},
    ]
    log.write_text("\n".join(["not JSON", *map(json.dumps, entries)]))
    assert last_lines(str(log)) == "not JSON\ninfo: loading\nerror: failed: ValueError: no such model"
    assert last_lines(str(log), 1) == "error: failed: ValueError: no such model"
    assert last_lines(str(tmp_path / "absent.log")) == ""


def test_the_end_of_a_log_is_shown_however_long_it_is(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    with log.open("wb") as file:
        file.truncate(1 << 40)  # as after years, but without its bytes
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"level": "critical", "message": "the disk is full"}\n')
    assert last_lines(str(log), 1) == "critical: the disk is full"


def test_a_log_is_bounded_also_where_its_lines_cannot_be_kept(tmp_path: Path) -> None:
    """On a full disk the copy took what was left, each second anew, and the database could not write."""
    log = tmp_path / "gateway.log"
    log.write_text("a line\n")
    previous_log(log).mkdir()  # as no room for the copy, an OSError
    with pytest.raises(IsADirectoryError):
        roll_log(log)
    assert not log.read_text()
