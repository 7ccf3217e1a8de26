"""A process of an engine that is begun before it is asked for."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

from site_engine.engine.process_spawn import Spawned, prestarted, spawn

ECHO = """
import socket, sys
end = socket.socket(fileno=int(sys.argv[1]))
end.sendall(end.recv(9))
"""


def test_the_first_caller_gets_the_process_that_was_begun_and_later_ones_another() -> None:
    made: list[Spawned] = []

    def counted() -> Spawned:
        made.append(spawn((sys.executable, "-c", ECHO)))
        return made[-1]

    start = prestarted(counted)
    assert len(made) == 1
    assert [start(), start(), start()] == made
    for process, connection in made:
        with connection:
            connection.sendall(b"said")
            assert connection.recv(9) == b"said"
        assert process.wait(60) == 0


def test_a_process_that_nobody_asks_for_ends_with_its_socket() -> None:
    waiting = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).recv(9)"
    process, connection = prestarted(partial(spawn, (sys.executable, "-c", waiting)))()
    connection.close()
    assert process.wait(60) == 0


def test_a_signal_to_all_processes_is_left_to_the_site_while_the_engines_own_still_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    process, connection = spawn()
    connection.close()
    assert process.wait(60) == 1
