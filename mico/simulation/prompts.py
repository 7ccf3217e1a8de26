"""Prompts of a run as ids of blocks, so that queries share prefixes: from a trace, made up, or none shared.

Equal ids are equal blocks after equal blocks. Needs numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from gateway.routing.prefixes import prefix_of
from mico.simulation.queries import Query
from mico.simulation.specification import MODEL

BLOCK_TOKENS = 512
"""Tokens of a block, as in the traces of Mooncake, and of a page of a simulated site's cache."""
SERVICE = "t0"
"""The tenant of a trace with prefixes: the traffic of one service, whose queries share its system prompt."""


def with_blocks(queries: Sequence[Query], blocks: Iterable[Sequence[int]]) -> list[Query]:
    """Return the queries with the blocks of their prompts, as one tenant; sessions are found by prefix."""
    sessions = Sessions()
    return [
        _prompted(replace(query, tenant=SERVICE), tuple(each), sessions.of(each))
        for query, each in zip(queries, blocks, strict=True)
    ]


def unshared(queries: Sequence[Query]) -> list[Query]:
    """Return the queries with prompts that have nothing in common."""
    starts = np.cumsum([0, *(-(-query.prompt_tokens // BLOCK_TOKENS) for query in queries)]).tolist()
    return [
        _prompted(query, tuple(range(starts[at], starts[at + 1])), at) for at, query in enumerate(queries)
    ]


def _prompted(query: Query, blocks: tuple[int, ...], session: int) -> Query:
    tokens = np.repeat(np.array(blocks, dtype=np.uint32), BLOCK_TOKENS)[: query.prompt_tokens]
    prefix = prefix_of(tuple(tokens.tolist()), query.tenant, MODEL)
    return replace(query, blocks=blocks, prefix=prefix, session=session)


class Sessions:
    """Finds the session that a prompt goes on with: that of its last block which came before.

    A first block that others share is a system prompt and begins a session of its own.
    """

    def __init__(self) -> None:
        self._sessions: dict[int, int] = {}
        self._count = 0

    def of(self, blocks: Sequence[int]) -> int:
        known = [block for block in blocks[1:] if block in self._sessions]
        if known:
            session = self._sessions[known[-1]]
        else:
            session = self._count = self._count + 1
        for block in blocks[1:]:
            self._sessions.setdefault(block, session)
        return session


APPS = 8
SYSTEM_BLOCKS = (4, 16)
"""The least and the most blocks of the system prompt and tools of an application."""
MEAN_TURNS = 12
TURN_TOKENS, TURN_SPREAD = 700.0, 1.0
"""Median tokens that a turn adds (a question or a tool's result), and sigma of their logarithm."""
ANSWER_TOKENS, ANSWER_SPREAD = 120.0, 0.9
PAUSE_S = 20.0
"""Mean time from one turn to the next, answer and tool included, beside TASK_EVERY_S between two tasks."""
TASK_EVERY_S = 4.0
MAX_PROMPT_TOKENS = 100_000


def agents(count: int, seed: int) -> list[Query]:
    """Return the calls of agents at work: each goes on from its last call, with its answer and new input.

    Tasks begin as a Poisson process, each in one of APPS applications (their tenants), whose system prompt
    and tools all its tasks share. Turns of a task are geometric in number, log-normal in length; pauses
    between them are exponential and do not wait for answers, as in a recorded trace.
    """
    random = np.random.default_rng(seed)
    apps = random.integers(*SYSTEM_BLOCKS, APPS).tolist()
    calls: list[Query] = []
    begin_s, task, ids = 0.0, 0, APPS * SYSTEM_BLOCKS[1]
    while len(calls) < count:
        begin_s += random.exponential(TASK_EVERY_S)
        app = int(random.integers(APPS))
        blocks = [app * SYSTEM_BLOCKS[1] + number for number in range(apps[app])]
        at_s, tokens, task = begin_s, len(blocks) * BLOCK_TOKENS, task + 1
        for _ in range(int(random.geometric(1 / MEAN_TURNS))):
            tokens += 1 + int(random.lognormal(np.log(TURN_TOKENS), TURN_SPREAD))
            answer = 1 + int(random.lognormal(np.log(ANSWER_TOKENS), ANSWER_SPREAD))
            if tokens + answer > MAX_PROMPT_TOKENS:
                break
            while len(blocks) * BLOCK_TOKENS < tokens + answer:
                blocks.append(ids)
                ids += 1
            calls.append(Query(0, at_s, tokens, answer, tenant=f"t{app}", session=task, blocks=tuple(blocks)))
            at_s, tokens = at_s + random.exponential(PAUSE_S), tokens + answer
    ordered = sorted(calls, key=lambda call: call.arrival_s)[:count]
    return [
        _prompted(replace(call, number=number), call.blocks, call.session)
        for number, call in enumerate(ordered)
    ]
