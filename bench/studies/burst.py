"""Measure a burst of streams at a gateway, beside another version: first tokens, and CPU.

    git worktree add ../before REVISION && python -m bench.studies.burst --before ../before

Both gateways run and get bursts in turn, each from clients that are connected already and send at once.
The upstream answers each query with a first token at once and others in iterations. A ratio is the median
over all rounds of one figure now to that before, with its quartiles; from new processes several times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from bench.support.http_load import Connection, Tally, quantile_ms, send_and_count
from tests.support.gateway_process import GatewayProcess, Workspace, mico, upstream
from tests.support.scripted_upstream import MODEL, prompt

WORDS = (
    "what",
    "is",
    "the",
    "weather",
    "of",
    "these",
    "northern",
    "islands",
    "like",
    "in",
    "an",
    "ordinary",
    "year",
)


def request(key: str, tokens: int, number: int, words: int) -> bytes:
    """Return a streamed request whose prompt has so many words, rotated so that no two are alike."""
    rest = " ".join(WORDS[(number + place) % len(WORDS)] for place in range(words))
    body = {
        "model": MODEL,
        "prompt": f"{prompt(tokens, number, paced=True)} {rest}",
        "max_tokens": 4 * tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    raw = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}authorization: Bearer {key}\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw


async def burst(gateway: GatewayProcess, clients: int, tokens: int, words: int) -> dict[str, float]:
    """Send one query from each client at once. Return quantiles of first tokens, and CPU a query, in ms."""
    connections = [await Connection.open(gateway.port) for _ in range(clients)]
    requests = [request(gateway.key, tokens, number, words) for number in range(clients)]
    tally, before_s = Tally(), gateway.cpu_s()
    await asyncio.gather(*map(send_and_count, [tally] * clients, connections, requests))
    cpu_s = gateway.cpu_s() - before_s
    for connection in connections:
        connection.leave()
    first = [each.first_s for each in tally.replies]
    if tally.wrong or len(first) != clients:
        raise SystemExit(f"{len(first)} of {clients} answers; wrong: {tally.wrong[:3]}")
    quantiles = {f"p{round(100 * q)}": quantile_ms(first, q) for q in (0.0, 0.1, 0.5, 0.9, 0.99)}
    mean = 1000 * statistics.mean(first)
    return {**quantiles, "mean": round(mean, 2), "cpu_a_query": round(1000 * cpu_s / clients, 3)}


async def one_start(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Start a gateway of each tree and give them bursts in turn, in alternating order."""
    trees = {"now": Path.cwd()} | ({"before": options.before} if options.before else {})
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    async with AsyncExitStack() as stack:
        gateways = {}
        for name, tree in trees.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            workspace = Workspace(folder, folder, tree=tree)
            await stack.enter_async_context(upstream(workspace, options.iteration_ms))
            gateways[name] = await stack.enter_async_context(mico(workspace))
        for turn in range(-2, options.rounds):
            for name in list(gateways)[:: -1 if turn % 2 else 1]:
                found = await burst(gateways[name], options.clients, options.tokens, options.words)
                if turn >= 0:  # the first two warm up
                    rounds[name].append(found)
    return rounds


def summary(rounds: dict[str, list[dict[str, float]]]) -> dict[str, object]:
    figures = rounds["now"][0]
    found: dict[str, object] = {
        name: {figure: statistics.median(each[figure] for each in all_of) for figure in figures}
        for name, all_of in rounds.items()
    }
    if "before" in rounds:
        pairs = list(zip(rounds["now"], rounds["before"], strict=True))
        for figure in figures:
            ratios = [now[figure] / before[figure] for now, before in pairs]
            quartiles = [round(each, 3) for each in statistics.quantiles(ratios, n=4)]
            found[f"{figure}, now / before"] = quartiles
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, help="a worktree to compare with")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10, help="bursts at each, in each start")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--words", type=int, default=60, help="of each prompt")
    parser.add_argument("--iteration-ms", type=float, default=20.0)
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.starts):
        for name, found in asyncio.run(one_start(options)).items():
            rounds.setdefault(name, []).extend(found)
    print(json.dumps({"load_average": os.getloadavg()[0], **summary(rounds)}))


if __name__ == "__main__":
    main()
