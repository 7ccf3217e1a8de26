"""Measure streams over HTTP on one GPU beside `vllm serve`: first token, gaps, time per token, throughput.

    python -m bench.http --shape bench/models/llama-3.1-8b --data queries.jsonl --peer vllm,vllm4
    python -m bench.http --model FOLDER --data queries.jsonl --phases 30/s,30/s+penalty,256c

`queries.jsonl` has one JSON object a line with `prompt` and `response_tokens`; every answer has exactly that
many tokens. `--shape` makes random weights and a tokenizer in that shape first. A phase is `30/s` (Poisson
arrivals) or `256c` (clients that ask again when answered), with `+chat`, `+penalty`, `+schema` or
`+logprobs`: the last three in one request of twenty. `+guessed` asks so that an end token could end an
answer, so that the server cannot know its length. `+first` has 1,000 queries, whose largest gaps are then
compared with three times the 99th percentile of the phases after it. The servers run in turn, each all
phases; the first phase meets a server that has answered one query.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import zstandard

from bench.support.http_arrivals import Load, Question, measure
from bench.support.http_servers import SERVERS, Gpu, NotReady, Server, cpu_between, served

PHASES = "20/s,30/s,40/s,30/s+chat,30/s+penalty,30/s+schema,30/s+logprobs,256c"
FIRST_QUERIES, TIMES_LATER = 1_000, 3.0
PHASE = re.compile(r"(?:(?P<rate>[\d.]+)/s|(?P<clients>\d+)c)(?P<options>(?:\+\w+)*)")
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string"}, "sure": {"type": "number"}},
    "required": ["answer", "sure"],
}
EXTRAS: dict[str, dict[str, Any]] = {
    "penalty": {"presence_penalty": 0.5, "frequency_penalty": 0.2},
    "logprobs": {"logprobs": 3},
    "schema": {
        "ignore_eos": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
    },
}
CHAT_EXTRAS = {"logprobs": {"logprobs": True, "top_logprobs": 3}}
MAX_PROMPT_CHARS, MAX_TOKENS = 4_000, 1_024


def load_of(phase: str, within_s: float) -> Load:
    """Return the load that a phase names. Raises ValueError."""
    found = PHASE.fullmatch(phase)
    names = found["options"].split("+")[1:] if found else []
    special = [name for name in names if name not in ("chat", "first")]
    if found is None or set(special) - {"guessed", *EXTRAS} or len(special) > 1:
        kinds = ", ".join(["guessed", *EXTRAS])
        raise ValueError(f"no phase {phase!r}: write 30/s or 256c, then +chat, +first and one of {kinds}")
    chat = "chat" in names or "schema" in names
    extra: dict[str, Any] = {"ignore_eos": False} if special == ["guessed"] else {}
    for name in special:
        extra |= (CHAT_EXTRAS if chat else {}).get(name) or EXTRAS.get(name, {})
    rate, clients = float(found["rate"] or 0), int(found["clients"] or 0)
    every = 1 if special == ["guessed"] else 20
    return Load(per_s=rate, clients=clients, chat=chat, extra=extra, every=every, within_s=within_s)


def questions(data: Path, seed: int) -> list[Question]:
    """Return the queries of a file in random order, each prompt made unique by its first characters."""
    rnd = random.Random(seed)
    rows = [json.loads(line) for line in _lines(data)]
    rnd.shuffle(rows)
    return [
        Question(
            f"{rnd.randrange(1 << 24):06x}. {row['prompt'][:MAX_PROMPT_CHARS]}",
            max(2, min(MAX_TOKENS, int(row["response_tokens"]))),
        )
        for row in rows
    ]


def _lines(data: Path) -> Iterator[str]:
    with data.open("rb") as file:
        raw = zstandard.ZstdDecompressor().stream_reader(file) if data.suffix == ".zst" else file
        yield from io.TextIOWrapper(raw, encoding="utf-8")


def run_phases(name: str, server: Server, asked: Sequence[Question], options: argparse.Namespace) -> None:
    gpu = Gpu()
    gpu.start()
    at = 0
    first: dict[str, Any] | None = None
    for phase in options.phases.split(","):
        load = load_of(phase, options.within_s)
        is_first = "+first" in phase
        usual = FIRST_QUERIES if is_first else round(max(load.per_s * options.seconds, 6 * load.clients))
        count = options.count or usual
        part = [asked[(at + number) % len(asked)] for number in range(count)]
        at += count
        before, began_s = server.cpu(), time.perf_counter()
        found = measure(server.target, part, load)
        found["cpu_s"] = cpu_between(before, server.cpu())
        found["gpu"] = gpu.between(began_s + 3.0, time.perf_counter() - 0.5)
        print_record({"server": name, "phase": phase, **found})
        if is_first:
            first = found
        elif first is not None and "itl_ms" in found:
            print_record({"server": name, "first_queries_beside": phase, **beside_later(first, found)})


def beside_later(first: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Compare the largest gaps of the first queries with what is usual later; none may be over the limit."""
    limit_ms = round(TIMES_LATER * later["itl_ms"]["p99"], 1)
    over = [gap for gap in first.get("largest_gaps_ms", []) if gap > limit_ms]
    return {"limit_ms": limit_ms, "gaps_over": len(over), "largest_ms": over[:5]}


