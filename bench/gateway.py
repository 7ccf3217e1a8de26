"""Measure what a gateway adds to a query and costs, beside LiteLLM and smg: one client, one upstream.

    python -m bench.gateway --peer bare,litellm,smg --tools VENV/bin --rounds 5 --json
    python -m bench.gateway --only memory --queries 200000
    python -m bench.gateway --only profile              where Mico's CPU goes (needs py-spy)
    python -m bench.gateway --only workers --workers 1,2,4 --rounds 5

The peers live in an environment of their own: `pip install 'litellm[proxy]' smg`; `mico-lexical` is Mico with
the cheaper of its predictors, `bare` is uvicorn and gRPC with no gateway in between. Only
validated answers count; CPU-seconds are those of the gateway's processes, so that other work on the machine
spoils them least.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import product
from pathlib import Path
from typing import Any

from bench.support.contenders import CONTENDERS, tools_of
from bench.support.http_load import Connection, Tally, closed_loop, open_loop, quantile_ms, request, stats
from tests.support.gateway_process import GatewayProcess, Workspace, mico, process, upstream

UNARY_TOKENS = 16
STREAM_TOKENS = 150
SHORT_STREAM_TOKENS = 16
STREAMS = 100
# At a higher rate two cores would measure client and upstream. No multiple of the upstream's iterations
# a second, so that streams begin in every phase of them.
MAX_STREAMS_PER_S = 100.7
CONNECTIONS_OF_WORKER, SITES_OF_WORKER = 64, 2  # the kernel deals connections out unevenly, few most so
MAX_WARMING_UP = 20
ABORTS = 20
ABORTED_WITHIN_S = 10.0
GOALS = {
    "added_unary_p50_ms": (1.5, "at most"),
    "unary_per_cpu_s": (800, "at least"),
    "chunks_per_cpu_s": (25_000, "at least"),
    "added_first_token_p99_ms": (5.0, "at most"),
    "aborts_that_arrived": (2 * ABORTS, "at least"),
}

RATIOS = ("unary_per_cpu_s", "chunks_per_cpu_s", "added_unary_p50_ms", "added_first_token_p99_ms")


async def unary_latency(port: int, key: str, count: int) -> Tally:
    await closed_loop(
        port, key, count=count // 5, connections=1, tokens=UNARY_TOKENS, paced=False, stream=False
    )
    return await closed_loop(
        port, key, count=count, connections=1, tokens=UNARY_TOKENS, paced=False, stream=False
    )


async def cost(gateway: GatewayProcess, work: Callable[[], Awaitable[Tally]]) -> tuple[Tally, float]:
    before_s = gateway.cpu_s()
    tally = await work()
    return tally, gateway.cpu_s() - before_s


async def unary_cost(gateway: GatewayProcess, count: int) -> dict[str, Any]:
    tally, cpu_s = await cost(
        gateway,
        lambda: closed_loop(
            gateway.port,
            gateway.key,
            count=count,
            connections=16,
            tokens=UNARY_TOKENS,
            paced=False,
            stream=False,
        ),
    )
    return {
        "unary_per_cpu_s": round(len(tally.replies) / cpu_s),
        "unary": len(tally.replies),
        "unary_wrong": dict(Counter(tally.wrong)),
    }


async def streams_cost(gateway: GatewayProcess, streams: int) -> dict[str, Any]:
    """Count the chunks that clients got per CPU-second; chunks that a gateway joins count as one."""
    tally, cpu_s = await cost(
        gateway,
        lambda: closed_loop(
            gateway.port,
            gateway.key,
            count=streams,
            connections=min(STREAMS, streams),
            tokens=STREAM_TOKENS,
            paced=True,
            stream=True,
        ),
    )
    return {
        "chunks_per_cpu_s": round(tally.frames / cpu_s),
        "tokens_per_cpu_s": round(len(tally.replies) * STREAM_TOKENS / cpu_s),
        "streams": len(tally.replies),
        "streams_wrong": dict(Counter(tally.wrong)),
    }


async def first_token(workspace: Workspace, gateway: GatewayProcess, for_s: float) -> dict[str, Any]:
    """Run short streams at half the rate that a CPU-second of this gateway serves, beside the upstream at
    that pace.
    """
    tokens = SHORT_STREAM_TOKENS
    known, cpu_s = await cost(
        gateway,
        lambda: closed_loop(
            gateway.port, gateway.key, count=60, connections=8, tokens=tokens, paced=True, stream=True
        ),
    )
    per_s = min(0.5 * len(known.replies) / cpu_s, MAX_STREAMS_PER_S)
    there = await open_loop(gateway.port, gateway.key, per_s=per_s, for_s=for_s, tokens=tokens)
    direct = await open_loop(workspace.upstream_port, "none", per_s=per_s, for_s=for_s, tokens=tokens)
    first, first_direct = ([each.first_s for each in tally.replies] for tally in (there, direct))
    return {
        "half_load_streams_per_s": round(per_s, 1),
        "first_token_p50_ms": quantile_ms(first, 0.5),
        "first_token_p99_ms": quantile_ms(first, 0.99),
        "direct_first_token_p99_ms": quantile_ms(first_direct, 0.99),
        "added_first_token_p99_ms": round(quantile_ms(first, 0.99) - quantile_ms(first_direct, 0.99), 3),
        "first_token_wrong": dict(Counter(there.wrong + direct.wrong)),
    }


async def aborts(workspace: Workspace, gateway: GatewayProcess) -> dict[str, Any]:
    """Count the aborts that reach the upstream when clients leave in the middle."""
    arrived = {}
    for stream in (False, True):
        before = await stats(workspace.upstream_port)
        connections = [await Connection.open(gateway.port) for _ in range(ABORTS)]
        for number, connection in enumerate(connections):
            raw = request(gateway.key, 2_000, number, paced=True, stream=stream)
            connection.send(raw)
        await until(workspace, "begun", before["begun"] + ABORTS)
        for connection in connections:
            connection.leave()
        await until(workspace, "aborted", before["aborted"] + ABORTS)
        arrived[stream] = (await stats(workspace.upstream_port))["aborted"] - before["aborted"]
    return {
        "aborts_unary": arrived[False],
        "aborts_streamed": arrived[True],
        "aborts_that_arrived": arrived[False] + arrived[True],
    }


async def until(workspace: Workspace, what: str, count: int) -> None:
    """Wait until the upstream's counter reaches `count`, at most ABORTED_WITHIN_S."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + ABORTED_WITHIN_S
    while loop.time() < deadline_s:
        if (await stats(workspace.upstream_port))[what] >= count:
            return
        await asyncio.sleep(0.1)


