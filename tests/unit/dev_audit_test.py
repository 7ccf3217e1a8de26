"""`./dev check` looks for known vulnerabilities where a database is in reach, and says so where none is."""

from __future__ import annotations

import http.server
import json
import runpy
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


class Database(http.server.BaseHTTPRequestHandler):
    """A vulnerability database like osv.dev that knows of one bad version."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        bad = asked["package"]["name"] == "leaky"
        vulnerability = {"id": "OSV-1", "aliases": ["CVE-1"], "summary": "It leaks.", "affected": []}
        body = json.dumps({"vulns": [vulnerability]} if bad else {}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def database() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Database) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/query"
        finally:
            server.shutdown()
            serving.join()


def dev(monkeypatch: pytest.MonkeyPatch, url: str) -> dict[str, Any]:
    monkeypatch.setenv("MICO_OSV_URL", url)
    return runpy.run_path(str(ROOT / "dev"), run_name="dev")


@pytest.mark.slow
def test_a_vulnerable_pin_fails_and_clean_ones_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with database() as url:
        loaded = dev(monkeypatch, url)
        assert loaded["is_reachable"](url)
        for pins, fails in (("clean==1.0\n", False), ("clean==1.0\nleaky==2.0\n", True)):
            (tmp_path / "constraints.txt").write_text(pins)
            command = [str(part) for part in loaded["audit"]()]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert bool(done.returncode) == fails, done.stderr
            assert ("CVE-1" in done.stdout) == fails, done.stderr


def test_without_a_database_the_check_says_that_it_was_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1/query"
    loaded = dev(monkeypatch, url)
    assert not loaded["is_reachable"](url)
    logged: list[str] = []
    names = loaded["check"].__globals__
    names.update(log=logged.append, start_process=lambda command: None, print_result=lambda *_: True)
    assert loaded["check"]([]) == 0
    assert any("audit    SKIPPED" in line for line in logged)
