"""Lose a region under load: two gateways and four sites in two regions, applied by Terraform (`roots/local`).

    python -m bench.drill region-loss --data alpaca_like.jsonl.zst

One region (its gateway and both its sites) is killed with SIGKILL while greedy streams run; later
`terraform apply` brings it back. Checked: each query is answered, each text equals that of plain
`transformers` alone, usage has each answer once and the month's budget what they used, the page names what
is down and then reports that all is well, the plan replaces the three dead processes and no other, the
region takes load again, `destroy` leaves nothing. Exit status 1 where one of these fails. Needs `terraform`
on the PATH.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.support.streams import Load, Watcher, add_options, verdict, wait_until, wrong_texts
from infra.terraform.tests.workspace import SOURCE, Workspace, copy_tree
from mico import demo_model
from mico.local.plan import choose_ports

ROOT = "roots/local"
LOST = "eu"
MONTH_TOKENS = 1_000_000_000
GATEWAYS = ("gateway-eu", "gateway-us")
SITES: dict[str, dict[str, object]] = {
    "aws-eu": {"region": "eu-central-1", "slots": 6},
    "azure-eu": {"region": "westeurope", "slots": 4, "iteration_floor_s": 0.03},
    "aws-us": {"region": "us-east-1", "slots": 6},
    "gcp-us": {"region": "us-central1", "slots": 4, "iteration_floor_s": 0.03},
}


@dataclass(frozen=True, slots=True)
class Applied:
    """The root applied in its own folder. `urls` by gateway."""

    workspace: Workspace
    folder: Path
    urls: dict[str, str]

    @property
    def key(self) -> str:
        return (self.folder / "key").read_text().strip()

    def terraform(self, *command: str) -> tuple[str, float]:
        """Run terraform and return its output and the seconds that it took."""
        began: float = time.perf_counter()
        done = self.workspace.terraform(ROOT, *command)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout, round(time.perf_counter() - began, 1)

    def pids(self) -> dict[str, int]:
        """Return pids by process as Terraform names it: a pool's name and the number of its machine."""
        records = self.folder.glob("processes/*/record.json")
        return {path.parent.name: json.loads(path.read_text())["pid"] for path in records}

    def alive(self) -> list[str]:
        pids = self.pids()
        return [url for name, url in self.urls.items() if is_alive(pids.get(f"{name}-0"))]

    def kill(self, region: str) -> list[str]:
        lost = {name: pid for name, pid in self.pids().items() if name.endswith(f"-{region}-0")}
        for pid in lost.values():
            os.killpg(pid, signal.SIGKILL)
        return sorted(lost)

    def count_deaths(self) -> None:
        program = self.workspace.root / "modules/process/process.py"
        command = [sys.executable, str(program), "refresh", str(self.folder / "processes")]
        subprocess.run(command, check=True, capture_output=True)

    def replaced(self) -> list[str]:
        """Return the processes that the next apply would replace."""
        plan, _ = self.terraform("plan")
        return sorted(re.findall(r'machine\["([\w-]+)"\]\S* must be replaced', plan))


def is_alive(pid: int | None) -> bool:
    try:
        return pid is not None and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def prepared(path: Path) -> Applied:
    ports = {name: choose_ports(0) for name in GATEWAYS}
    urls = {name: f"http://127.0.0.1:{chosen.http}" for name, chosen in ports.items()}
    applied = Applied(copy_tree(path, {}), path / "run", urls)
    settings = {
        "folder": str(applied.folder),
        "source_folder": str(SOURCE.parents[1]),
        "mico": [sys.executable, "-m", "mico"],
        "gateways": {
            name: {"region": name.rpartition("-")[2], "http_port": chosen.http, "grpc_port": chosen.grpc}
            for name, chosen in ports.items()
        },
        "sites": SITES,
    }
    (applied.workspace.root / ROOT / "terraform.tfvars.json").write_text(json.dumps(settings))
    applied.terraform("init")
    return applied


async def banner(watcher: Watcher) -> str:
    """Return the page's first line, from a gateway that is alive."""
    overview = await watcher.http.get(f"{watcher.alive()[0]}/admin/api/overview")
    return str(overview.raise_for_status().json()["banner"]["text"])


async def page_says(watcher: Watcher, *words: str) -> str:
    """Wait until all these words are in the page's first line, which is made once a second, and return the
    line.
    """

    async def shown() -> bool:
        page = await banner(watcher)
        return all(word in page for word in words)

    await wait_until(shown, f"the page says {', '.join(words)}")
    return await banner(watcher)