async def measured(
    workspace: Workspace, gateway: GatewayProcess, direct_p50_ms: float, scale: float
) -> dict[str, Any]:
    unary = await unary_latency(gateway.port, gateway.key, round(500 * scale))
    p50_ms = quantile_ms([each.total_s for each in unary.replies], 0.5)
    return {
        "added_unary_p50_ms": round(p50_ms - direct_p50_ms, 3),
        "unary_p50_ms": p50_ms,
        **await unary_cost(gateway, round(3_000 * scale)),
        **await streams_cost(gateway, round(2 * STREAMS * scale)),
        **await first_token(workspace, gateway, 10.0 * scale),
        **await aborts(workspace, gateway),
        "rss_mib": gateway.rss_mib(),
    }


def host_loop_ms() -> float:
    """Time a fixed piece of work, median of nine: a shared host's speed changes."""
    took_s = []
    for _ in range(9):
        began_s = time.thread_time()
        sum(number & 7 for number in range(200_000))
        took_s.append(time.thread_time() - began_s)
    return quantile_ms(took_s, 0.5)


async def side_by_side(workspace: Workspace, options: argparse.Namespace) -> dict[str, Any]:
    """Measure Mico and its peers in every round, in alternating order.

    Return the medians, and for each peer the median of the ratios of Mico's figure to the peer's in a round.
    """
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in ("mico", *options.peer)}
    for turn in range(options.rounds):
        for name in list(rounds)[:: -1 if turn % 2 else 1]:
            rounds[name].append(await contender(workspace, name, options))
            print(json.dumps({name: rounds[name][-1]}), file=sys.stderr, flush=True)
    found: dict[str, Any] = {name: medians(each) for name, each in rounds.items()}
    for ours, theirs in product(rounds, rounds):
        if ours.startswith("mico") and not theirs.startswith("mico"):
            pairs = list(zip(rounds[ours], rounds[theirs], strict=True))
            found[f"{ours} / {theirs}"] = {
                figure: round(statistics.median(ratios), 3)
                for figure in RATIOS
                # a time may come out below 0 on a busy machine
                if (ratios := [one[figure] / other[figure] for one, other in pairs if other[figure] > 0])
            }
    return found


