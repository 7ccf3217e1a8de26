"""The chaos bench on what it judges, and on the faults that it puts into processes."""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, insert

from bench.chaos import FAULTS, complaints, fault_names, felt, groups
from bench.federation import Answered
from bench.support.faults import Fault
from bench.support.faulty_process import Switches, listen
from bench.support.relay import Relay
from bench.support.streams import Load, StreamOutcome, recorded, verdict
from gateway.store.tables import metadata, usage

CLEAN: dict[str, Any] = {
    "failed": [],
    "rows_twice": [],
    "answers_without_a_row": [],
    "rows_with_other_tokens": [],
    "batch_lines_wrong": [],
    "texts_wrong": [],
    "broken": {},
    "refused": {},
    "noticed_s": 1.0,
}


async def nothing(_: object) -> dict[str, float]:
    return {}


def outcome(name: str, *, began: float = 0.0, first_s: float = 1.0, silence: float = 0.0) -> StreamOutcome:
    answer = Answered("a prompt", name, "text", "stop", 7, "", first_s, 3.0)
    return StreamOutcome(0, 1, answer, 5, began, silence, began + first_s)


@pytest.mark.parametrize("name", ["failed", "rows_twice", "rows_with_other_tokens", "texts_wrong"])
def test_one_wrong_query_fails_a_fault(name: str) -> None:
    assert complaints(CLEAN, Fault(nothing)) == []
    assert complaints({**CLEAN, name: ["streams-1-0"]}, Fault(nothing)) == [f"{name}: 1"]


def test_streams_break_and_queries_are_refused_only_where_that_is_expected() -> None:
    broken, refused = {**CLEAN, "broken": {"reset": 2}}, {**CLEAN, "refused": {"503": 3}}
    assert complaints(broken, Fault(nothing)) == ["broken: 2"]
    assert complaints(refused, Fault(nothing)) == ["refused: 3"]
    assert complaints(broken, Fault(nothing, breaks=True)) == []
    assert complaints(refused, Fault(nothing, breaks=True)) == []
    assert complaints(refused, Fault(nothing, refuses=True)) == []


def test_a_recovery_beyond_its_limit_fails_a_fault() -> None:
    assert complaints(CLEAN, Fault(nothing, limits_s={"noticed_s": 1.0})) == []
    assert complaints(CLEAN, Fault(nothing, limits_s={"noticed_s": 0.9})) == ["noticed_s: 1.0, at most 0.9"]


def test_clients_feel_what_comes_after_the_fault() -> None:
    before = outcome("a", began=0.0, first_s=2.0, silence=9.0)
    after = outcome("b", began=10.0, first_s=3.0, silence=4.0)
    assert felt([before, after], 10.0) == {
        "longest_silence_s": 4.0,
        "longest_first_token_s": 3.0,
        "first_token_more_s": 1.0,
    }


def test_faults_that_need_postgres_share_a_federation() -> None:
    found = dict(groups(list(FAULTS)))
    assert sorted(found[False] + found[True]) == sorted(FAULTS)
    assert all(FAULTS[name].postgres for name in found[True])
    with pytest.raises(argparse.ArgumentTypeError, match="no fault comet"):
        fault_names("hung-engine,comet")


def test_the_verdict_finds_rows_twice_missing_and_of_other_tokens(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'usage.db'}"
    engine = create_engine(url)
    metadata.create_all(engine)
    load = Load([], "", argparse.Namespace(count=3), texts=[])
    load.ended = [outcome(f"{load.tag}-{number}-0") for number in range(3)]
    assert await_verdict(url, load)["answers_without_a_row"] == [f"{load.tag}-{n}-0" for n in range(3)]
    rows = [(f"{load.tag}-0-0", 5, 7), (f"{load.tag}-1-0", 5, 7), (f"{load.tag}-1-0", 5, 7)]
    rows += [(f"{load.tag}-2-0", 5, 8), ("another-0-0", 1, 1)]
    with engine.begin() as connection:
        connection.execute(insert(usage), [row_of(number, *each) for number, each in enumerate(rows)])
    found = await_verdict(url, load)
    assert found["rows_twice"] == [f"{load.tag}-1-0"]
    assert found["rows_with_other_tokens"] == [f"{load.tag}-2-0"]
    assert len(recorded(url, load.tag)) == 3


def await_verdict(url: str, load: Load) -> dict[str, Any]:
    return asyncio.run(verdict(url, load, within_s=0.1))


def row_of(number: int, request_id: str, prompt: int, completion: int) -> dict[str, Any]:
    words = dict.fromkeys(("tenant", "key_id", "model", "status", "error", "site"), "x")
    counts = {"attempts": 1, "prompt_tokens": prompt, "completion_tokens": completion}
    times = {"received_at": 0.0, "total_s": 1.0}
    return {"query_id": str(number), "request_id": request_id, **words, **counts, **times}


def test_a_relay_swallows_open_connections_and_lets_new_ones_through() -> None:
    asyncio.run(swallow())


async def swallow() -> None:
    ended = asyncio.Semaphore(0)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionResetError):
            while piece := await reader.read(100):
                writer.write(piece)
        writer.close()
        with suppress(ConnectionResetError):
            await writer.wait_closed()
        ended.release()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    relay = await Relay.start(server.sockets[0].getsockname()[1])
    old_reader, old = await asyncio.open_connection("127.0.0.1", relay.port)
    old.write(b"one")
    assert await old_reader.readexactly(3) == b"one"
    relay.swallow()
    old.write(b"two")
    new_reader, new = await asyncio.open_connection("127.0.0.1", relay.port)
    new.write(b"three")
    assert await new_reader.readexactly(5) == b"three"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(old_reader.read(1), 0.1)
    for writer in (old, new):
        writer.close()
        await writer.wait_closed()
    await relay.close()
    server.close()
    for _ in range(2):
        await asyncio.wait_for(ended.acquire(), 10)


def test_switches_are_changed_through_the_socket(tmp_path: Path) -> None:
    switches, path = Switches(), tmp_path / "switches.sock"
    listen(path, switches)
    assert send_line(path, b'{"clock_offset_s": 3600, "engine_hangs": true}\n') == b"ok\n"
    assert switches.clock_offset_s == 3600
    assert not switches.engine_runs.is_set()
    assert send_line(path, b'{"engine_hangs": false}\n') == b"ok\n"
    assert switches.engine_runs.is_set()
    assert send_line(path, b'{"comet": true}\n') == b"KeyError('comet')\n"


def send_line(path: Path, line: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(line)
        return client.makefile("rb").readline()


def test_a_process_with_a_stepped_clock_defaults_to_that_clock(tmp_path: Path) -> None:
    program = (
        "import sys, time; real = time.time; from bench.support.faulty_process import *;"
        "switches = Switches(); switches.change({'clock_offset_s': 86400.0}); step_clock(switches);"
        "from gateway.store.clock import DatabaseClock;"
        "print(DatabaseClock()() - real(), time.monotonic())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    ahead_s, monotonic_s = map(float, done.stdout.split())
    assert round(ahead_s) == 86_400
    assert abs(monotonic_s - time.monotonic()) < 3_600