async def lose_region(applied: Applied, watcher: Watcher) -> dict[str, Any]:
    lost = applied.kill(LOST)
    sites = [name for name in lost if not name.startswith("gateway")]

    async def noticed() -> bool:
        return all([await watcher.everywhere(name, False) for name in sites])

    noticed_s = await wait_until(noticed, "both sites seen as down")
    return {"killed": lost, "noticed_s": noticed_s, "page": await page_says(watcher, *sites)}


async def bring_back(applied: Applied, watcher: Watcher, lost: list[str]) -> dict[str, Any]:
    await asyncio.to_thread(applied.count_deaths)
    replaced = await asyncio.to_thread(applied.replaced)
    _, apply_s = await asyncio.to_thread(applied.terraform, "apply", "-auto-approve")
    ready_s = await wait_until(lambda: watcher.all_ready([f"{name}-0" for name in SITES]), "every site ready")
    before = await served(applied, watcher, lost)

    async def at_work() -> bool:
        return await served(applied, watcher, lost) > before

    load_s = await wait_until(at_work, "the region that came back serves tokens")
    took = {"apply_s": apply_s, "ready_after_s": ready_s, "takes_load_after_s": load_s}
    return {"replaced": replaced, **took, "page": await page_says(watcher, "4 sites ready")}


async def served(applied: Applied, watcher: Watcher, names: list[str]) -> int:
    sites = await watcher.sites(applied.urls[GATEWAYS[1]])
    return sum(site["tokens_total"] for site in sites if site["name"] in names)


async def drill(applied: Applied, options: argparse.Namespace) -> tuple[dict[str, Any], Load]:
    watcher = Watcher(applied.alive, applied.key)
    await wait_until(
        lambda: watcher.all_ready([f"{name}-0" for name in SITES]), "every site at every gateway"
    )
    await watcher.limit_tenant({"tokens_per_month": MONTH_TOKENS})
    load = Load.from_options(list(applied.urls.values()), applied.key, options)
    running = asyncio.create_task(load.run())
    await load.reached(0.2)
    report: dict[str, Any] = {"lost": await lose_region(applied, watcher)}
    print(report, file=sys.stderr)
    await load.reached(0.5)
    report["back"] = await bring_back(applied, watcher, report["lost"]["killed"])
    print(report["back"], file=sys.stderr)
    await running
    await load.close()
    report["idle_after_s"] = await wait_until(watcher.idle, "every counter at zero")
    report |= await verdict(f"sqlite:///{applied.folder / 'mico.db'}", load)
    report["budget"] = await budget(watcher, load)
    await watcher.http.aclose()
    return report, load


async def budget(watcher: Watcher, load: Load) -> dict[str, float]:
    """Return the month's use as both replicas together count it, beside the response tokens of the answers.

    A killed replica forgets its use of the last half second; only the former counts prompts.
    """
    listed = await watcher.http.get(f"{watcher.alive()[0]}/admin/api/quotas")
    (month,) = [
        quota for quota in listed.raise_for_status().json()["quotas"] if quota["amount"] == MONTH_TOKENS
    ]
    answered = sum(each.answer.completion_tokens for each in load.ended)
    return {"used_of_the_month": month["in_use"], "response_tokens_answered": answered}


def region_loss(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="mico-drill-") as path:
        applied = prepared(Path(path))
        try:
            _, apply_s = applied.terraform("apply", "-auto-approve")
            report, load = asyncio.run(drill(applied, options))
        finally:
            pids = applied.pids()
            _, destroy_s = applied.terraform("destroy", "-auto-approve")
        report |= {"first_apply_s": apply_s, "destroy_s": destroy_s}
        report["left_after_destroy"] = [name for name, pid in pids.items() if is_alive(pid)]
    report["texts_wrong"] = wrong_texts(
        options.model, [each.answer for each in load.ended], options.max_tokens
    )
    report["budget_forgotten"] = (
        report["budget"]["used_of_the_month"] < 0.95 * report["budget"]["response_tokens_answered"]
    )
    report["wrong_processes_replaced"] = report["back"]["replaced"] != report["lost"]["killed"]
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("drill", choices=["region-loss"])
    parser.add_argument("--model", type=Path, default=demo_model.FOLDER, help="folder of the weights")
    add_options(parser)
    report = region_loss(parser.parse_args())
    print(json.dumps(report))
    bad = ("failed", "rows_twice", "answers_without_a_row", "texts_wrong", "left_after_destroy")
    return 1 if any(report[name] for name in (*bad, "wrong_processes_replaced", "budget_forgotten")) else 0


if __name__ == "__main__":
    sys.exit(main())
