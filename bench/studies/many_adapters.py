"""Count what few slots for many adapters cost, on the engine's own scheduler over counted iterations.

    python -m bench.studies.many_adapters --adapters 200 --slots 8

Queries with lengths of Alpaca, `--queries` for each adapter on average, in proportion to its place in the
list to the power of -exponent: all at once, and at parts of the rate at which an engine with a slot for
each answers them all. An iteration costs what `--iteration-ms` and, for a token of a prompt, `--token-us`
say: of 0.5B on an H100. `bound` is the share that no order exceeds: each adapter keeps a slot for its
longest answer at least. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

from bench.support.adapter_demand import Asked, arrivals, zipf_queries
from site_engine.core.adapter_slots import AdapterSlots
from site_engine.core.request import Request, Sampling
from site_engine.core.schedule_plan import SchedulePlan
from tests.support.counted_engine import CountedEngine

EXPONENTS, LOADS = (1.0, 1.5), (0.6, 0.3)
RANK = 16
CONTEXT_TOKENS, KV_TOKENS, TOKEN_BUDGET = 700, 400_000, 8_192


class Named(NamedTuple):
    """A variant that is served, by its name."""

    fingerprint: str
    rank: int = RANK
    eos_token_ids: tuple[int, ...] = ()


def count(
    asked: Sequence[Asked], due_s: Sequence[float], slots: int, given: argparse.Namespace
) -> dict[str, Any]:
    """Serve the queries, each when it is due, and return what it took."""
    placed: list[object] = []
    resident: list[bool] = []

    def seconds(plan: SchedulePlan) -> float:
        prompts = plan.tokens - len(plan.decoding)
        return float(given.iteration_ms * 1e-3 + prompts * given.token_us * 1e-6)

    adapters = AdapterSlots(slots, lambda variant, slot: placed.append(variant))
    engine = CountedEngine(
        {str(at): each.tokens for at, each in enumerate(asked)},
        seconds,
        kv_tokens=KV_TOKENS,
        slots=given.rows,
        token_budget=TOKEN_BUDGET,
        adapters=adapters,
    )
    chains = {each.query.chain: Named(each.query.chain) for each in asked}
    requests: list[Any] = []
    while len(requests) < len(asked) or engine.scheduler.has_work:
        if not engine.scheduler.has_work:
            engine.counts.seconds = max(engine.counts.seconds, due_s[len(requests)])
        while len(requests) < len(asked) and due_s[len(requests)] <= engine.counts.seconds:
            query, tokens = asked[len(requests)]
            sampling = Sampling(max_tokens=tokens, ignore_eos=True)
            request: Any = Request(str(len(requests)), query.prompt, sampling)
            request.variant = chains[query.chain]
            resident.append(query.chain in adapters.resident)
            engine.submit(request)
            requests.append(request)
        engine.step()
    waits_s = [each.first_token_s - at for each, at in zip(requests, due_s, strict=True)]
    first_s, in_slots_s = sorted(waits_s), sorted(compress(waits_s, resident))
    return {
        "slots": slots,
        "seconds": round(engine.counts.seconds, 2),
        "tokens_per_s": round(engine.counts.output / engine.counts.seconds),
        "placed": len(placed),
        "first_token_mean_s": round(sum(first_s) / len(first_s), 3),
        "first_token_p99_s": round(first_s[int(0.99 * (len(first_s) - 1))], 3),
        "resident": round(len(in_slots_s) / len(first_s), 3),
        "residents_p99_s": round(in_slots_s[int(0.99 * (len(in_slots_s) - 1))], 4) if in_slots_s else None,
    }


def bound_s(asked: Sequence[Asked], given: argparse.Namespace) -> float:
    longest: dict[str, int] = {}
    for each in asked:
        longest[each.query.chain] = max(each.tokens, longest.get(each.query.chain, 0))
    return float(sum(longest.values()) / given.slots * given.iteration_ms * 1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies.many_adapters",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--queries", type=int, default=4, help="for each adapter on average")
    parser.add_argument("--iteration-ms", type=float, default=1.2)
    parser.add_argument("--token-us", type=float, default=2.5)
    parser.add_argument("--seed", type=int, default=2)
    given = parser.parse_args()
    found = []
    total = given.adapters * given.queries
    for exponent in EXPONENTS:
        chains = [f"adapter-{number}" for number in range(given.adapters)]
        asked = zipf_queries(
            chains, total, exponent, vocab_size=50_000, context_tokens=CONTEXT_TOKENS, seed=given.seed
        )
        every = count(asked, [0.0] * total, given.adapters, given)
        per_s = total / every["seconds"]
        for load in (0.0, *LOADS):
            due_s = arrivals(total, per_s * load) if load else [0.0] * total
            some = count(asked, due_s, given.slots, given)
            found.append({"exponent": exponent, "load": load or "at once", **some})
            if not load:
                found[-1]["of_all_resident"] = round(every["seconds"] / some["seconds"], 3)
                found[-1]["bound"] = round(min(1.0, every["seconds"] / bound_s(asked, given)), 3)
            print(found[-1], flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
