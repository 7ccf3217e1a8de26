"""Simulate conversations at once over the sites of `mico up`, and count turns that go to another site.

    python -m bench.studies.turns --runs 120 --noise 0 0.1 0.3 --leaving 0 1 1.5 2 3

Eight conversations of six turns begin at once; each turn is sent some milliseconds after the last one has
ended, by one gateway. `--noise`: an iteration takes longer by this mean share, exponentially distributed,
drawn for each stretch of iterations that a site computes without a change. `--leaving`: values of
`policies.LEAVING`; without it, today's.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from random import Random
from statistics import fmean
from typing import NamedTuple

import numpy as np

from gateway.domain import IterationCost
from gateway.routing import policies
from gateway.routing.policies import POLICIES
from gateway.routing.prefixes import prefix_of
from mico.local.plan import KV_TOKENS_PER_SLOT
from mico.local.profiles import profiles
from mico.simulation.affinity import AFFINITIES
from mico.simulation.estimators import ESTIMATORS, expectations
from mico.simulation.federation import Federation, Setting
from mico.simulation.metrics import ORDERS
from mico.simulation.queries import Query, Record
from mico.simulation.site import SimulatedSite
from mico.simulation.specification import MODEL, SiteSpec

CONVERSATIONS, TURNS = 8, 6
FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS, BLOCK_TOKENS = 33, 34, 12, 16
PER_TOKEN_S = 1e-4
PAUSE_S = (0.003, 0.015)
SITES = tuple(
    SiteSpec(
        each.name,
        each.slots,
        IterationCost(base_s=each.iteration_floor_s, per_token_s=PER_TOKEN_S),
        rtt_s=0.001,
        kv_tokens=each.slots * KV_TOKENS_PER_SLOT,
        usd_per_mtok=each.output_usd_per_mtok,
    )
    for each in profiles(3)
)


class NoisySite(SimulatedSite):
    """A site whose iterations take longer than it says."""

    noise = 0.0
    random = Random(0)

    def _plan_stretch(self) -> None:
        plain, slower = self.spec, 1.0 + self.noise * self.random.expovariate(1.0)
        cost = IterationCost(base_s=plain.cost.base_s * slower, per_token_s=plain.cost.per_token_s * slower)
        self.spec = replace(plain, cost=cost)
        super()._plan_stretch()
        self.spec = plain


class Conversations(Federation):
    """A federation in which each turn is sent after the last one has ended."""

    def __init__(self, chats: list[list[Query]], random: Random, noise: float) -> None:
        turns = [turn for chat in chats for turn in chat]
        self._next = {before.number: after for chat in chats for before, after in pairwise(chat)}
        self._random, self._noise = random, noise
        self.records: dict[int, Record] = {}
        setting = Setting(
            SITES,
            POLICIES["mico"],
            *ORDERS["work"],
            block_tokens=BLOCK_TOKENS,
            affinity=AFFINITIES["prefix"],
        )
        super().__init__(setting, expectations(turns, ESTIMATORS["oracle"](turns)))

    def _new_site(self, spec: SiteSpec) -> SimulatedSite:
        site = super()._new_site(spec)
        site.__class__ = NoisySite
        assert isinstance(site, NoisySite)
        site.noise, site.random = self._noise, self._random
        return site

    def query_ended(self, record: Record) -> None:
        self.records[record.query.number] = record
        if (turn := self._next.get(record.query.number)) is not None:
            self._expected[turn.number] = self._forecasts[turn.number]
            at_s = self.clock.now_s + self._random.uniform(*PAUSE_S)
            self.clock.at(at_s, self.gateways[0].arrive, replace(turn, arrival_s=at_s))
        super().query_ended(record)


class Run(NamedTuple):
    moved: int
    turn_s: float


def chats(random: Random) -> Iterator[list[Query]]:
    for chat in range(CONVERSATIONS):
        turns, arrival_s = [], random.uniform(0.0, 0.02)
        for turn in range(TURNS):
            tokens = FIRST_TOKENS + TURN_TOKENS * turn
            answer = ANSWER_TOKENS if random.random() < 0.85 else random.randint(4, ANSWER_TOKENS - 1)
            ids = tuple(range(chat * 1000, chat * 1000 + tokens))
            blocks = tuple(chat * 100 + each for each in range(-(-(tokens + answer) // BLOCK_TOKENS)))
            number, prefix = chat * TURNS + turn, prefix_of(ids, "t0", MODEL)
            turns.append(Query(number, arrival_s, tokens, answer, blocks=blocks, prefix=prefix, session=chat))
        yield turns


def run(seed: int, noise: float) -> Run:
    random = Random(seed)
    asked = list(chats(random))
    federation = Conversations(asked, random, noise)
    federation.run([chat[0] for chat in asked])
    answered = [[federation.records[turn.number] for turn in chat] for chat in asked]
    moved = sum(a.site != b.site for chat in answered for a, b in pairwise(chat))
    return Run(moved, fmean(each.finish_s for chat in answered for each in chat[1:]))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies.turns",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=120)
    parser.add_argument("--noise", nargs="+", type=float, default=[0.0])
    parser.add_argument("--leaving", nargs="+", type=float, default=[policies.LEAVING])
    options = parser.parse_args()
    print("| noise | leaving | moved of 40 | at most 2 | most | a later turn |\n|---|---|---|---|---|---|")
    rows = []
    for noise, leaving in product(options.noise, options.leaving):
        policies.LEAVING_WEIGHT = np.array(leaving * (1.0 + policies.FIRST_TOKEN))
        runs = [run(seed, noise) for seed in range(options.runs)]
        moved = [each.moved for each in runs]
        few = sum(each <= 2 for each in moved) / len(moved)
        turn_s = fmean(each.turn_s for each in runs)
        print(f"| {noise} | {leaving} | {fmean(moved):.2f} | {few:.0%} | {max(moved)} | {turn_s:.4f} s |")
        rows.append({"noise": noise, "leaving": leaving, "moved": moved, "turn_s": turn_s})
    print(json.dumps({"python": platform.python_version(), "runs": options.runs, "settings": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
