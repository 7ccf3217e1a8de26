"""Run greedy streams through two gateways and four sites while one part after another fails.

    python -m bench.chaos --data alpaca_like.jsonl.zst
    python -m bench.chaos --data alpaca_like.jsonl.zst --faults hung-engine,disk-full --count 200

It starts a federation of its own: journals and SQLite on a small file system, or a Postgres primary with a
synchronous standby where the fault concerns replicas of a shared database. For each fault it runs `--count`
streams, or more until the fault is over, `--concurrency` at a time, beside a batch of 100 lines; the tenant
has quotas that suffice. A fault that takes longer than ten minutes is a complaint. A client whose
query is refused, or whose stream breaks because its own gateway died, asks the other gateway, as an SDK
would. Checked for each fault: every query is answered, each text equals that of plain `transformers` alone
(nothing repeated, nothing missing), each line of the batch is there once, each answer has one usage row with
its tokens, streams break only where their gateway ends or stands still, queries are refused only then and
while the disk is full, every counter is at zero in the end, and recovery takes no longer than the fault's
limit. Exit status 1 where one of these fails. A fault that this machine cannot have is reported as skipped: a
full disk and lost names need root (they mount), some faults need Postgres.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy.exc import SQLAlchemyError

from bench.federation import Answered
from bench.support import faults, faults_inside, faults_platform, faults_storage
from bench.support.chaos_batch import Batch
from bench.support.chaos_federation import (
    Federation,
    NotHere,
    database_at,
    small_disk,
    start,
    temporary_folder,
)
from bench.support.faults import Fault
from bench.support.streams import Load, StreamOutcome, add_options, verdict, wait_until, wrong_texts
from mico import demo_model

FAULTS: Mapping[str, Fault] = {
    **faults.FAULTS,
    **faults_platform.FAULTS,
    **faults_inside.FAULTS,
    **faults_storage.FAULTS,
}
STRUCK_AT = 0.25
FAULT_WITHIN_S = 600.0
BATCH_LINES = 100
MUST_BE_EMPTY = (
    "failed",
    "rows_twice",
    "answers_without_a_row",
    "rows_with_other_tokens",
    "batch_lines_wrong",
    "texts_wrong",
)


class Struck(NamedTuple):
    """The report of a fault's run, and its answers: of streams and of a batch's lines."""

    report: dict[str, Any]
    answers: list[Answered]


async def strike(federation: Federation, name: str, options: argparse.Namespace) -> Struck:
    """Run the streams and the batch of one fault, and inject it after a quarter of the streams."""
    await federation.restart()  # what an earlier fault left dead
    await federation.whole()
    fault = FAULTS[name]
    load = Load.from_options(federation.running.root_urls, federation.key, options)
    load.open = True
    batch = Batch(load.clients, load.texts[:BATCH_LINES], options.max_tokens)
    running = asyncio.create_task(load.run())
    try:
        await load.reached(STRUCK_AT)
        await batch.submit()
        began = time.perf_counter()
        found = await fault.inject(federation)
        found["lasted_s"] = round(time.perf_counter() - began, 1)
    finally:
        load.open = False
        await running
    batch_figures, batch_answers = await batch.answers()
    await load.close()
    idle_s = await wait_until(federation.watcher.idle, "every counter at zero")
    await federation.whole()
    rows = await verdict(federation.plan.database_url, load)
    report = {"fault": name, **found, **felt(load.ended, began), "idle_after_s": idle_s, **rows}
    return Struck(report | batch_figures, [each.answer for each in load.ended] + batch_answers)


def felt(ended: list[StreamOutcome], began: float) -> dict[str, float]:
    """Return what clients felt from the fault on: their longest silence within a stream, and how much longer
    than at worst before it the first token took.
    """
    silences = [each.silence_s for each in ended if each.silence_at >= began - 0.5]
    before = [each.answer.first_token_s for each in ended if each.began + each.answer.first_token_s < began]
    since = [each.answer.first_token_s for each in ended if each.began + each.answer.first_token_s >= began]
    return {
        "longest_silence_s": round(max(silences, default=0.0), 2),
        "longest_first_token_s": round(max(since, default=0.0), 2),
        "first_token_more_s": round(max(since, default=0.0) - max(before, default=0.0), 2),
    }


def complaints(report: Mapping[str, Any], fault: Fault) -> list[str]:
    """Return what went wrong in a fault's run; empty if it passed."""
    found = [f"{name}: {len(report[name])}" for name in MUST_BE_EMPTY if report[name]]
    if report["broken"] and not fault.breaks:
        found.append(f"broken: {sum(report['broken'].values())}")
    if report["refused"] and not (fault.refuses or fault.breaks):
        found.append(f"refused: {sum(report['refused'].values())}")
    for name, limit_s in fault.limits_s.items():
        if report[name] > limit_s:
            found.append(f"{name}: {report[name]}, at most {limit_s}")
    return found


async def run_group(names: list[str], options: argparse.Namespace, *, postgres: bool) -> list[Struck]:
    """Start one federation and strike it with each of these faults in turn."""
    struck: list[Struck] = []
    with (
        temporary_folder() as path,
        small_disk(Path(path) / "disk") as disk,
        database_at(disk, postgres=postgres) as database,
    ):
        federation = await start(Path(path), options.model, options.gateways, options.sites, database)
        try:
            for name in names:
                try:
                    async with asyncio.timeout(FAULT_WITHIN_S):
                        struck.append(await strike(federation, name, options))
                except NotHere as reason:
                    struck.append(Struck({"fault": name, "skipped": str(reason)}, []))
                except (AssertionError, OSError, SQLAlchemyError) as error:  # TimeoutError is one
                    struck.append(Struck({"fault": name, "complaints": [repr(error)]}, []))
                print(json.dumps(struck[-1].report), file=sys.stderr, flush=True)
        finally:
            await federation.stop()
    return struck


def groups(names: list[str]) -> Iterator[tuple[bool, list[str]]]:
    """Yield the faults that share a federation, and whether it has Postgres."""
    for postgres, each in groupby(
        sorted(names, key=lambda n: FAULTS[n].postgres), lambda n: FAULTS[n].postgres
    ):
        yield postgres, list(each)


def run(options: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    struck: list[Struck] = []
    for postgres, names in groups(options.faults):
        try:
            struck += asyncio.run(run_group(names, options, postgres=postgres))
        except NotHere as reason:
            struck += [Struck({"fault": name, "skipped": str(reason)}, []) for name in names]
    wrong = set(wrong_texts(options.model, [a for each in struck for a in each.answers], options.max_tokens))
    for report, answers in struck:
        if answers:
            report["texts_wrong"] = [each.request_id for each in answers if each.request_id in wrong]
            report["complaints"] = complaints(report, FAULTS[report["fault"]])
    wall_s = round(time.perf_counter() - began)
    return {"wall_s": wall_s, "faults": [report for report, _ in struck]}


def fault_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in FAULTS]:
        raise argparse.ArgumentTypeError(f"no fault {', '.join(unknown)}; there are: {', '.join(FAULTS)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=demo_model.FOLDER, help="folder of the weights")
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--sites", type=int, default=4, help="at least 4")
    parser.add_argument(
        "--faults", type=fault_names, default=list(FAULTS), help=f"of {', '.join(FAULTS)}; default: all"
    )
    add_options(parser)
    parser.set_defaults(concurrency=64, max_tokens=24)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leave no process, no mount
    report = run(options)
    print(json.dumps(report))
    return 1 if any(each.get("complaints") for each in report["faults"]) else 0


if __name__ == "__main__":
    sys.exit(main())
