"""Decides where a fine-tuning job runs, and what happens to its run. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from gateway.domain import ModelState, Site, SiteState
from gateway.routing.filters import is_stale
from gateway.tuning.values import JobStatus, Plan, TuningLimits


def refusal(sites: Sequence[Site], model: str, plan: Plan) -> str | None:
    """Return the reason why no site of the federation can train an adapter of a model now, or None."""
    here = [site for site in sites if site.state is not SiteState.DOWN]
    serving = [site for site in here if _serves(site, model)]
    if not serving:
        return f"no site serves {model!r} as a base now"
    training = [site.identity.trains for site in serving if site.identity.trains is not None]
    if not training:
        return f"no site that serves {model!r} trains: sites do so where their operator allows it"
    highest = max(each.max_rank for each in training)
    if plan.rank > highest:
        return f"the sites that train {model!r} train adapters of rank {highest} at most, not {plan.rank}"
    return None


def of_same_base(sites: Sequence[Site], model: str, revision: str) -> Sequence[Site]:
    """Return the sites with the base that the job started with, including sites that are down, which the job
    waits for. If there are none, return all sites: one of them will report that the base has changed.
    """
    same = [
        site for site in sites if _serves(site, model) and site.identity.models[model].revision == revision
    ]
    return same or sites


def choose(
    sites: Sequence[Site],
    model: str,
    plan: Plan,
    *,
    runs: Mapping[str, int],
    avoided: Container[str],
    now_s: float,
) -> Site | None:
    """Return the idlest site that may start a run now. `runs`: number of runs by site. `avoided`: sites that
    failed the job recently, which come last.
    """
    able = [
        site
        for site in sites
        if _is_fresh(site, now_s)
        and _serves(site, model)
        and site.identity.models[model].state is ModelState.READY  # no engine trains while its base sleeps
        and (trains := site.identity.trains) is not None
        and plan.rank <= trains.max_rank
        and _runs(site, runs) < trains.runs
    ]

    def cost(site: Site) -> tuple[bool, int, float, float, str]:
        assert site.identity.trains is not None
        price = site.identity.trains.usd_per_mtok
        return site.name in avoided, _runs(site, runs), _busy(site), price, site.name

    return min(able, key=cost, default=None)


def idler(here: Site, other: Site | None, runs: Mapping[str, int]) -> bool:
    """Return whether a starved run would get more time at another site, one that is less busy and trains
    nothing.
    """
    return other is not None and not _runs(other, runs) and _busy(other) < _busy(here)


def _runs(site: Site, runs: Mapping[str, int]) -> int:
    """Return the number of runs of a site, including those of other federations."""
    return max(runs.get(site.name, 0), site.load.training)


def _busy(site: Site) -> float:
    """Return the running and waiting requests of a site as a share of its slots."""
    load = site.load
    return (load.running + load.pending + site.credit.requests) / site.identity.slots


def _serves(site: Site, model: str) -> bool:
    served = site.identity.models.get(model)
    return served is not None and not served.parent


def _is_fresh(site: Site, now_s: float) -> bool:
    return site.state is SiteState.READY and site.weight > 0 and not is_stale(site.load, now_s)


class End(StrEnum):
    """How a run ended, as its site reports."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    GIVEN_UP = "given up"


class Seen(NamedTuple):
    """State of a run. Seconds since its site's last report (`silent_s`), since the site's link ended
    (`unlinked_s`) and since the order to stop (`stopping_s`); 0 if not applicable.
    """

    end: End | None = None
    silent_s: float = 0.0
    unlinked_s: float = 0.0
    stopping_s: float = 0.0


class Act(StrEnum):
    GO_ON = "go on"
    SUCCEED = "succeed"
    FAIL = "fail"
    LEAVE = "leave"
    STOP = "stop"


def next_act(status: JobStatus, seen: Seen, limits: TuningLimits) -> Act:
    """Return the action for the current run of a job. A running job continues elsewhere if its run is
    dropped.
    """
    if seen.end is End.SUCCEEDED:  # also of a job that was paused too late to stop it
        return Act.SUCCEED
    if seen.end is End.FAILED:
        return Act.FAIL
    lost = seen.silent_s > limits.lost_s or seen.unlinked_s > limits.unlinked_s
    if status is not JobStatus.RUNNING:  # paused, or resumed before the run had stopped
        gone = seen.end is not None or lost or seen.stopping_s > limits.stop_s
        return Act.LEAVE if gone else Act.STOP
    return Act.LEAVE if seen.end is not None or lost else Act.GO_ON
