"""A request answers the same wherever it goes, and whichever engine is killed at whichever step of a move."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.engine_models import family, tokenizer
from tests.support.engine_split import answer_all, differences, engine, random_cases
from tests.support.pool_moves import STEPS, moved_answers

pytestmark = pytest.mark.slow

MAX_ROUNDS = 8
"""One is enough unless the machine is so busy that most requests end before they are moved."""


def test_moved_requests_and_those_of_killed_engines_answer_as_if_undisturbed() -> None:
    from site_engine.text.grammar import Grammars

    cases = random_cases(130, seed=5)
    grammars = Grammars(tokenizer(), family("llama").served.vocab_size, ())

    async def scenario() -> None:
        async with engine("llama", separate=False) as (client, _):
            undisturbed = await answer_all(client, cases, grammars)
        moves, killed = 0, (0,) * len(STEPS)
        for seed in range(5, 5 + MAX_ROUNDS):
            moved, counts = await moved_answers("llama", cases, grammars, moves=200, kill_every=12, seed=seed)
            assert differences(cases, undisturbed, moved) == []
            moves += counts.moved
            killed = tuple(map(sum, zip(killed, counts.killed, strict=True)))
            if moves > 60 and min(killed) > 0:
                return
        raise AssertionError(f"only {moves} moves, and engines killed at each step: {killed}")

    asyncio.run(scenario())
