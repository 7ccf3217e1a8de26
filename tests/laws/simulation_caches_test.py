"""Laws of the simulated federation with prefix caches, and of what gateways make of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.domain import IterationCost, Lane
from mico.simulation.affinity import AFFINITIES, affinity
from mico.simulation.clock import Clock
from mico.simulation.federation import Outage
from mico.simulation.prompts import BLOCK_TOKENS, agents, unshared, with_blocks
from mico.simulation.queries import Query
from mico.simulation.row import ENDLESS, Row
from mico.simulation.site import TOKEN_BUDGET, SimulatedSite
from mico.simulation.specification import SiteSpec, sites_of
from site_engine.core.page_pool import PagePool
from site_engine.core.prefix_cache import PrefixTree
from site_engine.core.remaining_curve import RemainingCurve
from site_engine.core.request import Request
from site_engine.core.request_queue import AdmissionQueue, least_work
from site_engine.core.scheduler import Scheduler
from tests.support.simulated import federations, simulate, workloads

BLOCK = 64
prompts_of_blocks = st.tuples(
    st.integers(0, 30),  # arrival
    st.lists(st.integers(0, 2), max_size=8),  # what its blocks go on with
    st.integers(1, BLOCK),  # tokens of its own after them
    st.integers(1, 40),  # of the answer
)


class Shared(NamedTuple):
    arrived_s: float
    blocks: tuple[int, ...]
    prompt_tokens: int
    answer_tokens: int


def shared(rows: list[tuple[int, list[int], int, int]]) -> list[Shared]:
    """Requests whose equal ids are equal blocks after equal ones."""
    ids: dict[tuple[int, ...], int] = {}
    found = []
    for at, path, own, answer in sorted(rows):
        blocks = tuple(ids.setdefault(tuple(path[:end]), len(ids)) for end in range(1, len(path) + 1))
        found.append(Shared(at + 0.5, blocks, len(path) * BLOCK + own, answer))
    return found


def hits_of_the_engine(requests: list[Shared], slots: int) -> dict[str, tuple[int, int]]:
    """The iteration of each first token, and the cached tokens, by the engine's scheduler and cache."""
    queue, pool = AdmissionQueue(starving_after_s=inf), PagePool(20_000, BLOCK)
    scheduler = Scheduler(pool, queue, PrefixTree(pool), slots=slots, token_budget=TOKEN_BUDGET)
    found: dict[str, tuple[int, int]] = {}
    left: dict[str, int] = {}
    coming = list(enumerate(requests))
    for now_s in range(2000):
        while coming and coming[0][1].arrived_s <= now_s:
            number, (arrived_s, blocks, prompt, answer) = coming.pop(0)
            tokens = [-1 - block for block in blocks for _ in range(BLOCK)]
            tokens += [1 + number] * (prompt - len(tokens))
            request = Request(str(number), tokens, remaining=RemainingCurve.exactly(answer))
            request.arrived_s, request.max_tokens, left[request.id] = arrived_s, ENDLESS, answer
            queue.push(request)
        plan = scheduler.plan(float(now_s))
        scheduler.advance(plan)
        for request in [entry.request for entry in plan.chunks if entry.samples]:
            found.setdefault(request.id, (now_s + 1, request.cached_tokens))
            request.tokens.append(0)
            left[request.id] -= 1
            if not left[request.id]:
                scheduler.release(request)
    return found


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(prompts_of_blocks, max_size=12), st.integers(1, 6))
def test_a_site_finds_of_a_prompt_what_the_engines_cache_would(
    rows: list[tuple[int, list[int], int, int]], slots: int
) -> None:
    """The first request runs all the time, so that every iteration begins at a full second."""
    requests = [Shared(0.0, (), 1, 1500), *shared(rows)]
    found: dict[str, tuple[int, int]] = {}
    clock = Clock()
    site = SimulatedSite(
        SiteSpec("a", slots + 1, IterationCost(base_s=1.0), 0.0, 20_000 * BLOCK),
        clock,
        score=least_work,
        starving_after_s=inf,
        on_first_token=lambda row: found.update({row.id: (site.iterations, row.cached_tokens)}),
        on_end=lambda row: None,
        on_change=lambda site: None,
        block_tokens=BLOCK,
    )
    for number, (arrived_s, blocks, prompt, answer) in enumerate(requests):
        curve = RemainingCurve.exactly(answer)
        row = Row(str(number), prompt, curve, typical=curve.typical(), response_tokens=answer, blocks=blocks)
        clock.at(arrived_s, site.submit, row)
    clock.run()
    assert found == hits_of_the_engine(requests, slots + 1)


