"""Ask servers of other projects beside a native site: is every answer as when the server is asked itself?

    transformers serve --port 9001 …; mlx_lm.server --port 9002 …; guidellm mock-server --port 9003 …
    python -m bench.studies.foreign --data alpaca_like.jsonl.zst --server hf=http://127.0.0.1:9001,MODEL \\
        --server mlx=http://127.0.0.1:9002,MODEL --server mock=http://127.0.0.1:9003,MODEL,mock

`--server NAME=URL,MODEL[,SERVED]`: MODEL is the name at the server, SERVED the name for clients
(the demo model where absent, so that its queries spread over native and foreign sites alike). The prompts are
asked of each server directly, one at a time, then all together through the gateway, greedily, half of them
streamed. Each text is compared with that of the server (or `generate`, for the native site) that
gave it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from openai import APIStatusError, AsyncOpenAI

from bench.federation import Answered, ask, mismatches, prompts, real_mismatches
from bench.support.streams import Watcher, wait_until
from mico import demo_model
from mico.local.database import prepare_database
from mico.local.federation import start_all, start_process, stop_all
from mico.local.folder import Folder, Running, write_private
from mico.local.plan import Plan, choose_ports, to_toml
from mico.local.profiles import profiles

SLOTS = 4


class Foreign(NamedTuple):
    name: str
    url: str
    model: str
    served: str


def foreign(text: str) -> Foreign:
    name, _, rest = text.partition("=")
    url, model, *served = rest.split(",")
    return Foreign(name, url.removesuffix("/v1"), model, served[0] if served else demo_model.NAME)


def begin(folder: Folder, servers: list[Foreign], model: Path) -> Running:
    """Start a gateway, one native site, and a site in front of each server."""
    ports = choose_ports(0)
    plan = Plan(folder, (ports,), str(model), (profiles(1)[0],), folder.database_url, demo_model.NAME)
    running = start_all(plan)
    context_tokens = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    for server in servers:
        settings = {
            "site": server.name,
            "engine": "openai",
            "url": server.url,
            "model": server.model,
            "served_model": server.served,
            "gateways": [f"127.0.0.1:{ports.grpc}"],
            "token_file": str(folder.token_file),
            "slots": SLOTS,
            "context_tokens": context_tokens,  # some servers do not report it and accept any length
        }
        write_private(folder.config(server.name), to_toml(settings))
        process = start_process(folder, server.name, "site")
        running = replace(running, processes=(*running.processes, process))
        folder.save_state(running)
    return running


async def directly(server: Foreign, texts: list[str], most: int) -> dict[str, str]:
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        found = {}
        for text in texts:
            messages = [{"role": "user", "content": text}]
            body = {"model": server.model, "messages": messages, "temperature": 0, "max_tokens": most}
            answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
            found[text] = answer["choices"][0]["message"]["content"] or ""
    return found


async def expectations(server: Foreign, texts: list[str], most: int) -> dict[str, str]:
    """Ask each server directly; expect nothing of one that answers the same prompt differently, as some mocks
    do.
    """
    again = await directly(server, texts[:3], most)
    found = await directly(server, texts, most)
    return found if all(found[text] == answer for text, answer in again.items()) else {}


async def through(client: AsyncOpenAI, model: str, texts: list[str], most: int) -> list[Answered]:
    gate = asyncio.Semaphore(3 * SLOTS)

    async def one(number: int, text: str) -> Answered:
        async with gate:
            return await ask(client, model, text, number, most)

    return await asyncio.gather(*(one(number, text) for number, text in enumerate(texts)))


async def refusals(client: AsyncOpenAI, model: str) -> dict[str, int]:
    """Return the status of the answer to each bad query."""
    bad: dict[str, dict[str, Any]] = {
        "no such model": {"model": "no-such-model"},
        "prompt beyond the context": {"messages": [{"role": "user", "content": "word " * 100_000}]},
        "temperature 9": {"temperature": 9},
    }
    found = {}
    for name, changes in bad.items():
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 4,
        }
        try:
            await client.chat.completions.create(**{**body, **changes})
            found[name] = 200
        except APIStatusError as error:
            found[name] = error.status_code
    return found


async def run(options: argparse.Namespace) -> dict[str, Any]:
    servers: list[Foreign] = options.server
    texts = prompts(options.data, options.count, options.seed)
    expected = {server.name: await expectations(server, texts, options.max_tokens) for server in servers}
    with tempfile.TemporaryDirectory(prefix="mico-foreign-") as path:
        folder = Folder(Path(path) / "mico")
        folder.make()
        key = await asyncio.to_thread(prepare_database, folder, folder.database_url)
        running = begin(folder, servers, options.model)
        try:
            watcher = Watcher(lambda: [running.root_url], key)
            names = [site.name for site in running.sites]
            await wait_until(lambda: watcher.all_ready(names), "every site ready")
            client = AsyncOpenAI(base_url=running.base_url, api_key=key, max_retries=0, timeout=300)
            served = list(dict.fromkeys([demo_model.NAME, *(server.served for server in servers)]))
            answers = {
                model: await through(client, model, texts * options.rounds, options.max_tokens)
                for model in served
            }
            refused = {model: await refusals(client, model) for model in served}
            await wait_until(watcher.idle, "every counter at zero")
            await client.close()
            await watcher.http.aclose()
        finally:
            await asyncio.to_thread(stop_all, folder, running)
    return report(options, expected, answers) | {"refused": refused}


def report(
    options: argparse.Namespace, expected: dict[str, dict[str, str]], answers: dict[str, list[Answered]]
) -> dict[str, Any]:
    every = [each for some in answers.values() for each in some]
    different = [
        {
            "site": each.site,
            "prompt": each.prompt,
            "expected": expected[each.site][each.prompt],
            "text": each.text,
        }
        for each in every
        if expected.get(each.site) and expected[each.site][each.prompt] != each.text
    ]
    native = [each for each in every if each.site not in expected]
    return {
        "answers": len(every),
        "by_site": Counter(each.site for each in every),
        "finish": Counter(each.finish for each in every),
        "tokens": sum(each.completion_tokens for each in every),
        "never_the_same_twice": [site for site, texts in expected.items() if not texts],
        "different": different,
        "native_different": real_mismatches(mismatches(options.model, native, options.max_tokens)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, help="alpaca_like.jsonl.zst, or lines of its form"
    )
    parser.add_argument("--server", type=foreign, action="append", required=True)
    parser.add_argument("--model", type=Path, default=demo_model.FOLDER, help="of the native site")
    parser.add_argument("--count", type=int, default=24, help="different prompts")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions through the gateway")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    found = asyncio.run(run(parser.parse_args()))
    print(json.dumps(found))
    return 1 if found["different"] or found["native_different"] else 0


if __name__ == "__main__":
    sys.exit(main())
