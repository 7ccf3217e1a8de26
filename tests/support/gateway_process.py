"""Start a gateway process in front of the scripted upstream, and read its CPU time and memory."""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from gateway.config import WORKER_PORTS
from gateway.quotas.limits import Kind, Scope
from gateway.store.audit import Act
from gateway.store.store import open_store
from mico.local.plan import free_port, to_toml
from migrations import upgrade
from tests.support.stand_in_site import TOKEN

PEPPER = "a pepper for measurements, long enough"
READY_WITHIN_S = 180.0
ACT = Act("bench", "measurement")
UNREACHED = {Kind.TOKENS: 10**10, Kind.REQUESTS: 10**8, Kind.QUERIES: 10**5}


@dataclass(slots=True)
class GatewayProcess:
    """A running gateway. `cpu_s` and `rss_mib` are of its whole process tree."""

    name: str
    port: int
    key: str
    process: asyncio.subprocess.Process
    log: Path
    metrics_port: int = 0  # of Mico's own

    @property
    def pids(self) -> list[int]:
        found, new = [], [self.process.pid]
        while new:
            found += new
            new = [int(child) for pid in new for child in _children(pid)]
        return found

    def cpu_s(self) -> float:
        return sum(map(cpu_s_of, self.pids))

    def threads(self) -> dict[str, float]:
        """Return the CPU-seconds of the first process by thread."""
        found = {}
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            spent_ns = int((task / "schedstat").read_text().split()[0])
            found[f"{task.name} {(task / 'comm').read_text().strip()}"] = spent_ns / 1e9
        return found

    def rss_mib(self) -> float:
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids]
        return round(sum(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def cpu_s_of(pid: int) -> float:
    """Return the CPU seconds of a process, to the nanosecond and with those of threads that have ended.

    The number of another process's CPU clock is what clock_getcpuclockid(3) returns on Linux.
    """
    return time.clock_gettime_ns((~pid << 3) | 2) / 1e9


def _children(pid: int) -> list[str]:
    threads = Path(f"/proc/{pid}/task")
    return [child for each in threads.iterdir() for child in (each / "children").read_text().split()]


@dataclass(slots=True)
class Workspace:
    """A folder for logs and settings, and the ports of the upstream.

    `python` runs Mico's gateway and `bare`, of the sources in `tree`; it finds this interpreter's packages.
    """

    folder: Path
    tools: Path
    python: str = sys.executable
    upstream_port: int = field(default_factory=free_port)
    link_port: int = field(default_factory=free_port)
    tree: Path = field(default_factory=Path.cwd)


def interpreter(workspace: Workspace) -> tuple[str, ...]:
    """Return the command that runs the workspace's Python, with the sources in its tree."""
    tree = workspace.tree.absolute()
    if (workspace.python, tree) == (sys.executable, Path.cwd()):
        return (workspace.python,)
    packages = os.pathsep.join((str(tree), sysconfig.get_path("platlib"), os.environ.get("PYTHONPATH", "")))
    return ("env", f"--chdir={tree}", f"PYTHONPATH={packages}", workspace.python)


@asynccontextmanager
async def process(
    name: str, workspace: Workspace, *command: object
) -> AsyncIterator[asyncio.subprocess.Process]:
    log = workspace.folder / f"{name}.log"
    with log.open("ab") as out:
        started = await asyncio.create_subprocess_exec(
            *map(str, command), stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.terminate()
            try:
                await asyncio.wait_for(started.wait(), 40)
            except TimeoutError:
                started.kill()
                await started.wait()


@asynccontextmanager
async def upstream(
    workspace: Workspace, iteration_ms: float, phases: int = 1, *, site: str = "stand-in", workers: int = 1
) -> AsyncIterator[None]:
    """Start the upstream, which joins every worker as a site. Of several, those after the first only join."""
    port = workspace.upstream_port if site == "stand-in" else free_port()
    links = [f"127.0.0.1:{workspace.link_port + WORKER_PORTS * number}" for number in range(workers)]
    joins = [part for link in links for part in ("--join", link)]
    own = ("--http-port", port, "--site", site, "--iteration-ms", iteration_ms, "--phases", phases)
    async with process(
        site, workspace, sys.executable, "-m", "tests.support.scripted_upstream", *own, *joins
    ) as started:
        await wait_until_answering(f"http://127.0.0.1:{port}/health", started, workspace.folder)
        yield


async def wait_until_answering(url: str, started: asyncio.subprocess.Process, folder: Path) -> None:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + READY_WITHIN_S
    async with httpx.AsyncClient(timeout=5) as client:
        while started.returncode is None and loop.time() < deadline_s:
            try:
                if (await client.get(url)).status_code == 200:
                    return
            except httpx.HTTPError:
                pass  # it has not opened its port yet
            await asyncio.sleep(0.2)
    raise SystemExit(f"{url} did not answer; see {folder}")


@asynccontextmanager
async def mico(
    workspace: Workspace,
    log_level: str = "INFO",
    *,
    quotas: bool = True,
    predictor: Path | None = None,
    with_sites: bool = True,
    workers: int = 1,
    database: Path | None = None,
) -> AsyncIterator[GatewayProcess]:
    """Start the gateway as shipped: auth, forecasts, decisions and usage on SQLite, and quotas that nobody
    reaches. Wait until a site has joined, if there are sites `with_sites`. `database`: None for its own.
    """
    folder = workspace.folder / "mico"
    folder.mkdir(exist_ok=True)
    port, metrics_port = free_port(), free_port()
    url = f"sqlite+aiosqlite:///{database or folder / 'mico.db'}"
    settings = {
        "name": workspace.folder.name,
        "http_port": port,
        "grpc_port": workspace.link_port,
        "metrics_port": metrics_port,
        "database_url": url,
        "folder": str(folder),
        "site_tokens": [TOKEN],
        "key_pepper": PEPPER,
        "log_level": log_level,
    }
    if predictor is not None:
        settings["predictor"] = str(predictor)
    if workers > 1:  # a setting that older gateways do not know
        settings["workers"] = workers
    (folder / "gateway.toml").write_text(to_toml(settings))
    command = (*interpreter(workspace), "-m", "mico", "gateway", "--config", folder / "gateway.toml")
    upgrade(url)  # not in a thread: two at once would share Alembic's context
    async with open_store(url, folder, pepper=PEPPER, serving=False) as store:
        _, secret = await store.keys.create_key("bench", "shop", act=ACT)
        if quotas:
            await store.quotas.set_quotas(Scope.TENANT, "shop", UNREACHED, ACT)
    async with process("mico", workspace, *command) as started:
        await wait_until_answering(
            f"http://127.0.0.1:{port}/{'ready' if with_sites else 'health'}", started, workspace.folder
        )
        yield GatewayProcess("mico", port, secret, started, workspace.folder / "mico.log", metrics_port)