def chats(count: int, turns: int, tokens: int = 2048) -> list[Query]:
    """Conversations in turns of 2 s each, whose prompts grow by `tokens`."""
    queries: list[Query] = []
    for turn in range(turns):
        for chat in range(count):
            blocks = tuple(chat * 1000 + each for each in range((turn + 1) * tokens // BLOCK_TOKENS))
            at_s = 2.0 * turn + 0.05 * chat
            queries.append(Query(len(queries), at_s, (turn + 1) * tokens + 1, 30, blocks=blocks))
    return with_blocks(queries, [query.blocks for query in queries])


@settings(max_examples=40, deadline=None)
@given(
    workloads,
    federations,
    st.sampled_from([*AFFINITIES, "tree:2"]),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
)
def test_with_caches_every_query_ends_once_and_only_the_caches_hold_pages(  # noqa: PLR0917  # hypothesis
    queries: list[Query],
    sites: tuple[SiteSpec, ...],
    name: str,
    gateways: int,
    offload: bool,
    lines: bool,
) -> None:
    blocks = [range(-(-query.prompt_tokens // BLOCK_TOKENS)) for query in queries]
    lanes = [replace(q, lane=Lane(lines and q.number % 2)) for q in with_blocks(queries, blocks)]
    records, federation = simulate(
        lanes, sites, offload=offload, gateways=gateways, block_tokens=BLOCK_TOKENS, affinity=affinity(name)
    )
    assert sorted(record.query.number for record in records) == [query.number for query in queries]
    for record in records:
        assert 0 < record.first_token_s <= record.finish_s
        assert 0 <= record.cached_tokens < record.query.prompt_tokens
    for site in federation.sites.values():
        assert (len(site.running), site.pending, site.kv_used) == (0, 0, 0)
        assert site.kv_free == site.spec.kv_tokens
        assert site.cache is not None
        assert site.cache.pool.used == site.cache.pool.idle == len(site.cache.tree)


@pytest.mark.parametrize("gateways", [1, 2])
def test_prompts_without_a_common_prefix_fare_alike_with_affinity_and_without(gateways: int) -> None:
    queries = unshared([Query(i, 0.05 * i, 40 + 97 * (i % 50), 5 + i % 90) for i in range(400)])
    sites = tuple(sites_of("2x8@1~10,1x16@2~50"))
    fared = [
        simulate(queries, sites, gateways=gateways, block_tokens=BLOCK_TOKENS, affinity=AFFINITIES[name])[0]
        for name in ("prefix", "none")
    ]
    assert fared[0] == fared[1]


@pytest.mark.parametrize("sites", ["1x8@1~10,1x8@2~10,1x8@3~10", "1x8@1~10,1x16@2.2~50"])
def test_a_system_prompt_that_all_of_few_sites_have_leaves_queries_where_they_would_go(sites: str) -> None:
    spread = [Query(i, 0.25 * i, 2 * BLOCK_TOKENS + 40 + 97 * (i % 50), 5 + 7 * i % 150) for i in range(400)]
    own = [
        range(1_000 * i + 2, 1_000 * i + each.prompt_tokens // BLOCK_TOKENS) for i, each in enumerate(spread)
    ]
    queries = with_blocks(spread, [(0, 1, *blocks) for blocks in own])
    with_affinity, without = (
        Counter(
            record.site
            for record in simulate(
                queries, tuple(sites_of(sites)), block_tokens=BLOCK_TOKENS, affinity=AFFINITIES[name]
            )[0]
        )
        for name in ("prefix", "none")
    )
    assert (with_affinity - without).total() < 0.02 * len(queries)


def test_conversations_find_their_prefixes_with_affinity() -> None:
    sites = tuple(sites_of("3x8@1~10"))
    hits = {}
    for name in ("prefix", "none"):
        records, _ = simulate(
            chats(7, 6), sites, block_tokens=BLOCK_TOKENS, affinity=AFFINITIES[name], estimator="oracle"
        )
        hits[name] = sum(record.cached_tokens for record in records)
    possible = sum(query.prompt_tokens - 2048 for query in chats(7, 6))
    assert hits["prefix"] > 0.9 * possible
    assert hits["none"] < 0.7 * possible


@pytest.mark.parametrize("gateways", [1, 2])
def test_of_40_turns_of_conversations_at_once_at_most_two_move_between_idle_sites(gateways: int) -> None:
    turns, sites = chats(8, 6, BLOCK_TOKENS), tuple(sites_of("3x16@1~10"))
    moved = {}
    for name in ("prefix", "none"):
        records, _ = simulate(
            turns, sites, gateways=gateways, block_tokens=BLOCK_TOKENS, affinity=AFFINITIES[name]
        )
        served = [[record.site for record in records[chat::8]] for chat in range(8)]
        assert {homes[0] for homes in served} == {site.name for site in sites}, "they begin everywhere"
        moved[name] = sum(before != after for homes in served for before, after in pairwise(homes))
    assert moved["prefix"] <= 2
    assert moved["none"] > 10


def test_gateways_that_tell_each_other_find_what_the_other_placed() -> None:
    sites = tuple(sites_of("3x8@1~10"))
    hits = {}
    for name in ("prefix", "untold"):
        records, _ = simulate(
            chats(11, 4), sites, gateways=2, block_tokens=BLOCK_TOKENS, affinity=AFFINITIES[name]
        )
        hits[name] = sum(record.cached_tokens for record in records)
    assert hits["prefix"] > 1.1 * hits["untold"]


def test_a_session_stays_and_a_hash_is_that_of_the_beginning() -> None:
    sites = tuple(sites_of("3x8@1~10"))
    for name in ("session", "hash"):
        records, _ = simulate(chats(6, 4), sites, block_tokens=BLOCK_TOKENS, affinity=AFFINITIES[name])
        homes = {(record.query.session, record.site) for record in records}
        assert len(homes) == 6, name


def test_sessions_that_stay_do_not_all_begin_at_the_fastest_site() -> None:
    turns, sites = chats(6, 4), tuple(sites_of("1x16@1~10,1x16@2~10"))
    records, _ = simulate(turns, sites, block_tokens=BLOCK_TOKENS, affinity=AFFINITIES["session"])
    assert {record.site for record in records} == {site.name for site in sites}


def test_an_approximate_tree_follows_prefixes_until_the_load_is_uneven() -> None:
    queries = [replace(each, arrival_s=0.01 * each.number) for each in chats(1, 12)]
    sites = tuple(sites_of("2x8@1~10"))
    for above, homes in ((64, 1), (2, 2)):
        records, _ = simulate(
            queries, sites, offload=False, block_tokens=BLOCK_TOKENS, affinity=affinity(f"tree:{above}")
        )
        assert len({record.site for record in records}) == homes


def test_a_cache_evicts_what_was_not_used_longest() -> None:
    """There is room for two and a half of the prompts, so that the third one takes pages of the second."""
    queries = [
        Query(number, 10.0 * number, 4 * BLOCK_TOKENS + 1, 5, blocks=tuple(range(chat * 4, chat * 4 + 4)))
        for number, chat in enumerate([0, 1, 0, 2, 0, 1])
    ]
    site = SiteSpec.of("a", 4, 1.0, 0.0, kv_tokens=10 * BLOCK_TOKENS)
    records, _ = simulate(queries, (site,), block_tokens=BLOCK_TOKENS)
    *before, last = [record.cached_tokens for record in records]
    assert before == [0, 0, 4 * BLOCK_TOKENS, 0, 4 * BLOCK_TOKENS]
    assert last < 4 * BLOCK_TOKENS


@pytest.mark.parametrize("name", AFFINITIES)
def test_a_lost_site_comes_back_with_an_empty_cache(name: str) -> None:
    (site,) = sites_of("1x4@1~10")
    turns = [replace(each, arrival_s=100.0 * each.number) for each in chats(1, 3)]
    for outages, hits in (((), [0, 2048, 4096]), ((Outage(site.name, 150.0, 160.0),), [0, 2048, 0])):
        records, _ = simulate(
            turns, (site,), block_tokens=BLOCK_TOKENS, affinity=AFFINITIES[name], outages=outages
        )
        assert [record.cached_tokens for record in records] == hits


def test_made_agents_go_on_from_their_last_call() -> None:
    calls = agents(300, 1)
    assert calls == agents(300, 1)
    assert [call.number for call in calls] == list(range(300))
    last: dict[int, Query] = {}
    for call in calls:
        if before := last.get(call.session):
            assert call.blocks[: len(before.blocks) - 1] == before.blocks[:-1]
            assert call.prompt_tokens > before.prompt_tokens + before.response_tokens
            assert call.tenant == before.tenant
        last[call.session] = call
        assert len(call.blocks) * BLOCK_TOKENS >= call.prompt_tokens + call.response_tokens
