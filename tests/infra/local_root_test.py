"""roots/local, really applied: the product's own gateway and three sites as processes of this machine."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI

from infra.terraform.tests.workspace import SOURCE, Workspace, copy_tree
from mico.local.plan import choose_ports

pytestmark = pytest.mark.e2e

ROOT = "roots/local"
SITES = {
    "aws-eu": {"region": "eu-central-1"},
    "azure-ap": {"region": "southeastasia"},
    "gcp-us": {"region": "us-central1"},
}


@dataclass(frozen=True, slots=True)
class Local:
    """The applied root."""

    workspace: Workspace
    folder: Path
    url: str

    def terraform(self, *command: str) -> str:
        done = self.workspace.terraform(ROOT, *command)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def configure(self, sites: dict[str, dict[str, object]]) -> None:
        path = self.workspace.root / ROOT / "terraform.tfvars.json"
        settings = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**settings, "sites": sites}))

    def pids(self) -> dict[str, int]:
        records = self.folder.glob("processes/*/record.json")
        return {path.parent.name: json.loads(path.read_text())["pid"] for path in records}

    def replaced(self) -> list[str]:
        """The processes that the next apply would replace."""
        return re.findall(r'machine\["([\w-]+)"\]\S* must be replaced', self.terraform("plan"))

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self.folder.glob("processes/*/log"))


@pytest.fixture
def local(applied: Local) -> Local:
    """As it was first, whatever a test before did to it: in the order of this file there is nothing to do."""
    applied.configure(SITES)
    if len(applied.pids()) < 1 + len(SITES):
        applied.terraform("apply", "-auto-approve")
    return applied


@pytest.fixture(scope="module")
def applied(terraform: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    folder = tmp_path_factory.mktemp("local")
    http, grpc, _ = choose_ports(0)
    applied = Local(copy_tree(folder, {}), folder / "run", f"http://127.0.0.1:{http}/v1")
    settings = {
        "folder": str(applied.folder),
        "source_folder": str(SOURCE.parents[1]),
        "mico": [sys.executable, "-m", "mico"],
        "gateways": {"gateway": {"region": "local", "http_port": http, "grpc_port": grpc}},
    }
    (applied.workspace.root / ROOT / "terraform.tfvars.json").write_text(json.dumps(settings))
    applied.configure(SITES)
    applied.terraform("init")
    try:
        applied.terraform("apply", "-auto-approve")
        yield applied
    finally:
        applied.workspace.terraform(ROOT, "destroy", "-auto-approve")


def test_a_query_is_answered(local: Local) -> None:
    key = (local.folder / "key").read_text().strip()
    client = OpenAI(base_url=local.url, api_key=key, max_retries=0)
    question = {"role": "user", "content": "Why is the sky blue?"}
    answer = client.chat.completions.create(model="mico-demo", messages=[question], max_tokens=8)  # type: ignore[list-item]
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert key not in (local.workspace.root / ROOT / "terraform.tfstate").read_text()


def test_a_second_plan_is_empty(local: Local) -> None:
    assert "No changes." in local.terraform("plan", "-detailed-exitcode")


def test_one_sites_change_touches_only_it(local: Local) -> None:
    local.configure({**SITES, "aws-eu": {**SITES["aws-eu"], "slots": 6}})
    assert local.replaced() == ["aws-eu-0"]


def test_a_killed_engine_is_the_only_one_replaced(local: Local) -> None:
    before = local.pids()
    handle = os.pidfd_open(before["gcp-us-0"])
    os.killpg(before["gcp-us-0"], signal.SIGKILL)
    assert select.select([handle], [], [], 10)[0]
    os.close(handle)
    program = local.workspace.root / "modules/process/process.py"
    command = [sys.executable, str(program), "refresh", str(local.folder / "processes")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "gcp-us-0 died\n"
    assert local.replaced() == ["gcp-us-0"]
    local.terraform("apply", "-auto-approve")
    after = local.pids()
    assert {name for name in after if after[name] != before[name]} == {"gcp-us-0"}


def test_destroy_leaves_nothing(local: Local) -> None:
    handles = [os.pidfd_open(pid) for pid in local.pids().values()]
    local.terraform("destroy", "-auto-approve")
    assert len(handles) == 4
    assert all(select.select([handle], [], [], 0)[0] for handle in handles)
    assert not local.folder.exists()
    for handle in handles:
        os.close(handle)
