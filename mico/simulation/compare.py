"""Simulations of every combination of the given settings, one row each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import nan
from pathlib import Path
from typing import Any

from gateway.routing.candidates import Policy
from gateway.routing.policies import POLICIES
from gateway.scaling.plan import read_plan
from mico.errors import CommandFailed, ExitCode
from mico.simulation import prompts, workloads
from mico.simulation.affinity import affinity
from mico.simulation.day import DAY_S
from mico.simulation.estimators import estimator, expectations
from mico.simulation.federation import Federation, Outage, Setting
from mico.simulation.machines import Scaling, with_spares
from mico.simulation.metrics import Results, order_by_name
from mico.simulation.queries import Expected, Query
from mico.simulation.specification import SiteSpec, capacity_qps, sites_of

DAY = "day"
GENERATORS = {
    "poisson": workloads.poisson,
    "burst": workloads.burst,
    "agents": workloads.agents,
    DAY: workloads.day,
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The settings to combine. `traces`: files or GENERATORS; `queries` at most of each.

    `affinities`: names of AFFINITIES; without one, sites cache no prefixes.
    """

    traces: Sequence[str]
    loads: Sequence[float]
    sites: Sequence[str]
    policies: Sequence[str]
    estimators: Sequence[str]
    orders: Sequence[str]
    offload: Sequence[bool]
    corpus: Path
    queries: int = 4000
    seed: int = 0
    gateways: int = 1
    report_every_s: float = 0.05
    report_delay_s: float = 0.0
    outages: tuple[Outage, ...] = ()
    batch_share: float = 0.0
    bound: Mapping[str, float] = field(default_factory=dict)
    affinities: Sequence[str] = ()
    scaling: Scaling | None = None


