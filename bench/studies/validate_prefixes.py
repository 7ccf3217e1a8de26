"""Compare the simulator's prefix caches with real ones: the same conversations at real sites and simulated.

    python -m bench.studies.validate_prefixes [--chats 10] [--turns 6]

Three processes with the demo model join a gateway's core in this process, as for `validate`. Conversations of
token ids, which begin alike, go on from each answer. The simulation has the same arrivals, pages and costs:
once with its own decisions, once at the sites of the real run. Exit status 1 if its cached tokens are more
than 10% off, or 2% at the same sites.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from bench.studies.validate import Costs, Real, federation, watching
from gateway.domain import Caller, Delta, Query, Sampling, Usage
from gateway.query.answer import answer
from gateway.routing.fleet import Fleet
from gateway.routing.policies import POLICIES
from gateway.routing.prefixes import prefix_of
from mico.local.folder import Folder
from mico.simulation import queries as simulated
from mico.simulation.affinity import AFFINITIES, Affinity, AffinityFactory
from mico.simulation.estimators import expectations
from mico.simulation.federation import Federation, Setting
from mico.simulation.metrics import ORDERS
from mico.simulation.specification import SiteSpec

ALLOWED, ALLOWED_AT_THE_SAME_SITES = 0.1, 0.02
PAGE_TOKENS = 16
SHARED_TOKENS, FIRST_TOKENS, TURN_TOKENS = 48, 70, (20, 60)
VOCABULARY = range(300, 900)
PAUSE_S = (0.1, 1.0)
MAX_TOKENS = 16


class Turn(NamedTuple):
    """A turn as it was answered. `tokens`: of the prompt and of the answer."""

    id: str
    came_s: float
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    site: str
    cached_tokens: int


async def ask(real: Real, id_: str, prompt: tuple[int, ...]) -> Turn:
    gateway = real.gateway
    (model,) = gateway.directory.models
    came_s = gateway.clock()
    query = Query(
        id=id_,
        model=model,
        prompt=prompt,
        sampling=Sampling(temperature=0.0, max_tokens=MAX_TOKENS),
        caller=Caller("bench", "bench"),
        received_s=came_s,
        deadline_s=came_s + 300.0,
    )
    tokens, cached = list(prompt), 0
    async for event in answer(gateway, query):
        if isinstance(event, Delta):
            tokens += event.token_ids
        elif isinstance(event, Usage):
            cached = event.cached_tokens
    await gateway.wait_settled()
    return Turn(id_, came_s, prompt, tuple(tokens), real.outcomes[id_].site, cached)


async def converse(real: Real, number: int, turns: int, shared: Sequence[int]) -> list[Turn]:
    draw = random.Random(number)
    prompt = (*shared, *draw.choices(VOCABULARY, k=FIRST_TOKENS))
    done: list[Turn] = []
    for turn in range(turns):
        await asyncio.sleep(draw.uniform(*PAUSE_S))
        done.append(await ask(real, f"c{number}.{turn}", prompt))
        prompt = (*done[-1].tokens, *draw.choices(VOCABULARY, k=draw.randint(*TURN_TOKENS)))
    return done


class Placed(Affinity):
    """Every query goes where it went in the real run."""

    def __init__(self, sites: Mapping[int, str]) -> None:
        self._sites = sites

    def choose(self, query: simulated.Query, fleet: Fleet) -> str | None:
        return self._sites[query.number]


def simulate(
    real: Real,
    sites: tuple[SiteSpec, ...],
    turns: Sequence[Turn],
    affinity: AffinityFactory,
    *,
    offload: bool,
) -> int:
    """Return the cached tokens of the same turns in the simulator."""
    ids: dict[tuple[int, ...], int] = {}
    queries, forecasts = [], []
    for number, turn in enumerate(turns):
        ends = range(PAGE_TOKENS, len(turn.tokens) + 1, PAGE_TOKENS)
        blocks = tuple(ids.setdefault(turn.tokens[:end], len(ids)) for end in ends)
        outcome = real.outcomes[turn.id]
        assert outcome.forecast is not None
        forecasts.append(outcome.forecast.capped(MAX_TOKENS))
        query = simulated.Query(
            number,
            turn.came_s - turns[0].came_s,
            len(turn.prompt),
            max(1, outcome.completion_tokens),
            tenant="bench",
            blocks=blocks,
            prefix=prefix_of(turn.prompt, "bench", outcome.model),
        )
        queries.append(query)
    setting = Setting(
        sites,
        POLICIES["mico"],
        *ORDERS["work"],
        offload=offload,
        block_tokens=PAGE_TOKENS,
        affinity=affinity,
    )
    records = Federation(setting, expectations(queries, forecasts)).run(queries)
    return sum(record.cached_tokens for record in records)


async def compare(options: argparse.Namespace, folder: Folder) -> dict[str, Any]:
    shared = random.Random(-1).choices(VOCABULARY, k=SHARED_TOKENS)
    async with federation(folder, MAX_TOKENS) as real:
        costs = Costs(real.gateway.directory)
        async with watching(costs):
            chats = await asyncio.gather(
                *(converse(real, number, options.turns, shared) for number in range(options.chats))
            )
        sites = costs.measured()
    turns = sorted((turn for chat in chats for turn in chat), key=lambda turn: turn.came_s)
    placed = {number: turn.site for number, turn in enumerate(turns)}
    cached = sum(turn.cached_tokens for turn in turns)
    own = simulate(real, sites, turns, AFFINITIES["prefix"], offload=True)
    same = simulate(real, sites, turns, lambda _: [Placed(placed)], offload=False)
    return {
        "turns": len(turns),
        "moved": sum(a.site != b.site for chat in chats for a, b in pairwise(chat)),
        "prompt_tokens": sum(len(turn.prompt) for turn in turns),
        "cached_tokens": cached,
        "simulated": own,
        "simulated_at_the_same_sites": same,
        "off": own / cached - 1,
        "off_at_the_same_sites": same / cached - 1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies.validate_prefixes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--chats", type=int, default=10)
    parser.add_argument("--turns", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        folder = Folder(Path(path))
        folder.make()
        result = asyncio.run(compare(options, folder))
    print(json.dumps(result))
    same = abs(result["off_at_the_same_sites"]) <= ALLOWED_AT_THE_SAME_SITES
    return int(not same or abs(result["off"]) > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
