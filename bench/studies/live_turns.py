"""Count the turns of conversations that go to another site than the turn before, over a running gateway.

    mico up --detach
    python -m bench.studies.live_turns --key KEY --runs 6        # --again: the same conversations in each run

Eight conversations of six turns begin at once; each turn is sent when the last one has ended. Prints the
turns moved, and the median of the seconds that a later turn takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

import httpx

CONVERSATIONS, TURNS, ANSWER_TOKENS = 8, 6, 12


class Turn(NamedTuple):
    site: str
    seconds: float


def converse(client: httpx.Client, model: str, run: str, number: int) -> list[Turn]:
    """Hold one conversation; return where each turn was answered. Raises httpx.HTTPError."""
    messages = [{"role": "system", "content": f"You are helper number {number}{run}."}]
    turns = []
    for turn in range(TURNS):
        question = f"Question {turn} of {number}: say a word about rivers."
        messages.append({"role": "user", "content": question})
        body = {"model": model, "messages": messages, "max_tokens": ANSWER_TOKENS}
        headers = {"x-session-id": f"{number}{run}"}
        reply = client.post("chat/completions", json=body, headers=headers).raise_for_status()
        messages.append(reply.json()["choices"][0]["message"])
        turns.append(Turn(reply.headers["x-mico-site"], reply.elapsed.total_seconds()))
    return turns


def moved(conversations: Sequence[Sequence[Turn]]) -> int:
    return sum(before.site != after.site for turns in conversations for before, after in pairwise(turns))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies.live_turns",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8080/v1/")
    parser.add_argument("--key", required=True)
    parser.add_argument("--model", default="mico-demo")
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--again", action="store_true", help="the same conversations in each run")
    options = parser.parse_args()
    counts = []
    bearer = {"authorization": f"Bearer {options.key}"}
    with (
        httpx.Client(base_url=options.url, headers=bearer, timeout=60.0) as client,
        ThreadPoolExecutor(CONVERSATIONS) as pool,
    ):
        for number in range(options.runs):
            run = "" if options.again else f" in run {number}"
            held = list(pool.map(partial(converse, client, options.model, run), range(CONVERSATIONS)))
            counts.append(moved(held))
            later_s = median(turn.seconds for turns in held for turn in turns[1:])
            print(f"{counts[-1]} of {CONVERSATIONS * (TURNS - 1)} turns moved, {later_s:.3f} s a turn")
    few = sum(each <= 2 for each in counts)
    print(f"at most 2 in {few} of {options.runs} runs, {fmean(counts):.1f} on average")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
