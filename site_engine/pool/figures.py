"""Join the load figures of the engines of a site, which its gateways see as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from site_engine.core.load import NO_COST, IterationCost, LoadFigures, condense
from site_engine.engine_client import Facts


class Totals(NamedTuple):
    """Tokens since a start, as in LoadFigures."""

    tokens_total: int = 0
    prompt_tokens_total: int = 0
    computed_tokens_total: int = 0

    @staticmethod
    def of(figures: LoadFigures) -> Totals:
        return Totals(figures.tokens_total, figures.prompt_tokens_total, figures.computed_tokens_total)

    def plus(self, other: Totals, times: int = 1) -> Totals:
        return Totals(*(own + times * more for own, more in zip(self, other, strict=True)))


def idle_figures(facts: Facts) -> LoadFigures:
    """Return what an engine reports that has served nothing."""
    return LoadFigures(0, 0, 0.0, facts.kv_tokens, 0, 0.0, 0.0, NO_COST, (), 1, 0, 0.0, 0, 0, 0)


def join_figures(each: Sequence[LoadFigures]) -> LoadFigures:
    """Return the figures of all engines together, at least one.

    Requests, tokens, memory and rates add up. Rows and the tokens that they read are spread over the engines,
    so that one more costs an iteration of the site a part of what it costs an engine's. A prompt is computed
    by one engine, at that engine's speed, and waits for the begun prompts of one engine.
    """
    count = len(each)
    remaining = [value for one in each for value in _running_remaining(one)]
    values, weight = condense(remaining)
    running = sum(one.running for one in each)
    unfinished = sum(max(0, one.unread_tokens - one.running) for one in each)
    return LoadFigures(
        running=running,
        pending=sum(one.pending for one in each),
        token_load=sum(one.token_load for one in each),
        kv_free_tokens=sum(one.kv_free_tokens for one in each),
        kv_reserved_tokens=sum(one.kv_reserved_tokens for one in each),
        tokens_per_s=sum(one.tokens_per_s for one in each),
        seconds_per_iteration=sum(one.seconds_per_iteration for one in each) / count,
        iteration=_spread(each),
        running_remaining=values,
        running_weight=weight,
        pending_prompt_tokens=sum(one.pending_prompt_tokens for one in each),
        pending_response_tokens=sum(one.pending_response_tokens for one in each),
        tokens_total=sum(one.tokens_total for one in each),
        prompt_tokens_total=sum(one.prompt_tokens_total for one in each),
        unread_tokens=running + round(unfinished / count),
        longest_iteration_s=max(one.longest_iteration_s for one in each),
        training=sum(one.training for one in each),
        training_s_per_iteration=sum(one.training_s_per_iteration for one in each) / count,
        kv_extra_tokens=sum(one.kv_extra_tokens for one in each),
        computed_tokens_total=sum(one.computed_tokens_total for one in each),
        resident=frozenset().union(*(one.resident for one in each)),
    )


def mean_cost(each: Sequence[LoadFigures]) -> IterationCost:
    """Return the mean over the engines that have computed something: alike devices differ by noise."""
    known = [one.iteration for one in each if any(one.iteration)]
    if not known:
        return NO_COST
    return IterationCost(*(sum(values) / len(known) for values in zip(*known, strict=True)))


def _running_remaining(one: LoadFigures) -> list[float]:
    """Return a value for each running request."""
    return [float(value) for value in one.running_remaining for _ in range(one.running_weight)][: one.running]


def _spread(each: Sequence[LoadFigures]) -> IterationCost:
    cost, count = mean_cost(each), len(each)
    return cost._replace(per_row_s=cost.per_row_s / count, per_kv_token_s=cost.per_kv_token_s / count)


def join_facts(each: Sequence[Facts]) -> Facts:
    """Return what a site announces: slots and memory add up, a request has the context of the smallest."""
    context = min(min(one.context_tokens, one.kv_tokens) for one in each)
    slots, kv_tokens = sum(one.slots for one in each), sum(one.kv_tokens for one in each)
    return each[0]._replace(context_tokens=context, slots=slots, kv_tokens=kv_tokens)
