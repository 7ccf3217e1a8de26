"""Measure how long chats wait for their first token beside a batch, on counted iterations.

`python -m bench.blend_chats` lets chats arrive at random beside each order of a batch, on the engine's own
scheduler. The last line is JSON: p50 and p99 of the seconds to the first token, and the
seconds of the batch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from bench.blend import NAMED, NO_DATA, TOKEN_BUDGET, Job, as_requests, lines_of, seconds_of
from bench.support.offline_orders import Fed
from bench.support.offline_work import Line, draw
from gateway.batches.values import Order
from site_engine.core.remaining_curve import RemainingCurve
from site_engine.core.request import Lane, Request
from tests.support.counted_engine import CountedEngine

CHAT = "chat "
MAX_TIMES = 20  # the seconds of computing that a batch takes at most


def chats(rate: float, seconds: float, seed: int) -> list[tuple[float, Line]]:
    """Return chats in the order of their arrivals, in seconds; `rate`: a second."""
    rnd = np.random.default_rng(seed + 77)
    arrivals = np.cumsum(rnd.exponential(1 / rate, int(rate * seconds))) if rate else np.zeros(0)
    lines = draw({"chats": len(arrivals)}, Path(), seed + 1) if len(arrivals) else []
    return list(zip(arrivals.tolist(), lines, strict=True))


def as_chat(at: int, line: Line) -> Request:
    first = (1 << 60) + (at << 24)
    known = RemainingCurve.exactly(line.response_tokens)
    return Request(f"{CHAT}{at}", range(first, first + line.prompt_tokens), remaining=known, lane=Lane.CHAT)


class Beside:
    """A site with lines of a batch, fed as the gateway feeds it, and chats that arrive meanwhile."""

    def __init__(self, job: Job, how: Order, arrivals: list[tuple[float, Line]]) -> None:
        lines = lines_of(job)
        expected, self._request = as_requests(job, lines)
        self._fed, self._arrivals, self._lines = Fed(expected, how, job.rows), arrivals, len(lines)
        lengths = {str(at): line.response_tokens for at, line in enumerate(lines)}
        lengths |= {f"{CHAT}{at}": line.response_tokens for at, (_, line) in enumerate(arrivals)}
        self._engine = CountedEngine(
            lengths, seconds_of, kv_tokens=job.kv_tokens, slots=job.rows, token_budget=TOKEN_BUDGET
        )

    def run(self) -> dict[str, Any]:
        """Run until the batch has ended, and return how long the chats waited that came before that."""
        counts, arrived, left = self._engine.counts, 0, self._lines
        while left:
            waiting = len(self._engine.scheduler.queue)
            while (at := self._fed.next(waiting)) is not None:
                request = self._request(at)
                request.any_order, request.prefill_heavy = self._fed.any_order, self._fed.heavy[at]
                self._engine.scheduler.queue.push(request)
            while arrived < len(self._arrivals) and self._arrivals[arrived][0] <= counts.seconds:
                self._engine.submit(as_chat(arrived, self._arrivals[arrived][1]))
                arrived += 1
            for request in self._engine.step():
                if not request.id.startswith(CHAT):
                    self._fed.ended(int(request.id))
                    left -= 1
        first_s = [
            counts.first_token_s.get(f"{CHAT}{at}", counts.seconds) - self._arrivals[at][0]
            for at in range(arrived)
        ]
        p50, p99 = np.quantile(first_s, [0.5, 0.99]).tolist()
        return {
            "chats": arrived,
            "p50_s": round(p50, 4),
            "p99_s": round(p99, 4),
            "took_s": round(counts.seconds, 1),
        }


def compare(job: Job, rate: float, orders: list[Order]) -> dict[str, Any]:
    arrivals = chats(rate, MAX_TIMES * job.seconds, job.seed)
    return {how.value: Beside(job, how, arrivals).run() for how in orders}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.blend_chats", description=__doc__)
    parser.add_argument("--workload", action="append", choices=sorted(NAMED))
    parser.add_argument("--data", default="", help="folder with traces and lengths of responses")
    parser.add_argument("--chats", type=float, default=4.0, help="a second")
    parser.add_argument("--orders", nargs="+", type=Order, default=[Order.LONGEST, Order.BLEND])
    parser.add_argument("--seconds", type=float, default=12.0, help="of computing in each workload")
    parser.add_argument("--kv-tokens", type=int, default=75_000)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--wrong-by", type=float, default=0.0, help="standard deviation of log forecasts")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    found = {}
    for name in asked.workload or NO_DATA:
        job = Job(
            name,
            "",
            asked.wrong_by,
            "peak",
            asked.seconds,
            asked.kv_tokens,
            asked.rows,
            asked.seed,
            asked.data,
        )
        found[name] = compare(job, asked.chats, asked.orders)
        print(name, found[name], flush=True)
    print(json.dumps({"conditions": vars(asked), "workloads": found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
