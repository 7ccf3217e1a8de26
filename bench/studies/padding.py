"""Compare MICO's padded batch with static batches and packed tokens, in the engine's loop, on Alpaca lengths.

    python -m bench.studies.padding --corpus data/length_corpus.parquet [--seeds 5] [--batches 2,3,4,6,8,10]
--json

Counts passes through the model, the length of the KV cache summed over passes (the paper's cumulative KV
length), and places of it (length times rows). Counts depend on lengths alone, so the forward pass is replaced
by fixed logits; tests/laws/engine_dense_test.py shows that each of these runners is exact.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import transformers

from mico.simulation import workloads
from mico.simulation.queries import Query
from site_engine.core.request import Request, Sampling
from site_engine.core.request_queue import POLICIES, Policy
from site_engine.core.schedule_plan import SchedulePlan
from site_engine.engine.build import allocate_kv_cache
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.model import attention_context
from site_engine.model.loader import LoadedModel, from_model
from site_engine.model.runner import Logits, PackedRunner, Runner
from site_engine.model.torch_attention import ReferenceContext
from tests.support.model_families import random_model
from tests.support.padded_batch import PaddedRunner

QUERIES = 200
VOCAB = 16
CONTEXT = 4096
PAPER_ITERATIONS = 1.79
PAPER_KV_LENGTH = -0.4489


@dataclass(slots=True)
class Cost:
    """`kv_places`: rows times KV length for a padded batch, tokens in whole pages for packed rows."""

    passes: int = 0
    kv_length: int = 0
    kv_places: int = 0
    computed: int = 0


class Counting:
    """A packed runner that counts as the dense one does."""

    def __init__(self, runner: Runner) -> None:
        self.cost = Cost()
        self._runner = runner
        self.kv_cache = runner.kv_cache

    def run(self, plan: SchedulePlan) -> Logits:
        held = [entry.start + entry.length for entry in plan.chunks]
        self.cost.passes += 1
        self.cost.kv_length += max(held)
        page_size = self.kv_cache.page_size
        self.cost.kv_places += sum(-(-tokens // page_size) * page_size for tokens in held)
        self.cost.computed += plan.tokens
        return self._runner.run(plan)


def model_without_work() -> LoadedModel:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        eos_token_id=None,
    )
    return from_model(random_model(config), eos_token_ids=())


def fixed_logits(_ids: torch.Tensor, _positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    running = attention_context.current()
    if isinstance(running, ReferenceContext):
        running.layer = 1
    return torch.zeros(wanted.shape[0], VOCAB)


def serve(engine: SiteEngine, queries: Sequence[Query]) -> None:
    for at, query in enumerate(queries):
        sampling = Sampling(max_tokens=query.response_tokens, temperature=0.0, ignore_eos=True)
        engine.submit(Request(str(at), [at % VOCAB] * query.prompt_tokens, sampling))
    while engine.has_work:
        engine.step()


def padded(
    model: LoadedModel, queries: Sequence[Query], batch: int, policy: Policy, *, apart: bool = False
) -> Cost:
    settings = EngineSettings(
        slots=batch,
        token_budget=batch * CONTEXT,
        kv_tokens=batch * CONTEXT,
        policy=policy,
        max_pending=4 * len(queries),
        prefix_cache=False,
    )
    runner = PaddedRunner(model, settings, apart=apart)
    runner._forward = fixed_logits
    serve(SiteEngine(model, runner, settings, _ticks()), queries)
    return Cost(runner.passes, runner.kv_length, runner.kv_places, runner.computed)


def packed(model: LoadedModel, queries: Sequence[Query], batch: int) -> Cost:
    settings = EngineSettings(
        slots=batch,
        token_budget=batch * CONTEXT,
        kv_tokens=batch * CONTEXT,
        policy=POLICIES["fcfs"],
        max_pending=4 * len(queries),
        prefix_cache=False,
    )
    kv_cache = allocate_kv_cache(model, settings)
    runner = PackedRunner(fixed_logits, kv_cache, slots=batch, pages_per_row=CONTEXT // kv_cache.page_size)
    counting = Counting(runner)
    serve(SiteEngine(model, counting, settings, _ticks()), queries)
    return counting.cost


def _ticks() -> Any:
    ticks = itertools.count()
    return lambda: next(ticks) * 1e-3


def cell(model: LoadedModel, workload: Sequence[Sequence[Query]], batch: int) -> dict[str, dict[str, float]]:
    """Return each runner's means over the seeds, and against static batches."""
    costs = {
        "static": [padded(model, queries, batch, POLICIES["static"]) for queries in workload],
        "insertion": [padded(model, queries, batch, POLICIES["fcfs"]) for queries in workload],
        "insertion, shortest prompt": [
            padded(model, queries, batch, POLICIES["shortest_prompt"]) for queries in workload
        ],
        "decoupled": [padded(model, queries, batch, POLICIES["fcfs"], apart=True) for queries in workload],
        "packed": [packed(model, queries, batch) for queries in workload],
    }
    return {name: _against(each, costs["static"]) for name, each in costs.items()}


def _against(costs: Sequence[Cost], static: Sequence[Cost]) -> dict[str, float]:
    pairs = list(zip(costs, static, strict=True))
    found: dict[str, float] = {name: mean(asdict(one)[name] for one in costs) for name in Cost.__slots__}
    return found | {
        "fewer_passes": mean(other.passes / one.passes for one, other in pairs),
        "kv_length_change": mean(one.kv_length / other.kv_length - 1 for one, other in pairs),
        "kv_places_change": mean(one.kv_places / other.kv_places - 1 for one, other in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, default=Path("data/length_corpus.parquet"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batches", default="2,3,4,6,8,10")
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts, model = workloads.corpus(options.corpus), model_without_work()
    workload = [workloads.burst(texts, QUERIES, seed) for seed in range(options.seeds)]
    table = {}
    for batch in [int(batch) for batch in options.batches.split(",")]:
        table[batch] = cell(model, workload, batch)
        for name, row in table[batch].items() if not options.json else ():
            print(
                f"batch {batch:2} {name:27} passes {row['passes']:7.0f} ({row['fewer_passes']:.2f}x fewer), "
                f"cumulative KV length {row['kv_length']:9.0f} ({row['kv_length_change']:+.1%}), "
                f"places {row['kv_places']:10.0f} ({row['kv_places_change']:+.1%})",
                flush=True,
            )
    found = {
        "queries": QUERIES,
        "seeds": options.seeds,
        "prompt_tokens": round(mean(q.prompt_tokens for each in workload for q in each), 1),
        "response_tokens": round(mean(q.response_tokens for each in workload for q in each), 1),
        "paper_iterations": PAPER_ITERATIONS,
        "paper_kv_length": PAPER_KV_LENGTH,
        "table": table,
        "date": datetime.now(UTC).date().isoformat(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
