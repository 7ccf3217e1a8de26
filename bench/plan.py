"""Measure what planning a large batch takes: reading, what its prompts share, and the order of its lines.

`python -m bench.plan` writes a file of 50,000 lines, four questions about each document, and plans it in a
process of its own. Prints the conditions and, as the last line, JSON: seconds of processor and wall, memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from gateway.batches.line_table import LineTable
from gateway.batches.preview import preview
from gateway.batches.values import BatchLimits, Line, Order
from gateway.routing.prefixes import prefix_of

ENDPOINT = "/v1/chat/completions"
PER_DOCUMENT = 4
WORDS = 5000


def documents(lines: int, chars: int, seed: int) -> list[str]:
    rnd = random.Random(seed)
    words = ["".join(rnd.choices("abcdefghijklmnop", k=rnd.randint(2, 9))) for _ in range(WORDS)]
    return [" ".join(rnd.choices(words, k=chars // 6)) for _ in range(-(-lines // PER_DOCUMENT))]


def write(path: Path, lines: int, texts: list[str]) -> None:
    with path.open("w") as file:
        for at in range(lines):
            question = f"{texts[at // PER_DOCUMENT]}\n\nQuestion {at}: what does it say?"
            body = {"model": "m", "messages": [{"role": "user", "content": question}], "max_tokens": 200}
            asked = {"custom_id": str(at), "method": "POST", "url": ENDPOINT, "body": body}
            file.write(json.dumps(asked) + "\n")


def measured(path: Path) -> dict[str, Any]:
    """Plan the lines of a file, then put as many lines in blended order. Runs in a process of its own."""
    before_mb, began_s, cpu_s = _memory_mb(), time.monotonic(), time.process_time()
    planned = preview(path, ENDPOINT, BatchLimits())
    wall_s, plan_s, plan_mb = time.monotonic() - began_s, time.process_time() - cpu_s, _memory_mb()
    lengths, table = np.random.default_rng(0).lognormal(5, 1, planned.lines), LineTable()
    for at in range(planned.lines):
        prefix = prefix_of(f"Document {at // PER_DOCUMENT}. " * 200 + str(at), "t", "m")
        table.add(Line(at + 1, 0, str(at), 0, 100, 900, float(lengths[at])), prefix)
    cpu_s = time.process_time()
    ordered = sum(1 for _ in table.in_order(Order.BLEND, 320))
    return {
        **planned._asdict(),
        "plan_cpu_s": round(plan_s, 2),
        "plan_wall_s": round(wall_s, 2),
        "plan_mb": round(plan_mb),
        "mb_before": round(before_mb),
        "ordered": ordered,
        "order_cpu_s": round(time.process_time() - cpu_s, 2),
        "mb_at_most": round(_memory_mb()),
    }


def _memory_mb() -> float:
    """Return the most memory of this process so far (`ru_maxrss` counts that of its parent, too)."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.plan", description=__doc__)
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--chars", type=int, default=3_500, help="of each document")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines.jsonl"
        write(path, asked.lines, documents(asked.lines, asked.chars, asked.seed))
        print(f"{path.stat().st_size / 1e6:.0f} MB, Python {platform.python_version()}", flush=True)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(measured, (path,))
    print(json.dumps({"conditions": vars(asked), **found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