def started_as(log: Path) -> str:
    """Return what a site's log tells of the parts of its start, empty if there is no such log."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    messages = [json.loads(line)["message"] for line in lines if '"message": "the engine started in' in line]
    return messages[-1] if messages else ""


def forecasts_by(log: Path) -> str:
    """Return where a gateway's forecasts come from, as its log tells; empty if there is no such log.

    A gateway whose forecaster cannot be loaded, a large file that did not travel say, serves all the same.
    """
    if not log.exists():
        return ""
    failed = "no forecaster could be loaded" in log.read_text(errors="replace")
    return "past answers" if failed else "the model"


def start_of(server: Server, work: Path) -> dict[str, Any]:
    """Return what is known of a server's start; `work` has its logs."""
    found: dict[str, Any] = {"ready_s": server.ready_s, "first_token_s": server.first_token_s}
    found["start"] = started_as(work / "site.log")
    return found | {"forecasts": forecasts_by(work / "gateway.log")}


def print_record(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)
    if "ttft_ms" in record:
        figures = [record[f"{name}_ms"] for name in ("ttft", "itl", "tpot", "s_per_token", "longest_gap")]
        shown = " ".join(f"{each['p50']:8.1f} {each['p99']:8.1f}" for each in figures)
        wrong, rate = record["streams"] - record["whole"], record["tokens_per_s"]
        line = f"{record['server']:6} {record['phase']:14} {shown} {rate:7} tok/s {wrong} wrong"
        print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="JSON lines, plain or .zst")
    parser.add_argument("--shape", type=Path, help="folder with a config.json: make random weights like it")
    parser.add_argument("--model", type=Path, help="a model's folder; with --shape it is made there")
    parser.add_argument("--servers", default="mico", help=f"in this order, of {', '.join(SERVERS)}")
    parser.add_argument("--peer", default="", help="more servers, after those")
    parser.add_argument("--phases", default=PHASES)
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals in each open phase")
    parser.add_argument("--count", type=int, help="queries in every phase, instead of --seconds")
    parser.add_argument("--within-s", type=float, default=90.0, help="for all answers of a phase")
    parser.add_argument("--slots", type=int, default=256, help="answers at once in every server")
    parser.add_argument("--mico-config", default="", help="more lines of the site's configuration")
    parser.add_argument("--vllm-arguments", default="", help="more arguments of vllm serve")
    parser.add_argument("--work", type=Path, help="a folder for databases and logs, which are kept")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    servers = [name for name in f"{options.servers},{options.peer}".split(",") if name]
    for phase in options.phases.split(","):
        try:
            load_of(phase, 1.0)
        except ValueError as error:
            parser.error(str(error))
    if unknown := set(servers) - set(SERVERS):
        parser.error(f"no server {', '.join(sorted(unknown))}; there are {', '.join(SERVERS)}")
    if not (options.shape or options.model):
        parser.error("--shape or --model says what is served")
    asked = questions(options.data, options.seed)
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        model = options.model or work / "model"
        if options.shape and not (model / "config.json").exists():
            from bench.support.model_folders import write_model

            write_model(options.shape, model, (each.prompt for each in asked))
        for name in servers:
            extra = {"mico": options.mico_config, "vllm": options.vllm_arguments}
            try:
                with served(name, model, work / name, slots=options.slots, extra=extra) as server:
                    print_record({"server": name, **start_of(server, work / name)})
                    run_phases(name, server, asked, options)
            except NotReady as error:
                print_record({"server": name, "error": str(error)})


if __name__ == "__main__":
    main()
