"""Laws of the states of a job of fine-tuning, and of its plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import LoadReport, Model, ModelState, Site, SiteIdentity, SiteState
from gateway.trains import Trains
from gateway.tuning.placing import Act, End, Seen, choose, idler, next_act, of_same_base, refusal
from gateway.tuning.values import UNFINISHED, Job, JobStatus, Plan, TuningLimits, before, may_become

ENDED = frozenset(JobStatus) - frozenset(UNFINISHED)


def test_a_job_that_ended_stays_as_it_is() -> None:
    assert {JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED} == ENDED
    assert not any(may_become(ended, after) for ended in ENDED for after in JobStatus)


def test_every_unfinished_job_can_be_cancelled_and_can_fail() -> None:
    assert set(before(JobStatus.CANCELLED)) == set(before(JobStatus.FAILED)) == set(UNFINISHED)


def test_a_job_succeeds_and_pauses_only_from_where_it_may() -> None:
    assert set(before(JobStatus.SUCCEEDED)) == {JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.PAUSED}
    assert set(before(JobStatus.PAUSED)) == {JobStatus.VALIDATING, JobStatus.QUEUED, JobStatus.RUNNING}
    assert before(JobStatus.VALIDATING) == (JobStatus.PAUSED,)


def test_every_job_can_come_to_success() -> None:
    reached = {JobStatus.SUCCEEDED}
    for _ in JobStatus:
        reached |= {status for status in JobStatus if any(may_become(status, after) for after in reached)}
    assert reached == {JobStatus.SUCCEEDED, *UNFINISHED}


@given(st.integers(1, 50_000), st.integers(1, 256), st.integers(1, 50))
def test_the_steps_of_a_plan_read_every_row_once_an_epoch(rows: int, batch: int, epochs: int) -> None:
    steps = Plan(epochs=epochs, batch_size=batch).total_steps(rows)
    assert steps % epochs == 0
    assert (steps // epochs - 1) * batch < rows <= steps // epochs * batch


@given(st.integers(0, 100), st.floats(1.0, 1e6), st.integers(1, 10_000))
def test_a_job_is_expected_to_end_when_the_rest_of_its_steps_is_trained(
    step: int, per_s: float, tokens: int
) -> None:
    job = Job("j", "t", "k", "m", "f", 0.0, Plan(), status=JobStatus.RUNNING, total_steps=100)
    assert job.estimate_finish(50.0) is None
    running = replace(job, step=step, trained_tokens=step * tokens, tokens_per_s=per_s)
    if step:
        assert running.estimate_finish(50.0) == pytest.approx(50.0 + (100 - step) * tokens / per_s)
        for status in set(JobStatus) - {JobStatus.RUNNING}:
            assert replace(running, status=status).estimate_finish(50.0) is None
        assert replace(running, tokens_per_s=0.0).estimate_finish(50.0) is None


@given(st.floats(0.0, 60.0), st.floats(0.0, 60.0))
def test_a_run_is_left_once_its_site_is_silent_or_gone_too_long(silent_s: float, unlinked_s: float) -> None:
    limits = TuningLimits()
    lost = silent_s > limits.lost_s or unlinked_s > limits.unlinked_s
    seen = Seen(None, silent_s, unlinked_s)
    assert next_act(JobStatus.RUNNING, seen, limits) is (Act.LEAVE if lost else Act.GO_ON)
    assert next_act(JobStatus.PAUSED, seen, limits) is (Act.LEAVE if lost else Act.STOP)
    ended = Seen(End.SUCCEEDED, silent_s, unlinked_s)  # what a site has told stays true
    for status in (JobStatus.RUNNING, JobStatus.PAUSED, JobStatus.QUEUED):
        assert next_act(status, ended, limits) is Act.SUCCEED
        assert next_act(status, ended._replace(end=End.FAILED), limits) is Act.FAIL
    assert next_act(JobStatus.PAUSED, ended._replace(end=End.STOPPED), limits) is Act.LEAVE


def test_a_site_whose_link_ended_is_lost_before_one_that_is_silent() -> None:
    assert TuningLimits().unlinked_s < TuningLimits().lost_s


def base(name: str, training: int = 0, running: int = 0, state: ModelState = ModelState.READY) -> Site:
    models = {"m": Model("m", "rev", 4096, 0, "o", state=state)}
    identity = SiteIdentity(name, "boot", "c", "r", models, 8, 10_000, trains=Trains(2, 64, 0.0))
    return Site(identity, SiteState.READY, LoadReport(1, 0.0, running=running, training=training))


def test_a_run_goes_where_nothing_is_trained_also_for_other_federations() -> None:
    def chosen(*sites: Site) -> str | None:
        found = choose(sites, "m", Plan(), runs={"a": 1}, avoided=(), now_s=0.0)
        return None if found is None else found.name

    assert chosen(base("a"), base("b", training=1), base("c", running=8)) == "c"
    assert chosen(base("a"), base("b", training=2)) == "a", "b has no room"
    assert chosen(base("a", training=2), base("b", training=2)) is None
    assert idler(base("a", running=8), base("c"), {})
    assert not idler(base("a", running=8), base("b", training=1), {})


@pytest.mark.parametrize("state", [ModelState.SLEEPING, ModelState.WAKING])
def test_a_run_waits_for_a_base_that_sleeps(state: ModelState) -> None:
    def chosen(*sites: Site) -> Site | None:
        return choose(sites, "m", Plan(), runs={}, avoided={"b"}, now_s=0.0)

    asleep, busy = base("a", state=state), base("b", training=1, running=8)
    assert chosen(asleep) is None
    assert chosen(asleep, busy) is busy
    assert refusal([asleep], "m", Plan()) is None, "the job is taken: the base may wake"


def test_a_job_waits_for_its_base_while_a_site_has_it_and_else_is_told_that_it_changed() -> None:
    down, ready = replace(base("a"), state=SiteState.DOWN), base("b")
    assert of_same_base([down, ready], "m", "rev") == [down, ready]
    assert of_same_base([down, ready], "m", "") == of_same_base([down, ready], "m", "old") == [down, ready]
    models = {"m": replace(ready.identity.models["m"], revision="new")}
    changed = replace(ready, identity=replace(ready.identity, models=models))
    assert of_same_base([down, changed], "m", "rev") == [down]
    assert of_same_base([changed], "m", "rev") == [changed]
