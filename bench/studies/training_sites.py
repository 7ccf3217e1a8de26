"""Simulate chats at two sites of which one trains: what gateways gain by knowing what training costs there.

    python -m bench.studies.training_sites [--chats 4000] [--seeds 3]

Two alike sites of an 8B model on an H200. One trains without end: beside chats, slices fill each iteration up
to the bound of the time between tokens; while a prompt is read none runs. Gateways hear what that adds to an
iteration, or they do not, or a rule keeps chats from the site while the other has a free slot.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np

from gateway.domain import IterationCost, LoadReport
from gateway.routing.candidates import Candidates, Choice
from gateway.routing.demand import Demand
from gateway.routing.policies import mico
from mico.simulation.estimators import expectations, oracle
from mico.simulation.federation import Federation, Setting
from mico.simulation.metrics import ORDERS
from mico.simulation.queries import Query
from mico.simulation.site import SimulatedSite
from mico.simulation.specification import SiteSpec, capacity_qps

BETWEEN_TOKENS_S = 0.02
COST = IterationCost(base_s=0.004, per_row_s=0.000025, per_token_s=0.00003, per_kv_token_s=2e-8)
"""4.4 ms for 16 rows, 33,000 prompt tokens a second."""
OTHER = SiteSpec("other", 64, COST, 0.01, 800_000)
TRAINS = replace(OTHER, name="trains", trains_between_s=BETWEEN_TOKENS_S)
LOADS = (0.02, 0.1, 0.3, 0.6, 0.9)
"""Of what both sites can with every slot in use."""
KNOWN = ("untold", "told", "rule")


class UntoldFederation(Federation):
    """A federation whose sites do not say what training costs."""

    def report_of(self, site: SimulatedSite, received_s: float) -> LoadReport:
        return replace(super().report_of(site, received_s), training_s_per_iteration=0.0)


def avoid_training(demand: Demand, candidates: Candidates, turn: int) -> Choice:
    """Choose the site that does not train while it has a free slot."""
    names = [site.name for site in candidates.sites]
    other = names.index(OTHER.name)
    if other in candidates.places and candidates.at.too_many[other] <= 0.0:
        return Choice(other, "does not train")
    return mico(demand, candidates, turn)


def chats(count: int, seed: int, per_s: float) -> list[Query]:
    """Return chats that arrive at random, of prompts of 660 and answers of 150 tokens in the median."""
    draw, at_s, made = Random(seed), 0.0, []
    for number in range(count):
        at_s += draw.expovariate(per_s)
        prompt, answer = draw.lognormvariate(6.5, 0.8), draw.lognormvariate(5.0, 0.7)
        made.append(Query(number, at_s, max(1, min(8000, int(prompt))), max(1, min(2000, int(answer)))))
    return made


def run(known: str, queries: Sequence[Query]) -> dict[str, float]:
    policy = avoid_training if known == "rule" else mico
    setting = Setting((OTHER, TRAINS), policy, *ORDERS["work"])
    make = Federation if known == "told" else UntoldFederation
    federation = make(setting, expectations(queries, oracle(queries)))
    records = federation.run(queries)
    trains, seconds = federation.sites[TRAINS.name], federation.clock.now_s
    first = np.array([record.first_token_s for record in records])
    whole = np.array([record.finish_s for record in records])
    return {
        "first_token_p99_s": float(np.quantile(first, 0.99)),
        "finish_mean_s": float(whole.mean()),
        "finish_p99_s": float(np.quantile(whole, 0.99)),
        "at_the_site_that_trains": sum(record.site == TRAINS.name for record in records) / len(records),
        "training_share": (seconds - trains.busy_s + trains.trained_s) / seconds,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.training_sites", description=__doc__)
    parser.add_argument("--chats", type=int, default=4000, help="of a run")
    parser.add_argument("--seeds", type=int, default=3, help="runs whose mean is taken")
    options = parser.parse_args(arguments)
    capacity = capacity_qps([OTHER, TRAINS], 900, 190)
    print(
        f"both sites can answer {capacity:.0f} chats a second; {options.chats} chats, {options.seeds} seeds"
    )
    found: dict[str, dict[str, float]] = {}
    for load in LOADS:
        for known in KNOWN:
            runs = [run(known, chats(options.chats, seed, load * capacity)) for seed in range(options.seeds)]
            mean = {name: statistics.fmean(each[name] for each in runs) for name in runs[0]}
            found[f"{known} at {load}"] = mean
            print(f"load {load}, {known}:", ", ".join(f"{key} {value:.3f}" for key, value in mean.items()))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
