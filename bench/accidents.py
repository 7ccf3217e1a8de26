"""Measure a running federation at full size when clients vanish and when a site is killed in mid-answer.

    mico up --detach
    python -m bench.accidents --data alpaca_like.jsonl.zst --model mico/demo_model/weights

1. 50 clients vanish in the middle of their streams, then 10 before their first token (streamed and whole):
   how soon every site is idle again, and whether each query is in the usage table once.
2. A site is killed with SIGKILL while greedy streams run: how many answers went on elsewhere, whether every
   text equals that of plain `transformers` alone, how soon the killed site serves again once restarted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from bench.federation import Answered, ask, mismatches, prompts, real_mismatches
from mico.local.folder import Folder, Running

DEADLINE_S = 30.0


async def wait_until(holds: Callable[[], Awaitable[Any]], what: str) -> float:
    """Return the seconds until the condition holds. Raises AssertionError after a deadline."""
    began = time.perf_counter()
    while not await holds():
        assert time.perf_counter() - began < DEADLINE_S, f"not within {DEADLINE_S:.0f} s: {what}"
        await asyncio.sleep(0.01)
    return time.perf_counter() - began


class Federation:
    """A federation started by `mico up` on this machine, seen from outside."""

    def __init__(self, folder: Folder, running: Running, http: httpx.AsyncClient, model: str) -> None:
        self.folder, self.running, self.http, self.model = folder, running, http, model

    async def sites(self) -> list[dict[str, Any]]:
        listed = await self.http.get("/admin/api/sites")
        return list(listed.raise_for_status().json()["sites"])

    async def idle(self) -> bool:
        figures = ("running", "pending", "assigned", "token_load", "kv_reserved_tokens")
        return not any(site[name] for site in await self.sites() for name in figures)

    async def ready(self, name: str) -> bool:
        return any(site["name"] == name and site["state"] == "ready" for site in await self.sites())

    def recorded(self, prefix: str) -> Counter[str]:
        """Return the usage rows by status, of the queries whose request id begins with a prefix."""
        with sqlite3.connect(self.folder.path / "mico.db") as database:
            found = database.execute("select status from usage where request_id like ?", (f"{prefix}%",))
            return Counter(status for (status,) in found)


async def vanish(
    federation: Federation, name: str, count: int, *, stream: bool, after_token: bool
) -> dict[str, Any]:
    """Let `count` clients ask for a long answer and disconnect, all at once."""
    prompt = "Tell me everything about rivers. " * (1 if after_token else 100)

    async def one(number: int) -> None:
        body = {
            "model": federation.model,
            "messages": [{"role": "user", "content": prompt}],
            "stream": stream,
            "ignore_eos": True,
        }
        headers = {"x-request-id": f"{name}-{number}"}
        try:
            async with federation.http.stream(
                "POST", "/v1/chat/completions", json=body, headers=headers, timeout=60 if after_token else 0.2
            ) as response:
                assert response.status_code == 200, await response.aread()
                async for _ in response.aiter_bytes():
                    break
        except httpx.TimeoutException:
            assert not after_token, "no first token within a minute"

    await asyncio.gather(*map(one, range(count)))
    idle_s = await wait_until(federation.idle, "every site idle again")

    async def recorded() -> bool:
        return sum(federation.recorded(name).values()) >= count

    await wait_until(recorded, "every query recorded")
    return {"clients": count, "idle_again_s": round(idle_s, 3), "usage_rows": federation.recorded(name)}


async def kill_a_site(federation: Federation, options: argparse.Namespace) -> dict[str, Any]:
    chosen = prompts(options.data, options.count, options.seed)
    client = AsyncOpenAI(
        base_url=federation.running.base_url,
        api_key=federation.folder.key_file.read_text().strip(),
        max_retries=0,
    )
    asked = [
        asyncio.create_task(ask(client, federation.model, prompt, 2 * number + 1, options.max_tokens))
        for number, prompt in enumerate(chosen)
    ]
    victim = federation.running.sites[0]

    async def busy() -> bool:
        return any(
            s["name"] == victim.name and s["running"] >= 3 and s["tokens_total"]
            for s in await federation.sites()
        )

    await wait_until(busy, f"{victim.name} at work")
    await asyncio.sleep(1.0)  # well into its answers
    os.kill(victim.pid, signal.SIGKILL)
    ended = await asyncio.gather(*asked, return_exceptions=True)
    answers = [each for each in ended if isinstance(each, Answered)]
    mico = (sys.executable, "-m", "mico", "--folder", str(federation.folder.path))
    restart = [*mico, "up", "--detach", "--json"]
    await asyncio.to_thread(subprocess.run, restart, check=True, capture_output=True)

    async def back() -> bool:
        return await federation.ready(victim.name)

    back_s = await wait_until(back, f"{victim.name} back")
    await wait_until(federation.idle, "every site idle again")
    await client.close()
    return {
        "queries": len(chosen),
        "answered": len(answers),
        "errors": Counter(type(each).__name__ for each in ended if not isinstance(each, Answered)),
        "finish": Counter(each.finish for each in answers),
        "ready_after_restart_s": round(back_s, 2),
        "greedy_mismatches": real_mismatches(mismatches(options.model, answers, options.max_tokens))
        if options.model
        else None,
    }


async def run(options: argparse.Namespace) -> dict[str, Any]:
    folder = Folder(options.folder)
    running = folder.running()
    if running is None:
        raise SystemExit("nothing runs here; start it: mico up --detach")
    headers = {"authorization": f"Bearer {folder.key_file.read_text().strip()}"}
    async with httpx.AsyncClient(base_url=running.root_url, headers=headers) as http:
        model = (await http.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        federation = Federation(folder, running, http, model)
        tag = f"vanish-{time.time_ns()}"
        return {
            "vanished_in_mid_stream": await vanish(
                federation, f"{tag}-mid", 50, stream=True, after_token=True
            ),
            "vanished_in_prefill_streamed": await vanish(
                federation, f"{tag}-s", 5, stream=True, after_token=False
            ),
            "vanished_in_prefill_whole": await vanish(
                federation, f"{tag}-w", 5, stream=False, after_token=False
            ),
            "killed_site": await kill_a_site(federation, options),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, help="alpaca_like.jsonl.zst, or lines of that form"
    )
    parser.add_argument("--folder", type=Path, default=Path(".mico"), help="of the running federation")
    parser.add_argument("--model", type=Path, help="folder of the same weights, to compare greedy texts")
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(asyncio.run(run(parser.parse_args()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