async def contender(workspace: Workspace, name: str, options: argparse.Namespace) -> dict[str, Any]:
    scale = options.scale / 4 if name == "litellm" else options.scale
    direct = await unary_latency(workspace.upstream_port, "none", 300)
    direct_p50_ms = quantile_ms([each.total_s for each in direct.replies], 0.5)
    before_ms = host_loop_ms()
    async with CONTENDERS[name](workspace) as gateway:
        return await measured(workspace, gateway, direct_p50_ms, scale) | {
            "direct_unary_p50_ms": direct_p50_ms,
            "load_average": os.getloadavg()[0],
            "host_loop_ms": [before_ms, host_loop_ms()],
        }


def medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of the numbers; of anything else there is no middle, and every round's is kept."""
    return {
        figure: statistics.median(each[figure] for each in rounds)
        if isinstance(first, int | float)
        else [each[figure] for each in rounds]
        for figure, first in rounds[0].items()
    }


async def memory(workspace: Workspace, options: argparse.Namespace) -> dict[str, Any]:
    """Run unary queries in ten parts and return the resident memory after each."""
    async with mico(workspace, "WARNING") as gateway:
        part, answered, rss = options.queries // 10, 0, []
        before_s = gateway.cpu_s()
        for _ in range(10):
            tally = await closed_loop(
                gateway.port, gateway.key, count=part, connections=16, tokens=4, paced=False, stream=False
            )
            answered += len(tally.replies)
            rss.append(gateway.rss_mib())
            print(json.dumps({"answered": answered, "rss_mib": rss[-1]}), file=sys.stderr, flush=True)
        cpu_s = gateway.cpu_s() - before_s
    return {"queries": answered, "rss_mib": rss, "unary_per_cpu_s_quiet_log": round(answered / cpu_s)}


async def profile(workspace: Workspace, options: argparse.Namespace) -> dict[str, Any]:
    """Sample the holder of the interpreter, by this package's innermost function and by the innermost of all;
    and the CPU of each thread, since code outside the interpreter is not in the samples.
    """
    sampler = shutil.which("py-spy") or workspace.tools / "py-spy"
    found: dict[str, Any] = {}
    async with mico(workspace) as gateway:
        loads: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
            "unary": lambda: unary_cost(gateway, round(6_000 * options.scale)),
            "streams": lambda: streams_cost(gateway, round(4 * STREAMS * options.scale)),
        }
        for name, load in loads.items():
            raw = workspace.folder / f"{name}.samples"
            sampling = (
                "record",
                "-p",
                gateway.process.pid,
                "-f",
                "raw",
                "-o",
                raw,
                *("-r", 200, "-d", 8, "--gil"),
            )
            async with process("py-spy", workspace, sampler, *sampling) as sampler_process:
                before = gateway.threads()
                load_figures = await load()
                spent = {name: round(s - before.get(name, 0), 2) for name, s in gateway.threads().items()}
                load_figures["cpu_s_of_threads"] = {name: s for name, s in spent.items() if s > 0.02}
                await sampler_process.wait()
            found[name] = load_figures | where(raw.read_text())
    return found


async def workers(workspace: Workspace, options: argparse.Namespace) -> dict[str, Any]:
    """Ask gateways of one and of more workers as fast as they answer.

    A gateway gets one core a worker where the machine has as many again for the client and the sites; without
    them `ratio` says what the machine does, `ratio_counted` what the cores of the workers would do alone.
    """
    most, cores = max(options.workers), sorted(os.sched_getaffinity(0))
    others = set(cores[most:])
    found: dict[str, Any] = {"own_cores": len(others) >= 3 * most, "cores": len(cores)}
    rounds: dict[int, list[dict[str, float]]] = {number: [] for number in options.workers}
    for turn in range(options.rounds):
        for number in options.workers[:: -1 if turn % 2 else 1]:
            own = set(cores[:number]) if found["own_cores"] else set(cores)
            folder = workspace.folder / f"{number}-{turn}"
            folder.mkdir()
            fresh = Workspace(folder, workspace.tools, workspace.python)
            try:
                rounds[number].append(await asked_at_once(fresh, number, own, others or own, options))
            finally:
                os.sched_setaffinity(0, cores)
            print(json.dumps({"workers": number, **rounds[number][-1]}), file=sys.stderr, flush=True)
    for number, figures in rounds.items():
        found[str(number)] = {key: statistics.median(each[key] for each in figures) for key in figures[0]}
    one = found[str(options.workers[0])]
    for number in options.workers[1:]:
        more, times = found[str(number)], number / options.workers[0]
        more["ratio"] = round(more["queries_per_s"] / one["queries_per_s"], 3)
        more["ratio_counted"] = round(times * more["queries_per_cpu_s"] / one["queries_per_cpu_s"], 3)
    return found


