"""Runs side by side: every combination of what was asked for, one row each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from gateway.routing.candidates import Policy
from gateway.routing.policies import POLICIES
from mico.errors import CommandFailed, ExitCode
from mico.simulation import workloads
from mico.simulation.estimators import estimator, expectations
from mico.simulation.federation import Federation, Outage, Setting
from mico.simulation.figures import figures, named_order
from mico.simulation.queries import Expected, Query
from mico.simulation.specification import SiteSpec, capacity_qps, sites_of

DRAWN = {"poisson": workloads.poisson, "burst": workloads.burst}


@dataclass(frozen=True, slots=True)
class Comparison:
    """What to run. `traces`: files, `poisson` or `burst`; `queries` at most of each."""

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


def rows(wanted: Comparison) -> Iterator[dict[str, Any]]:
    """A row per trace, sites, load, policy, estimator, order and offload setting, as each is done."""
    for each in (*map(policy, wanted.policies), *map(named_order, wanted.orders)):
        assert each is not None
    _check_regions(wanted)
    _check_rtts(wanted)
    texts = workloads.corpus(wanted.corpus)
    drawn = [_queries(trace, wanted, texts) for trace in wanted.traces]  # all, before anything runs
    for trace, found in zip(wanted.traces, drawn, strict=True):
        queries = workloads.classed(found, wanted.batch_share, wanted.bound)
        expected = {
            name: expectations(queries, estimator(name)(queries)) for name in dict.fromkeys(wanted.estimators)
        }
        for sites, load in product(wanted.sites, wanted.loads):
            specs = sites_of(sites)
            most = min(spec.kv_tokens for spec in specs)  # longer ones are left out of run and `queries`
            fitting = [query for query in queries if query.prompt_tokens + query.response_tokens <= most]
            scaled = workloads.at_rate(fitting, load * capacity(fitting, specs))
            where = {"trace": Path(trace).stem, "load": load, "sites": sites}
            yield from (where | row for row in _of_setting(wanted, specs, scaled, expected))


def _check_regions(wanted: Comparison) -> None:
    """Queries bound to a region where there is no site would all be refused."""
    for sites in wanted.sites:
        there = {spec.region for spec in sites_of(sites)}
        for region in wanted.bound:
            if region not in there:
                raise CommandFailed(
                    f"--bound {region}, and no site of {sites!r} is in it",
                    tip="name a group's region at its end, for example 2x16@1.0~5=eu",
                    exit_code=ExitCode.WRONG_USAGE,
                )


def _check_rtts(wanted: Comparison) -> None:
    for sites in wanted.sites:
        if any(len(spec.rtts_s) not in {0, wanted.gateways} for spec in sites_of(sites)):
            raise CommandFailed(
                f"{sites!r} tells a site's round trips, and not one for each gateway",
                tip="--gateways 2 takes two, for example 2x16~5+250, or one for all",
                exit_code=ExitCode.WRONG_USAGE,
            )


def _queries(trace: str, wanted: Comparison, texts: Any) -> list[Query]:
    drawn = DRAWN.get(trace)
    if drawn is not None:
        return drawn(texts, wanted.queries, wanted.seed)
    return workloads.from_trace(Path(trace), texts, wanted.queries, wanted.seed)


def _of_setting(
    wanted: Comparison,
    specs: Sequence[SiteSpec],
    queries: Sequence[Query],
    expected: dict[str, dict[int, Expected]],
) -> Iterator[dict[str, Any]]:
    choices = product(wanted.policies, wanted.estimators, wanted.orders, wanted.offload)
    for policy_name, estimator_name, order, offload in choices:
        score, starving_after_s = named_order(order)
        setting = Setting(
            specs=tuple(specs),
            policy=policy(policy_name),
            score=score,
            starving_after_s=starving_after_s,
            offload=offload,
            report_every_s=wanted.report_every_s,
            report_delay_s=wanted.report_delay_s,
            gateways=wanted.gateways,
            outages=_of_sites(wanted.outages, specs),
        )
        federation = Federation(setting, expected[estimator_name])
        records = federation.run(queries)
        preemptions = sum(site.preemptions for site in federation.sites.values())
        prices = {spec.name: spec.usd_per_mtok for spec in specs}
        yield {
            "policy": policy_name,
            "estimator": estimator_name,
            "order": order,
            "offload": offload,
            "queries": len(queries),
            **figures(records, preemptions, prices).row(),
        }


def _of_sites(outages: Sequence[Outage], specs: Sequence[SiteSpec]) -> tuple[Outage, ...]:
    """An outage of a region is one of each of its sites."""
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
    count = max(1, len(queries))
    prompt = sum(query.prompt_tokens for query in queries) / count
    response = sum(query.response_tokens for query in queries) / count
    return capacity_qps(list(specs), prompt, response)


def policy(name: str) -> Policy:
    if name not in POLICIES:
        raise CommandFailed(
            f"there is no policy {name!r}",
            tip=f"choose of {', '.join(POLICIES)}",
            exit_code=ExitCode.WRONG_USAGE,
        )
    return POLICIES[name]


def bound(text: str) -> tuple[str, float]:
    """`eu=0.3`: of all queries 30% may be answered in the region eu only."""
    region, _, share = text.partition("=")
    try:
        return region, float(share)
    except ValueError as error:
        raise CommandFailed(
            f"{text!r} is no share of a region", tip="for example eu=0.3", exit_code=ExitCode.WRONG_USAGE
        ) from error


def outage(text: str) -> Outage:
    """`s0001@60-120`, `eu@60-120`: the site or region is lost from the 60th second to the 120th."""
    name, _, span = text.partition("@")
    from_s, _, until_s = span.partition("-")
    try:
        return Outage(name, float(from_s), float(until_s))
    except ValueError as error:
        raise CommandFailed(
            f"{text!r} is no outage", tip="for example s0001@60-120", exit_code=ExitCode.WRONG_USAGE
        ) from error