def rows(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Yield a row per trace, sites, load, policy, estimator, order and offload setting as each run ends.

    Raises CommandFailed for an invalid setting, and DataError for an unusable corpus, before anything runs.
    """
    for check, names in (
        (policy, comparison.policies),
        (order_by_name, comparison.orders),
        (affinity, comparison.affinities),
    ):
        for name in names:
            check(name)
    for sites in comparison.sites:
        if comparison.scaling is not None:
            with_spares(sites_of(sites), comparison.scaling.plan)
    _check_regions(comparison)
    _check_rtts(comparison)
    texts = workloads.corpus(comparison.corpus)
    # all traces are read before anything runs, so that a bad one fails at once
    queries_by_trace = [_queries(trace, comparison, texts) for trace in comparison.traces]
    for trace, found in zip(comparison.traces, queries_by_trace, strict=True):
        _check_fits(trace, found, comparison.sites)
    for trace, found in zip(comparison.traces, queries_by_trace, strict=True):
        queries = workloads.assign_classes(found, comparison.batch_share, comparison.bound)
        expected = {
            name: expectations(queries, estimator(name)(queries))
            for name in dict.fromkeys(comparison.estimators)
        }
        for sites, load in product(comparison.sites, [0.0] if trace == DAY else comparison.loads):
            specs = sites_of(sites)
            fitting = _fitting(queries, specs)  # longer queries are left out, also of `queries`
            can_take = capacity(fitting, specs)
            scaled = fitting if trace == DAY else workloads.at_rate(fitting, load * can_take)
            mean_load = len(fitting) / DAY_S / can_take if trace == DAY else load
            labels = {"trace": Path(trace).stem, "load": mean_load, "sites": sites}
            yield from (labels | row for row in _run_combinations(comparison, specs, scaled, expected))


def _check_regions(comparison: Comparison) -> None:
    """Raise CommandFailed if queries are bound to a region without a site: all would be refused."""
    for sites in comparison.sites:
        regions = {spec.region for spec in sites_of(sites)}
        for region in comparison.bound:
            if region not in regions:
                raise CommandFailed(
                    f"--bound {region}, and no site of {sites!r} is in it",
                    tip="name a group's region at its end, for example 2x16@1.0~5=eu",
                    exit_code=ExitCode.WRONG_USAGE,
                )


def _check_rtts(comparison: Comparison) -> None:
    """Raise CommandFailed if a site has several round trips, and not one for each gateway."""
    for sites in comparison.sites:
        if any(len(spec.rtts_s) not in {0, comparison.gateways} for spec in sites_of(sites)):
            raise CommandFailed(
                f"{sites!r} tells a site's round trips, and not one for each gateway",
                tip="--gateways 2 takes two, for example 2x16~5+250, or one for all",
                exit_code=ExitCode.WRONG_USAGE,
            )


def _check_fits(trace: str, queries: Sequence[Query], sites: Sequence[str]) -> None:
    """Raise CommandFailed if a trace is empty, or if all of it is too long for the smallest of some sites."""
    for each in sites:
        if not _fitting(queries, sites_of(each)):
            cause = f"all are longer than the KV of the smallest site of {each!r}" if queries else ""
            raise CommandFailed(f"{trace} has no query to run", cause=cause)


def _fitting(queries: Sequence[Query], specs: Sequence[SiteSpec]) -> list[Query]:
    """Return the queries that every site has the KV for."""
    max_tokens = min(spec.kv_tokens for spec in specs)
    return [query for query in queries if query.prompt_tokens + query.response_tokens <= max_tokens]


def _queries(trace: str, comparison: Comparison, texts: Any) -> list[Query]:
    generate, prefixes = GENERATORS.get(trace), bool(comparison.affinities)
    if generate is None:
        return workloads.from_trace(
            Path(trace), texts, comparison.queries, comparison.seed, prefixes=prefixes
        )
    queries = generate(texts, comparison.queries, comparison.seed)
    return prompts.unshared(queries) if prefixes and trace != "agents" else queries


def _run_combinations(
    comparison: Comparison,
    specs: Sequence[SiteSpec],
    queries: Sequence[Query],
    expected: dict[str, dict[int, Expected]],
) -> Iterator[dict[str, Any]]:
    choices = product(
        comparison.policies,
        comparison.estimators,
        comparison.orders,
        comparison.offload,
        comparison.affinities or [""],
    )
    for policy_name, estimator_name, order, offload, affinity_name in choices:
        score, starving_after_s = order_by_name(order)
        plan = comparison.scaling
        machines = specs if plan is None else with_spares(specs, plan.plan)
        setting = Setting(
            specs=tuple(machines),
            policy=policy(policy_name),
            score=score,
            starving_after_s=starving_after_s,
            offload=offload,
            report_every_s=comparison.report_every_s,
            report_delay_s=comparison.report_delay_s,
            gateways=comparison.gateways,
            outages=_outages_of_sites(comparison.outages, machines),
            block_tokens=prompts.BLOCK_TOKENS if affinity_name else 0,
            affinity=affinity(affinity_name or "none"),
            scaling=plan,
        )
        federation, known = Federation(setting), expected[estimator_name]
        results = Results({spec.name: spec.usd_per_mtok for spec in machines})
        in_order = sorted(queries, key=lambda query: query.arrival_s)
        federation.stream(((query, known[query.number]) for query in in_order), results.add)
        preemptions = sum(site.preemptions for site in federation.sites.values())
        yield {
            "policy": policy_name,
            "estimator": estimator_name,
            "order": order,
            "offload": offload,
            "affinity": affinity_name,
            "queries": len(queries),
            **results.metrics(preemptions).row(),
            "machine_usd": federation.machines.usd() if federation.machines is not None else 0.0,
        }


def _outages_of_sites(outages: Sequence[Outage], specs: Sequence[SiteSpec]) -> tuple[Outage, ...]:
    """Expand an outage of a region into outages of its sites. Raises CommandFailed for an unknown name."""
    found: list[Outage] = []
    for outage in outages:
        lost = [spec.name for spec in specs if outage.site in {spec.name, spec.region or spec.name}]
        if not lost:
            raise CommandFailed(
                f"--outage {outage.site}, and there is no such site or region",
                tip="sites are s0000, s0001, …; a region is named at the end of a group in --sites",
                exit_code=ExitCode.WRONG_USAGE,
            )
        found += [replace(outage, site=name) for name in lost]
    return tuple(found)


def capacity(queries: Sequence[Query], specs: Sequence[SiteSpec]) -> float:
    """Return the queries per second, of the mean lengths of `queries`, that the sites can serve."""
    count = max(1, len(queries))
    prompt = sum(query.prompt_tokens for query in queries) / count
    response = sum(query.response_tokens for query in queries) / count
    return capacity_qps(list(specs), prompt, response)


def scaling(path: Path, start_s: float) -> Scaling:
    """Read a gateway's scaling plan. Raises CommandFailed."""
    try:
        return Scaling(read_plan(path), start_s)
    except ValueError as error:
        raise CommandFailed(
            "the scaling plan can't be used", cause=str(error), exit_code=ExitCode.WRONG_USAGE
        ) from error


def policy(name: str) -> Policy:
    if name not in POLICIES:
        raise CommandFailed(
            f"there is no policy {name!r}",
            tip=f"choose of {', '.join(POLICIES)}",
            exit_code=ExitCode.WRONG_USAGE,
        )
    return POLICIES[name]


def bound(text: str) -> tuple[str, float]:
    """Parse a share bound to a region: with `eu=0.3`, 30% of all queries may be answered in eu only."""
    region, _, share = text.partition("=")
    if not 0 <= _number(share) <= 1:
        raise CommandFailed(
            f"{text!r} is no share of a region", tip="for example eu=0.3", exit_code=ExitCode.WRONG_USAGE
        )
    return region, float(share)


def outage(text: str) -> Outage:
    """Parse an outage: `s0001@60-120` loses the site s0001 (or a region) from second 60 to second 120."""
    name, _, span = text.partition("@")
    from_s, _, until_s = span.partition("-")
    if not 0 <= _number(from_s) < _number(until_s):
        raise CommandFailed(
            f"{text!r} is no outage", tip="for example s0001@60-120", exit_code=ExitCode.WRONG_USAGE
        )
    return Outage(name, float(from_s), float(until_s))


def _number(text: str) -> float:
    """Return the number that a text is, nan if it is none."""
    try:
        return float(text)
    except ValueError:
        return nan