async def asked_at_once(
    workspace: Workspace, number: int, own: set[int], others: set[int], options: argparse.Namespace
) -> dict[str, float]:
    """Start a gateway of `number` workers on its own cores, client and sites on the others, and ask it."""
    connections, count = CONNECTIONS_OF_WORKER * number, round(6_000 * options.scale) * number
    async with AsyncExitStack() as stack:
        os.sched_setaffinity(0, others)
        for site in range(SITES_OF_WORKER * number):
            name = f"site-{site}"
            await stack.enter_async_context(
                upstream(workspace, options.iteration_ms, site=name, workers=number)
            )
        os.sched_setaffinity(0, own)
        gateway = await stack.enter_async_context(mico(workspace, workers=number))
        os.sched_setaffinity(0, others)

        async def ask(queries: int) -> Tally:
            return await closed_loop(
                gateway.port,
                gateway.key,
                count=queries,
                connections=connections,
                tokens=UNARY_TOKENS,
                paced=False,
                stream=False,
            )

        for _ in range(MAX_WARMING_UP):  # a worker may still start, or wait for its sites
            if not (await ask(count // 4)).wrong:
                break
        began_s, client_s = time.perf_counter(), time.process_time()
        tally, cpu_s = await cost(gateway, lambda: ask(count))
        took_s = time.perf_counter() - began_s
    if tally.wrong:
        raise SystemExit(f"{len(tally.wrong)} of {count} answers are wrong: {tally.wrong[:3]}")
    return {
        "queries_per_s": round(count / took_s, 1),
        "queries_per_cpu_s": round(count / cpu_s, 1),
        "gateway_cores": round(cpu_s / took_s, 2),
        "client_cores": round((time.process_time() - client_s) / took_s, 2),
    }


def where(samples: str) -> dict[str, Any]:
    """Return the shares of samples by function itself, and by this package's function with callees."""
    under: Counter[str] = Counter()
    itself: Counter[str] = Counter()
    for line in samples.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = [frame.rpartition(":")[0] for frame in stack.split(";")]
        ours = {frame for frame in frames if "gateway/" in frame or "predictor/" in frame}
        under.update(dict.fromkeys(ours, int(count)))
        itself[frames[-1]] += int(count)
    total = max(1, itself.total())
    return {
        "samples": total,
        "by_ours_with_all_under_it": {name: round(n / total, 3) for name, n in under.most_common(45)},
        "by_innermost": {name: round(n / total, 3) for name, n in itself.most_common(15)},
    }


PARTS = {"peers": side_by_side, "memory": memory, "profile": profile, "workers": workers}


async def run(options: argparse.Namespace) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        folder = options.folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="mico-bench-"))
        )
        folder.mkdir(parents=True, exist_ok=True)
        workspace = Workspace(folder, tools_of(options.tools), options.python)
        if options.only != "workers":  # which has sites of its own
            await stack.enter_async_context(upstream(workspace, options.iteration_ms))
        return await PARTS[options.only](workspace, options)


def missed(figures: dict[str, Any]) -> list[str]:
    return [
        f"{name} is {figures[name]}, {sense} {goal} is the goal"
        for name, (goal, sense) in GOALS.items()
        if (figures[name] > goal) == (sense == "at most") and figures[name] != goal
    ]


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", type=lambda text: [each for each in text.split(",") if each], default=[])
    parser.add_argument("--only", choices=PARTS, default="peers")
    parser.add_argument("--tools", type=Path, help="the folder of litellm's and smg's programs")
    parser.add_argument("--python", default=sys.executable, help="another Python 3.11 for Mico and bare")
    parser.add_argument("--folder", type=Path, help="keep logs here")
    parser.add_argument("--scale", type=float, default=1.0, help="fewer or more of everything")
    parser.add_argument("--queries", type=int, default=200_000, help="of the part memory")
    parser.add_argument("--workers", type=_numbers, default=[1, 2], help="of the part workers")
    parser.add_argument("--rounds", type=int, default=1, help="of the parts peers and workers")
    parser.add_argument("--iteration-ms", type=float, default=20.0)
    parser.add_argument("--json", action="store_true", help="one line of JSON, without a summary")
    options = parser.parse_args()
    found = asyncio.run(run(options))
    if not options.json and "mico" in found:
        print("\n".join(missed(found["mico"])) or "every goal is met")
    print(json.dumps(found))
    return 1 if "mico" in found and missed(found["mico"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
