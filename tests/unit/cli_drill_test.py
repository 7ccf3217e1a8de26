"""The site that a drill takes when none is named, and what is left of a drill that is interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mico.client import Answer, Client
from mico.commands import drill
from mico.commands.drill import busiest
from mico.local.folder import Running
from mico.local.interrupts import END_SIGNALS
from mico.local.processes import Process, start_stamp
from tests.support.command_line import run

SITES = [{"name": "a", "assigned": 0}, {"name": "b", "assigned": 3}, {"name": "c", "assigned": 9}]


def test_the_living_site_with_the_most_queries_is_taken() -> None:
    assert busiest(SITES, ["a", "b"]) == "b"  # c runs elsewhere
    assert busiest(SITES, ["a", "b", "c"]) == "c"


def test_without_queries_it_is_the_first_and_without_sites_none() -> None:
    assert busiest([{"name": "a", "assigned": 0}], ["a", "new"]) == "a"
    assert busiest(SITES, []) == ""


def test_a_site_is_not_stopped_for_a_time_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "drill", "stale", "--for", "soon")
    assert status == 2 and "such as 90s" in err


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Restore the signal handlers that a drill replaces."""
    before = {number: signal.getsignal(number) for number in END_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("own_signals")
def test_a_site_goes_on_also_when_the_drill_is_terminated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM, and the end of the terminal, left it stopped for good."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    interrupted = []

    def sleep(_seconds: float) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            interrupted.append(True)
            raise

    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        site = Process("site", "site", child.pid, start_stamp(child.pid) or "", "log")
        monkeypatch.setattr(drill, "select_site", lambda *_: site)
        monkeypatch.setattr("mico.commands.drill.time.sleep", sleep)
        status, _, said = run(capsys, "--folder", str(tmp_path), "drill", "stale")
    assert (status, interrupted) == (0, [True])
    assert "goes on and joins again" in said


def test_an_overload_ends_when_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its threads went on asking until its time was over, an hour if so, whatever signal came."""
    asked = threading.Event()

    def post(_client: Client, _path: str, _body: dict[str, Any]) -> Answer:
        asked.set()
        return Answer()

    def interrupted(_running: object) -> None:
        asked.wait()
        raise KeyboardInterrupt

    site = Process("gateway", "gateway", 0, "", "log")
    here = Running("now", (1,), "demo", "sqlite:///there.db", (site,))
    monkeypatch.setattr(drill, "require_running", lambda _: here)
    monkeypatch.setattr(Client, "post", post)
    monkeypatch.setattr("mico.commands.chat.first_model", lambda _: "demo")
    monkeypatch.setattr("concurrent.futures.wait", interrupted)
    status, out, said = run(capsys, "--folder", str(tmp_path), "drill", "overload", "--for", "1d")
    assert status == 0 and "0 refused" in said and not out
