"""Servers of one model on one machine, Mico and vLLM, started alike, with the CPU and GPU that they use."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.support.http_arrivals import Target
from mico.local.database import prepare_database
from mico.local.folder import Folder, write_private
from mico.local.plan import HOST, Ports, free_port, to_toml

READY_WITHIN_S = 240.0
END_WITHIN_S = 20.0
SEEN_CPU_S = 0.05
"""Processes and threads that took less are left out."""
LOG_CHARS = 3_000
MODEL = "m"
VLLM_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
WORKERS = {"mico": 1, "mico2": 2}
"""Processes of the gateway, by server."""
SERVERS = (*WORKERS, "vllm", "vllm4")


class NotReady(Exception):
    """A server ended or took too long to start; the message has the end of its log."""


@dataclass(slots=True)
class Server:
    """A running server. `ready_s` and `first_token_s` count from the start of its processes."""

    target: Target
    processes: dict[str, subprocess.Popen[bytes]]
    ready_s: float = 0.0
    first_token_s: float = 0.0

    def cpu(self) -> dict[str, dict[int, float]]:
        """Return the CPU seconds of each thread, by process."""
        return {
            f"{name} {pid}": thread_times(pid)
            for name, process in self.processes.items()
            for pid in with_children(process.pid)
        }


def with_children(pid: int) -> list[int]:
    """Return a process and all that come from it, parents first."""
    parents = {int(path.name): _parent(path) for path in Path("/proc").iterdir() if path.name.isdigit()}
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def _parent(path: Path) -> int:
    try:
        return int((path / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def thread_times(pid: int) -> dict[int, float]:
    """Return the CPU seconds of a process by thread; of one that has ended, nothing."""
    found: dict[int, float] = {}
    try:
        for path in Path(f"/proc/{pid}/task").iterdir():
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            found[int(path.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except OSError:
        pass  # it ends while it is read
    return found


def cpu_between(
    before: Mapping[str, Mapping[int, float]], after: Mapping[str, Mapping[int, float]]
) -> dict[str, list[float]]:
    """Return the CPU seconds by process: all of it, then its busiest threads."""
    found: dict[str, list[float]] = {}
    for name, threads in after.items():
        earlier = before.get(name, {})
        spent = sorted((now - earlier.get(each, 0.0) for each, now in threads.items()), reverse=True)
        if sum(spent) >= SEEN_CPU_S:
            found[name] = [round(each, 2) for each in (sum(spent), *spent[:4])]
    return found


class Gpu(threading.Thread):
    """Samples the first GPU by `nvidia-smi`, if there is one: busy share in %, watts, MiB in use."""

    QUERY = "--query-gpu=utilization.gpu,power.draw,memory.used"

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._samples: list[tuple[float, float, float, float]] = []

    def run(self) -> None:
        command = ["nvidia-smi", self.QUERY, "--format=csv,noheader,nounits", "-i", "0", "-lms", "200"]
        try:
            sampler = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except OSError:
            return
        assert sampler.stdout is not None
        for line in sampler.stdout:
            busy, watts, mib = map(float, line.split(","))
            self._samples.append((time.perf_counter(), busy, watts, mib))

    def between(self, since_s: float, until_s: float) -> dict[str, float]:
        """Return means, and the highest memory."""
        rows = [row for row in self._samples if since_s <= row[0] <= until_s]
        if not rows:
            return {}
        return {
            "busy_percent": round(sum(row[1] for row in rows) / len(rows), 1),
            "watts": round(sum(row[2] for row in rows) / len(rows)),
            "mib": round(max(row[3] for row in rows)),
        }


@contextmanager
def served(name: str, model: Path, work: Path, *, slots: int, extra: Mapping[str, str]) -> Iterator[Server]:
    """Start a server of `model`, a folder, and end it afterwards; `extra` has more arguments of vLLM and
    more lines of the site's configuration, as text by server. Raises NotReady.
    """
    work.mkdir(parents=True, exist_ok=True)
    if name in WORKERS:
        server = _mico(model, work, slots, extra.get("mico", ""), WORKERS[name])
        path = "/ready"
    else:
        more = shlex.split(extra.get("vllm", "")) + (["--api-server-count", "4"] if name == "vllm4" else [])
        server = _vllm(model, work, slots, more)
        path = "/health"
    began_s = time.perf_counter()
    try:
        _wait_ready(server, path, work, began_s)
        yield server
    finally:
        _end(server)


def _start(
    name: str, command: Sequence[str], work: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    with (work / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **environment},
        )


def _mico(model: Path, work: Path, slots: int, more: str, workers: int) -> Server:
    folder = Folder(work / ".mico")
    folder.make()
    ports = Ports(free_port(), free_port())
    key = prepare_database(folder, folder.database_url)
    gateway = {
        "name": "local",
        "host": HOST,
        "http_port": ports.http,
        "grpc_host": HOST,
        "grpc_port": ports.grpc,
        "metrics_port": free_port(),
        "workers": workers,
        "database_url": folder.database_url,
        "folder": str(folder.path),
        "site_token_file": str(folder.token_file),
    }
    site = {
        "site": "gpu",
        "model": str(model),
        "served_model": MODEL,
        "gateways": [f"{HOST}:{ports.grpc}"],
        "token_file": str(folder.token_file),
        "slots": slots,
    }
    write_private(folder.config("gateway"), to_toml(gateway))
    write_private(folder.config("site"), to_toml(site) + more + "\n")
    processes = {
        role: _start(
            role, [sys.executable, "-m", "mico", role, "--config", str(folder.config(role))], work, {}
        )
        for role in ("gateway", "site")
    }
    return Server(Target(ports.http, key, MODEL), processes)


def _vllm(model: Path, work: Path, slots: int, more: Sequence[str]) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--served-model-name", MODEL, "--max-num-seqs", str(slots), "--host", HOST]
    command += ["--port", str(port), "--disable-uvicorn-access-log", *more]
    return Server(Target(port, "none", MODEL), {"vllm": _start("vllm", command, work, VLLM_ENVIRONMENT)})


def _wait_ready(server: Server, path: str, work: Path, began_s: float) -> None:
    root = f"http://{HOST}:{server.target.port}"
    while not _answers(f"{root}{path}"):
        ended = [name for name, process in server.processes.items() if process.poll() is not None]
        if ended or time.perf_counter() - began_s > READY_WITHIN_S:
            logs = {name: (work / f"{name}.log").read_text(errors="replace") for name in server.processes}
            told = "\n".join(f"{name}: {text[-LOG_CHARS:]}" for name, text in logs.items())
            raise NotReady(f"{'ended' if ended else 'too slow'}: {told}")
        time.sleep(0.1)
    server.ready_s = round(time.perf_counter() - began_s, 1)
    body = json.dumps({"model": MODEL, "prompt": "Hello", "max_tokens": 1}).encode()
    head = {"content-type": "application/json", "authorization": f"Bearer {server.target.key}"}
    urllib.request.urlopen(urllib.request.Request(f"{root}/v1/completions", body, head), timeout=60).read()
    server.first_token_s = round(time.perf_counter() - began_s, 1)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _end(server: Server) -> None:
    """Ask the processes to end, the site before its gateway; kill what is left with its children."""
    for process in reversed(server.processes.values()):
        children = with_children(process.pid)
        process.terminate()
        try:
            process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid in children[1:]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
