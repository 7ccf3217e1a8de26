"""Leases fine-tuning jobs and supervises them. Every replica takes jobs without a holder, such as those of a
replica that died."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final

from gateway.batches.files import Page
from gateway.domain import Site
from gateway.errors import TooMany
from gateway.federation.training import RunReport
from gateway.store.database import DATABASE_ERRORS, reason
from gateway.tasks import cancel
from gateway.tuning.context import TuningContext
from gateway.tuning.events import ERROR, WARN
from gateway.tuning.ledger import new_run
from gateway.tuning.placing import Act, End, Seen, choose, idler, next_act, of_same_base
from gateway.tuning.results import write_results
from gateway.tuning.serving import Serving
from gateway.tuning.training_run import advanced, end_of, order_of, progress_of
from gateway.tuning.validating import check
from gateway.tuning.values import Content, Job, JobError, JobStatus, Kind

log = logging.getLogger(__name__)

POLL_S: Final = 2.0
"""Interval between reads of the database. A lease outlives several polls."""
TICK_S: Final = 0.25
"""Interval between checks of the sites' reports, in memory."""
RECORD_S: Final = 1.0
"""Minimum time between two writes of a run's progress."""
ORDER_AGAIN_S: Final = 3.0
"""A site reports on its runs every 2 s. A site that does not is sent the order again."""
AVOID_S: Final = 60.0
"""How long a site that failed or lost a job is the last choice for that job."""
STALE_RUNS_A_POLL: Final = 20
TIDY_S: Final = 60.0
LEFTOVERS_AT_ONCE: Final = 20
WAITS: Final = "No site has room to train; the job waits."


class HeldJob:
    """State of a job that this replica holds. `task` checks its files."""

    def __init__(self, job: Job, now_s: float) -> None:
        self.avoided: dict[str, float] = {}  # time until which each site is avoided
        self.waits_since: float | None = None  # start of the wait for a site, in unix seconds
        self.task: asyncio.Task[None] | None = None
        self.begin(job, now_s)

    def begin(self, job: Job, now_s: float) -> None:
        """Reset the state for the next run of the job, or for waiting for one."""
        self.job = job
        self.heard_s = now_s  # last report of the run
        self.linked_s = now_s  # last time its site was linked
        self.step_s = now_s  # last training step of the run
        self.ordered_s = float("-inf")
        self.stopping_s: float | None = None  # time of the order to stop the run
        self.recorded: RunReport | None = None
        self.recorded_s = float("-inf")

    def observe(self, is_linked: bool, report: RunReport | None, now_s: float) -> Seen:
        """Store the newest report of the current run. Return what is known about the run."""
        if is_linked:
            self.linked_s = now_s
        if report is not None:
            self.heard_s = max(self.heard_s, report.heard_s)
        end = None if report is None else end_of(report)
        stopping_s = 0.0 if self.stopping_s is None else now_s - self.stopping_s
        return Seen(end, now_s - self.heard_s, now_s - self.linked_s, stopping_s)


