"""Compare the CPU of a query and of a chunk at a gateway in each format of the API, and in an older version.

    git worktree add ../before v0.2.0 && python -m bench.studies.formats --before ../before

Chats at today's gateway beside chats at the older one, then Responses and Messages beside chats. The two of a
pair have a gateway each and are asked at the same time, since the speed of a core changes by a fifth within a
second; and from new processes several times, since two processes of one program differ too. CPU is the
kernel's count of the gateway's nanoseconds. Only answers that equal the upstream's text count. The goals: a
chat costs no more than before, Responses and Messages at most a quarter more than a chat. A ratio is the
median over all rounds, with the interval of 95% that bootstrapping finds (starts first, then the rounds of
each).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from bench.support.http_load import Connection, Reply, Tally, send_and_count
from tests.support.gateway_process import GatewayProcess, Workspace, mico, upstream
from tests.support.scripted_upstream import MODEL, prompt, words

ITERATION_MS = 20.0
PAIRS = {  # the ratio that the cost of each first one may have to the second's
    ("chat now", "chat before"): 1.0,
    ("responses now", "chat now"): 1.25,
    ("messages now", "chat now"): 1.25,
}
RESAMPLES = 4_000


class Format(NamedTuple):
    """One endpoint: the body of a request, the text of a whole answer, the text of an event that has one."""

    path: str
    body: Callable[[str, int], dict[str, Any]]
    whole: Callable[[Any], str]
    piece: Callable[[Any], str | None]


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


FORMATS = {
    "chat": Format(
        "/v1/chat/completions",
        lambda text, most: {"messages": _messages(text), "max_tokens": most},
        lambda body: str(body["choices"][0]["message"]["content"]),
        lambda event: event["choices"][0]["delta"].get("content") if event["choices"] else None,
    ),
    "responses": Format(
        "/v1/responses",
        lambda text, most: {"input": text, "max_output_tokens": most},
        lambda body: str(body["output"][0]["content"][0]["text"]),
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else None,
    ),
    "messages": Format(
        "/v1/messages",
        lambda text, most: {"messages": _messages(text), "max_tokens": most},
        lambda body: str(body["content"][0]["text"]),
        lambda event: event["delta"]["text"] if event["type"] == "content_block_delta" else None,
    ),
}


class Load(NamedTuple):
    """Queries with this many words of answer, a query a connection at once."""

    connections: int
    tokens: int
    stream: bool


LOADS = {"query": Load(16, 16, False), "lone_query": Load(1, 16, False), "chunk": Load(50, 150, True)}

Rounds = list[tuple[float, float]]  # CPU-seconds of a query or of a chunk at both of a pair, of one start


async def cost(gateway: GatewayProcess, api: Format, load: Load, count: int) -> float:
    """Return the CPU-seconds of a query, or of a chunk of the upstream where answers are streamed.

    The gateway may join chunks for the client.
    """
    tally, numbers = Tally(), iter(range(count))

    async def client() -> None:
        connection = await Connection.open(gateway.port)
        for number in numbers:
            text = prompt(load.tokens, number, paced=load.stream)
            body = {"model": MODEL, "stream": load.stream, **api.body(text, 4 * load.tokens)}
            await send_and_count(tally, connection, request(api.path, gateway.key, body))
        connection.leave()

    before_s = gateway.cpu_s()
    await asyncio.gather(*(client() for _ in range(load.connections)))
    cpu_s = gateway.cpu_s() - before_s
    read = pieces_of if load.stream else whole_of
    answers = [read(api, reply) for reply in tally.replies]
    right = "".join(words(load.tokens))
    wrong = tally.wrong + [text for pieces in answers if (text := "".join(pieces)) != right]
    if wrong or len(answers) != count:
        raise SystemExit(f"{len(answers)} of {count} answers, {len(wrong)} of them wrong: {wrong[:3]}")
    return cpu_s / (count * load.tokens if load.stream else count)


def request(path: str, key: str, body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}authorization: Bearer {key}\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw


def whole_of(api: Format, reply: Reply) -> list[str]:
    return [api.whole(json.loads(reply.body))]


def pieces_of(api: Format, reply: Reply) -> list[str]:
    data = [line.removeprefix(b"data: ") for line in reply.body.split(b"\n") if line.startswith(b"data: ")]
    events = [json.loads(each) for each in data if each != b"[DONE]"]
    return [piece for event in events if (piece := api.piece(event))]


async def compare(pair: tuple[str, str], turn: int, options: argparse.Namespace) -> dict[str, Rounds]:
    """Start the two gateways of a pair, now one first and now the other, and ask both in every round, after
    one that warms up.
    """
    counts = {"query": options.queries, "lone_query": options.lone, "chunk": options.streams}
    found: dict[str, Rounds] = {part: [] for part in LOADS}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mico-bench-")))
        started = {}
        for number, name in enumerate(pair[:: -1 if turn % 2 else 1]):
            api, version = name.split()
            own = folder / str(number)
            own.mkdir()
            workspace = Workspace(own, own, tree=options.before if version == "before" else Path.cwd())
            await stack.enter_async_context(upstream(workspace, ITERATION_MS))
            started[name] = (await stack.enter_async_context(mico(workspace)), FORMATS[api])
        for number in range(options.rounds + 1):
            for part, load in LOADS.items():
                asked = [cost(*each, load, counts[part]) for each in started.values()]
                costs = dict(zip(started, await asyncio.gather(*asked), strict=True))
                if number:
                    found[part].append((costs[pair[0]], costs[pair[1]]))
    return found


async def run(options: argparse.Namespace) -> dict[str, Any]:
    pairs = {pair: most for pair, most in PAIRS.items() if options.before or "chat before" not in pair}
    if options.chats:
        pairs = {pair: most for pair, most in pairs.items() if "chat before" in pair}
    starts: dict[tuple[str, str], list[dict[str, Rounds]]] = {pair: [] for pair in pairs}
    found: dict[str, Any] = {}
    for number in range(options.starts):
        for pair, most in pairs.items():
            starts[pair].append(await compare(pair, number, options))
            found[" / ".join(pair)] = {
                part: summary([each[part] for each in starts[pair]], most) for part in LOADS
            }
        found |= {"starts": number + 1, "load_average": os.getloadavg()[0]}
        print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def summary(starts: list[Rounds], most: float) -> dict[str, Any]:
    """Return the medians in microseconds, the ratio with its interval, and whether this is below `most`."""
    ratios = [[one / other for one, other in rounds] for rounds in starts]
    draw = random.Random(0)
    resampled = sorted(
        statistics.median(
            each
            for start in draw.choices(ratios, k=len(ratios))
            for each in draw.choices(start, k=len(start))
        )
        for _ in range(RESAMPLES)
    )
    low, high = resampled[RESAMPLES // 40], resampled[-1 - RESAMPLES // 40]
    rounds = list(chain.from_iterable(starts))
    return {
        "cpu_us": [round(1e6 * statistics.median(each), 1) for each in zip(*rounds, strict=True)],
        "ratio": round(statistics.median(one / other for one, other in rounds), 3),
        "interval": [round(low, 3), round(high, 3)],
        "goal": "met" if high <= most else "missed" if low > most else "open",
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies.formats",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--before", type=Path, help="a tree of an older version, whose chats are measured too"
    )
    parser.add_argument("--chats", action="store_true", help="only chats, and the older ones")
    parser.add_argument("--starts", type=int, default=5, help="times that the gateways start anew")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of a start")
    parser.add_argument("--queries", type=int, default=300, help="unary queries of a format in a round")
    parser.add_argument("--lone", type=int, default=80, help="unary queries one at a time in a round")
    parser.add_argument("--streams", type=int, default=50, help="streams of a format in a round")
    options = parser.parse_args()
    found = asyncio.run(run(options))
    print(json.dumps(found))
    goals = [part["goal"] for name, parts in found.items() if "/" in name for part in parts.values()]
    return int("missed" in goals)


if __name__ == "__main__":
    raise SystemExit(main())
