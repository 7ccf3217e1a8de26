"""A real federation of processes on this machine, for end-to-end tests: started, looked at, hurt, ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from openai import DefaultHttpxClient, OpenAI

from gateway.store.queries import ExplainedQuery
from gateway.store.store import Store
from mico.cli import main
from mico.local.folder import Folder, Running
from mico.local.plan import to_toml
from mico.local.processes import last_lines
from mico.store_access import with_store
from tests.support.patience import patient
from tests.support.plain_http import CERTIFICATES

SETTLED_WITHIN_S = 120.0
COMMAND_WITHIN_S = 600.0


def eventually(holds: Callable[[], Any], what: str, within_s: float = SETTLED_WITHIN_S) -> Any:
    """The first true value; the deadline is on the condition, no step waits for a fixed time.

    Looks ever less often, so that a process that takes seconds to start has the core to itself.
    """
    pause, pause_s = threading.Event(), 0.02
    deadline_s = time.monotonic() + within_s
    while not (value := holds()):
        assert time.monotonic() < deadline_s, f"not within {within_s:.0f} s: {what}"
        pause.wait(pause_s)
        pause_s = min(1.2 * pause_s, 0.25)
    return value


def mico(folder: Path, *arguments: str) -> str:
    """Return the stdout of `mico ARGUMENTS`; a failure shows its stderr too."""
    command = [sys.executable, "-m", "mico", "--folder", str(folder), *arguments]
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MICO_", "OPENAI_"))}
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_WITHIN_S, env=outside, check=False
    )
    assert run.returncode == 0, f"{' '.join(command)}\n{run.stdout}{run.stderr}"
    return run.stdout


def mico_here(folder: Path, *arguments: str) -> str:
    """As `mico`, but in this process: a process takes a second to import what it needs."""
    status, out, err = run_here("--folder", str(folder), *arguments)
    assert status == 0, f"mico {' '.join(arguments)}\n{out}{err}"
    return out


def run_here(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Return the exit status, stdout and stderr of a command that runs in this process."""
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        for name in [name for name in os.environ if name.startswith(("MICO_", "OPENAI_"))]:
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()


@dataclass(frozen=True, slots=True)
class LocalFederation:
    folder: Folder
    base_url: str
    api_key: str
    model: str
    model_folder: Path

    @classmethod
    def start(cls, path: Path, model_folder: Path) -> Self:
        up = mico(path, "up", "--detach", "--json", "--port", "0", "--model", str(model_folder))
        facts = json.loads(up)
        return cls(Folder(path), facts["base_url"], facts["api_key"], facts["model"], model_folder)

    def end(self) -> None:
        mico(self.folder.path, "down")

    @property
    def running(self) -> Running:
        running = self.folder.running()
        assert running is not None, "the federation was taken down"
        return running

    def sdk(self, **options: Any) -> OpenAI:
        """The unmodified SDK; it does not try again, so that a test sees what the gateway answers."""
        http = patient(DefaultHttpxClient(verify=CERTIFICATES))
        chosen = {"max_retries": 0, "http_client": http, **options}
        return OpenAI(base_url=self.base_url, api_key=self.api_key, **chosen)

    def http(self) -> httpx.Client:
        root = self.base_url.removesuffix("/v1")
        headers = {"authorization": f"Bearer {self.api_key}"}
        return patient(httpx.Client(base_url=root, headers=headers, timeout=60, verify=CERTIFICATES))

    def sites(self) -> dict[str, dict[str, Any]]:
        with self.http() as http:
            listed = http.get("/admin/api/sites").raise_for_status().json()["sites"]
        return {site["name"]: site for site in listed}

    def busy(self) -> dict[str, list[str]]:
        """By site, what is not back to zero. Empty when nothing runs, waits or is held anywhere."""
        return {name: left for name, site in self.sites().items() if (left := not_idle(site))}

    def wait_until_idle(self, within_s: float = SETTLED_WITHIN_S) -> None:
        last: dict[str, list[str]] = {}

        def idle() -> bool:
            last.clear()
            last.update(self.busy())
            return not last

        try:
            eventually(idle, "every counter is back at zero", within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; left: {last}") from error

    def wait_until_ready(self) -> None:
        """The sites that it was started with."""

        def ready() -> bool:
            sites = self.sites()
            return all(sites[each.name]["state"] == "ready" for each in self.running.sites)

        eventually(ready, "every site is ready")

    def kill(self, site: str) -> None:
        """As a power failure would: no goodbye."""
        process = next(each for each in self.running.sites if each.name == site)
        os.kill(process.pid, signal.SIGKILL)
        eventually(lambda: not process.alive, f"{site} is gone")

    @contextmanager
    def site_before(
        self, url: str, name: str, folder: Path, **more: object
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A site in front of a server that runs already; it is ready. `more`: other settings of the site."""
        folder.mkdir()
        gateway = tomllib.loads(self.folder.config("gateway").read_text())
        settings = {
            "site": name,
            "engine": "openai",
            "url": url,
            "gateways": [f"127.0.0.1:{gateway['grpc_port']}"],
            "token_file": str(self.folder.token_file),
            **more,
        }
        (folder / "site.toml").write_text(to_toml(settings))
        command = [sys.executable, "-m", "mico", "site", "--config", str(folder / "site.toml")]
        with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as site:
            try:
                eventually(lambda: self.sites().get(name, {}).get("state") == "ready", f"{name} is ready")
                yield site
            finally:
                site.kill()

    def restart_dead(self) -> None:
        mico(self.folder.path, "up", "--detach", "--json")

    def recorded(self, query_ids: list[str]) -> dict[str, list[ExplainedQuery]]:
        """Return the records of each query in the database."""

        async def read(store: Store) -> dict[str, list[ExplainedQuery]]:
            return {query_id: await store.read.explain(query_id) for query_id in query_ids}

        return with_store(self.running.database_url, self.folder.path, read)

    def recorded_once(self, query_ids: list[str]) -> dict[str, ExplainedQuery]:
        """The record of each query, as soon as all are written. Fails when one is there twice."""

        def complete() -> dict[str, list[ExplainedQuery]] | None:
            found = self.recorded(query_ids)
            return found if all(found.values()) else None

        found = eventually(complete, "every query is recorded")
        assert [query_id for query_id, records in found.items() if len(records) != 1] == []
        return {query_id: records[0] for query_id, records in found.items()}

    def logs(self) -> str:
        parts = [f"== {process.name}\n{last_lines(process.log, 30)}" for process in self.running.processes]
        return "\n".join(parts)


def not_idle(site: dict[str, Any]) -> list[str]:
    counters = {name: site[name] for name in ("running", "pending", "assigned", "kv_reserved_tokens")}
    counters["token_load"] = round(site["token_load"], 3)
    if site["state"] != "down":  # a site that has left has no free pages, and holds none
        counters["kv_used_tokens"] = site["kv_capacity_tokens"] - site["kv_free_tokens"]
    return [f"{name}={value}" for name, value in counters.items() if value]