class Runner:
    """Supervises the jobs that this replica leases."""

    def __init__(self, context: TuningContext, poll_s: float = POLL_S, tick_s: float = TICK_S) -> None:
        self._context = context
        self._poll_s, self._tick_s = poll_s, tick_s
        self._held: dict[str, HeldJob] = {}
        self._polled_s = self._tidied_s = float("-inf")
        self._runs: dict[str, int] | None = None  # number of runs by site, as read in this round
        self._wake = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._serving = Serving(context)

    def start(self) -> None:
        self._running = asyncio.create_task(self._run_for_ever(), name="fine-tuning")

    def wake(self) -> None:
        """Read the database at once, because a client has changed a job at this replica."""
        self._polled_s = float("-inf")
        self._wake.set()

    async def close(self) -> None:
        """Return the leases. Other replicas continue with the same runs."""
        await cancel(self._running, *(held.task for held in self._held.values()))
        await self._serving.close()
        with suppress(*DATABASE_ERRORS):
            await self._context.ledger.release()

    async def _run_for_ever(self) -> None:
        while True:
            try:
                await self.turn()
            except DATABASE_ERRORS as exc:
                log.warning("training goes on without the database: %s", reason(exc))
            except Exception:
                log.exception("looking after fine-tuning went wrong in an unforeseen way; it goes on")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._tick_s):
                    await self._wake.wait()
            self._wake.clear()

    async def turn(self) -> None:
        """Renew the leases when due, then handle every job once."""
        now_s = self._context.clock()
        if now_s - self._polled_s >= self._poll_s:
            self._polled_s = now_s
            await self._poll()
        self._runs = None
        for held in [*self._held.values()]:
            try:
                await self._look_after(held)
            except DATABASE_ERRORS as exc:
                log.warning("job %s waits for the database: %s", held.job.id, reason(exc))

    async def _poll(self) -> None:
        context, now_s = self._context, self._context.clock()
        linked = [site for site in context.sites() if site.name in context.links()]
        training = [site for site in linked if site.identity.trains is not None]
        served = {model for site in training for model in site.identity.models}
        leased = {job.id: job for job in await context.ledger.lease(context.limits.replica_jobs, served)}
        for job_id in [job_id for job_id in self._held if job_id not in leased]:
            self._let_go(self._held.pop(job_id))
        if any(context.caller(job.key_id) is None for job in leased.values()):
            await context.refresh_keys()
        for job in leased.values():
            held = self._held.setdefault(job.id, HeldJob(job, now_s))
            if held.job.run != job.run:
                held.begin(job, now_s)
            held.job = job
        await self._stop_stale_runs()
        await self._serving.settle()
        if now_s - self._tidied_s >= min(TIDY_S, 10 * self._poll_s):
            self._tidied_s = now_s
            await context.store.remove_leftovers(LEFTOVERS_AT_ONCE)
            await context.ledger.remove_expired(LEFTOVERS_AT_ONCE)

    def _let_go(self, held: HeldJob) -> None:
        """Drop a job that has ended, or that another replica holds now."""
        if held.task is not None:
            held.task.cancel()

    async def _stop_stale_runs(self) -> None:
        """Make sites drop outdated runs, of jobs that have ended or moved to another site."""
        current = {held.job.run for held in self._held.values()}
        for link in [*self._context.links().values()]:
            reports = [each for each in link.training.reports.values() if each.run not in current]
            for report in reports[:STALE_RUNS_A_POLL]:
                if await self._context.ledger.current_run(report.job_id) != report.run:
                    link.training.stop(report.run, snapshot=False)

    async def _look_after(self, held: HeldJob) -> None:
        job = held.job
        if self._context.caller(job.key_id) is None:
            await self._fail(held, JobError("key_revoked", "The API key that created the job was revoked."))
        elif job.status is JobStatus.VALIDATING:
            if held.task is None or held.task.done():
                held.task = asyncio.create_task(self._guard(self._validate(held), job), name=job.id)
        elif job.run is not None:
            await self._follow(held)
        elif job.status is JobStatus.QUEUED:
            await self._place(held)
        else:
            held.waits_since = None  # it is paused

    async def _guard(self, work: Coroutine[Any, Any, None], job: Job) -> None:
        try:
            await work
        except DATABASE_ERRORS as exc:
            log.warning("the files of job %s are checked again later: %s", job.id, reason(exc))
        except Exception:
            log.exception("checking the files of job %s went wrong in an unforeseen way", job.id)

    async def _refresh(self, held: HeldJob) -> None:
        """Read the job again after a change by this replica or by a client."""
        context = self._context
        job = await context.ledger.get(held.job.tenant, held.job.id)
        if job is None or job.ended or job.leased_by != context.ledger.owner:
            self._held.pop(held.job.id, None)
            return
        if job.run != held.job.run:
            held.begin(job, context.clock())
        held.job = job

    # ---- before a run

    async def _validate(self, held: HeldJob) -> None:
        """Check the files. Queue the job, or fail it with a list of all faults and their lines."""
        context, job = self._context, held.job
        contents: list[Content] = []
        rows = 0
        named = (
            ("training_file", Kind.DATA, job.training_file_id),
            ("validation_file", Kind.VALIDATION, job.validation_file_id),
        )
        for param, kind, file_id in named:
            if file_id is None:
                continue
            file = await context.files.get(job.tenant, file_id)
            if file is None:
                await self._fail(held, JobError("file_not_found", f"The file {file_id} was deleted.", param))
                return
            beside = partial(context.side_work.run, job.tenant)
            checked = await check(context.files.parts(file), context.limits, beside)
            if checked.faults:
                for fault in checked.faults:
                    await context.ledger.add_event(job, ERROR, f"{param}, {fault}")
                first = f"The {param} can't be trained on: {checked.faults[0]}"
                more = f" ({len(checked.faults)} faults; the events name each)"
                text = first[:900] + (more if len(checked.faults) > 1 else "")
                await self._fail(held, JobError("invalid_training_file", text, param))
                return
            rows = checked.rows if kind is Kind.DATA else rows
            now = context.unix_time()
            contents.append(Content(job.id, kind, 0, checked.sha256, checked.bytes, file_id, now))
        if (steps := job.plan.total_steps(rows)) > context.limits.total_steps:
            text = f"The job has {steps:,} steps, the most is {context.limits.total_steps:,}."
            await self._fail(held, JobError("too_many_steps", text, "hyperparameters.n_epochs"))
            return
        await context.ledger.validated(job, rows, contents)
        await self._refresh(held)

    async def _place(self, held: HeldJob) -> None:
        """Start a run at a site with room, or pause a job whose tenant has spent its monthly quota."""
        context, job, now_s = self._context, held.job, self._context.clock()
        if (refusal := self._charge(job, job.trained_tokens, job.nano_usd)) is not None:
            await self._pause(job, refusal)
            await self._refresh(held)
            return
        held.avoided = {site: until_s for site, until_s in held.avoided.items() if until_s > now_s}
        if self._runs is None:
            self._runs = await context.ledger.runs()
        site = choose(
            self._sites_for(job),
            job.model,
            job.plan,
            runs=self._runs,
            avoided=held.avoided,
            now_s=now_s,
        )
        if site is None:
            await self._wait_for_site(held)
        elif await context.ledger.start(job, new_run(), site.name):
            held.waits_since, self._runs = None, None
            await self._refresh(held)
            await self._order(held)

    def _sites_for(self, job: Job) -> list[Site]:
        """Return the linked sites that serve the job's base, in the regions of the job's key."""
        context, caller = self._context, self._context.caller(job.key_id)
        sites = [] if caller is None else caller.sites_of(context.sites())
        same = of_same_base(sites, job.model, job.revision)
        return [each for each in same if each.name in context.links()]

    async def _wait_for_site(self, held: HeldJob) -> None:
        context = self._context
        now, most_s = context.unix_time(), context.limits.queued_s
        if held.waits_since is None or now - held.waits_since > most_s:  # it may have been paused since
            held.waits_since = await self._begin_wait(held.job)
        if now - held.waits_since > most_s:
            await self._fail(held, JobError("no_site", "For a day no site had room to train it."))

    async def _begin_wait(self, job: Job) -> float:
        """Return the time since which a job waits for a site. If its last event is such a wait, written by
        any replica, that wait continues.
        """
        context = self._context
        last = await context.events.list_page(job.id, Page(1))
        if last and last[0].message == WAITS:
            return last[0].at
        await context.ledger.add_event(job, WARN, WAITS, (JobStatus.QUEUED,))
        return context.unix_time()

    # ---- a run

    async def _order(self, held: HeldJob) -> None:
        context, job = self._context, held.job
        link = context.links().get(job.site)
        if link is None or job.run is None:
            return
        contents = await context.contents.of_job(job.id, Kind.DATA, Kind.VALIDATION, Kind.SNAPSHOT)
        link.training.train(order_of(job, contents))
        held.ordered_s = context.clock()

    async def _follow(self, held: HeldJob) -> None:
        """Handle the newest report of the current run."""
        context, job, now_s = self._context, held.job, self._context.clock()
        link = context.links().get(job.site)
        report = None if link is None else link.training.reports.get(job.run or "")
        seen = held.observe(link is not None, report, now_s)
        if report is not None and not await self._record(held, report, now_s):
            return
        match next_act(job.status, seen, context.limits):
            case Act.SUCCEED:
                await self._succeed(held)
            case Act.FAIL:
                assert report is not None
                await self._fail(held, _error_of(report))
            case Act.LEAVE:
                await self._leave(held, seen.end, "" if report is None else report.error)
            case Act.STOP if link is not None and held.stopping_s is None:
                held.stopping_s = now_s
                link.training.stop(job.run or "", snapshot=True)
            case Act.GO_ON if max(held.heard_s, held.ordered_s) < now_s - ORDER_AGAIN_S:
                await self._order(held)
            case Act.GO_ON if job.runs == 1 and now_s - held.step_s > context.limits.starved_s:
                await self._move(held, now_s)

    async def _move(self, held: HeldJob, now_s: float) -> None:
        """Move a run whose site leaves it no time to a site that has more.

        The run continues there from its snapshot. It is not moved again before its next step, because a step
        may take as long at any site.
        """
        context, job = self._context, held.job
        held.step_s = now_s  # delays the next search
        sites, runs = context.sites(), await context.ledger.runs()
        others = [each for each in self._sites_for(job) if each.name != job.site]
        other = choose(others, job.model, job.plan, runs=runs, avoided=held.avoided, now_s=now_s)
        here = next((each for each in sites if each.name == job.site), None)
        link = context.links().get(job.site)
        if here is None or link is None or not idler(here, other, runs):
            return
        text = f"{job.site} has no time to train it; the job moves to a site that is less busy."
        if await context.ledger.add_event(job, WARN, text):
            link.training.stop(job.run or "", snapshot=True)

    async def _record(self, held: HeldJob, report: RunReport, now_s: float) -> bool:
        """Write the progress of the run and charge it. If the tenant has spent its monthly quota, pause the
        unfinished job. Return whether the run is still current and the job still held.
        """
        context, job = self._context, held.job
        is_due = report.end or now_s - held.recorded_s >= RECORD_S
        if report is held.recorded or not is_due:
            return True
        site = next((each for each in context.sites() if each.name == job.site), None)
        progress = progress_of(job, report, site, context.limits)
        held.step_s = now_s if progress.step > job.step else held.step_s
        if not await context.ledger.advance(job, progress):
            await self._refresh(held)
            return False
        held.job, held.recorded, held.recorded_s = advanced(job, progress), report, now_s
        refusal = self._charge(job, progress.trained_tokens, progress.nano_usd)
        is_over = end_of(report) in (End.SUCCEEDED, End.FAILED)
        if refusal is not None and not is_over:
            await self._pause(job, refusal)
        await self._refresh(held)
        return held.job.id in self._held and held.job.run == report.run

    def _charge(self, job: Job, trained_tokens: int, nano_usd: int) -> TooMany | None:
        """Charge the new tokens. Return the refusal if the tenant has spent its monthly quota."""
        caller = self._context.caller(job.key_id)
        tokens, cost = trained_tokens - job.trained_tokens, nano_usd - job.nano_usd
        return None if caller is None else self._context.charge(caller, tokens, cost)

    async def _pause(self, job: Job, refusal: TooMany) -> None:
        ledger = self._context.ledger
        if await ledger.pause(job.tenant, job.id):
            await ledger.add_event(job, WARN, f"Paused: {refusal.message}")

    async def _succeed(self, held: HeldJob) -> None:
        context, job = self._context, held.job
        if not await context.contents.of_job(job.id, Kind.ADAPTER):
            await self._leave(held, End.GIVEN_UP, "it stored no adapter")
            return
        results = await write_results(job, context.files, context.events, context.limits)
        text = f"The job succeeded: {job.tuned_model} can be asked."
        if not await context.ledger.end(job, JobStatus.SUCCEEDED, text, results=results):
            await context.files.discard(results.id)
        self._over(held)

    async def _fail(self, held: HeldJob, error: JobError) -> None:
        await self._context.ledger.end(held.job, JobStatus.FAILED, error.message, error=error)
        self._over(held)

    def _over(self, held: HeldJob) -> None:
        """Drop a job that has ended, and make its site drop the run."""
        self._held.pop(held.job.id, None)
        self._drop_run(held.job)

    def _drop_run(self, job: Job) -> None:
        link = self._context.links().get(job.site)
        if link is not None and job.run is not None:
            link.training.stop(job.run, snapshot=False)

    async def _leave(self, held: HeldJob, end: End | None, error: str) -> None:
        """End a run but not its job, which continues elsewhere from its last snapshot, or stays paused."""
        context, job = self._context, held.job
        what = f"{job.site} {'gave the run up' if end else 'was lost'}" + (f": {error}" if error else "")
        if job.status is JobStatus.RUNNING:
            held.avoided[job.site] = context.clock() + AVOID_S
            if job.runs >= context.limits.runs:
                text = f"{job.runs} runs in a row ended without a step; the last one: {what}."
                await self._fail(held, JobError("site_failures", text))
                return
        message = (
            f"{what}; the job goes on from its last snapshot." if job.status is JobStatus.RUNNING else ""
        )
        if await context.ledger.leave_run(job, message, WARN):
            self._drop_run(job)
        await self._refresh(held)


def _error_of(report: RunReport) -> JobError:
    return JobError(report.error_code or "training_failed", report.error or "The site gave no reason.")
