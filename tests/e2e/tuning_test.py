"""Jobs of fine-tuning over real processes: one that nothing disturbs, and others whose sites or gateway die.

All have the same rows and seed, so that each must become the same adapter, bit by bit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from gateway.store.database import open_engine
from gateway.tuning.contents import Contents
from gateway.tuning.values import Kind
from mico.local.plan import to_toml
from tests.support.local_federation import LocalFederation, eventually, mico_here
from tests.support.site_process import start_site
from tests.support.tiny_model import write_tiny_model
from tests.support.training import chats

pytestmark = pytest.mark.e2e

BASE = "trained-base"
STEPS, EPOCHS = 12, 6
SLOW = {"iteration_floor_s": 0.05}
"""Of a slice of training, so that a job takes long enough to be disturbed."""


class School:
    """Sites that train, started beside the federation's own, and jobs of its client."""

    def __init__(self, federation: LocalFederation, folder: Path, client: OpenAI) -> None:
        self.federation = federation
        self.folder = folder
        self.client = client
        self.sites: dict[str, subprocess.Popen[bytes]] = {}
        write_tiny_model(folder / "base")

    def start(self, name: str, **more: object) -> None:
        """Start a site; `ready` waits until it serves."""
        federation = self.federation
        known = tomllib.loads(federation.folder.config(federation.running.sites[0].name).read_text())
        settings = {key: known[key] for key in ("gateways", "token_file")}
        settings |= {"site": name, "slots": 4, "device": "cpu", "threads": 1, "training": True}
        settings |= {"model": str(self.folder / "base"), "served_model": BASE, "kv_tokens": 2048, **more}
        config = self.folder / f"{name}.toml"
        config.write_text(to_toml(settings))
        self.sites[name] = start_site(config, self.folder / f"{name}.log")

    def ready(self, *names: str) -> None:
        for name in names:
            eventually(
                lambda name=name: self.federation.sites().get(name, {}).get("state") == "ready",
                f"{name} is ready",
            )

    def trains(self, name: str) -> int:
        """Return the jobs that a site trains, as it reports them."""
        return int(self.federation.sites()[name].get("training", 0))

    def order(self, *arguments: str) -> None:
        federation = self.federation
        where = ("--base-url", federation.base_url, "--api-key", federation.api_key)
        mico_here(federation.folder.path, "sites", *arguments, "--reason", "a lesson", *where)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def create(self) -> str:
        lines = b"\n".join(chats(16)) + b"\n"
        file = self.client.files.create(file=("rows.jsonl", lines), purpose="fine-tune")
        hyperparameters: Any = {"n_epochs": EPOCHS, "batch_size": 8, "learning_rate_multiplier": 100.0}
        return self.client.fine_tuning.jobs.create(
            model=BASE,
            training_file=file.id,
            suffix="support",
            seed=1,
            hyperparameters=hyperparameters,
            extra_body={"mico": {"rank": 8, "alpha": 16}},
        ).id

    def create_at(self, name: str) -> str:
        """Create a job while no other site takes any: one whose report came late would not take its own."""
        others = [other for other, site in self.sites.items() if other != name and site.poll() is None]
        for other in others:
            self.order("drain", other, "--yes")
        job_id = self.create()
        eventually(lambda: self.job(job_id).mico["site"] == name, f"{job_id} is at {name}")
        for other in others:
            self.order("resume", other)
        return job_id

    def job(self, job_id: str) -> Any:
        return self.client.fine_tuning.jobs.retrieve(job_id)

    def site_of(self, job_id: str) -> str:
        """Return the site that has stored a snapshot of the job, and trains on."""
        jobs = self.client.fine_tuning.jobs
        eventually(lambda: list(jobs.checkpoints.list(job_id)), "a checkpoint is stored")
        job = self.job(job_id)
        assert job.status == "running" and job.mico["step"] < STEPS
        return str(job.mico["site"])

    def succeeded(self, job_id: str) -> Any:
        def over() -> Any:
            job = self.job(job_id)
            return job if job.status in ("succeeded", "failed", "cancelled") else None

        job = eventually(over, f"{job_id} is over")
        logs = "\n".join(self.log(name)[-2000:] for name in self.sites)
        assert (job.status, job.error) == ("succeeded", None), logs
        assert sum("succeeded" in each for each in self.messages(job_id)) == 1
        return job

    def events(self, job_id: str) -> list[Any]:
        """Return the events of a job, the first one first."""
        return list(self.client.fine_tuning.jobs.list_events(job_id, limit=100))[::-1]

    def messages(self, job_id: str) -> list[str]:
        return [each.message for each in self.events(job_id)]

    def digest(self, job_id: str) -> str:
        """Return the digest of the adapter that a job has made."""

        async def read() -> str:
            engine = open_engine(self.federation.running.database_url)
            try:
                (adapter,) = await Contents(engine, 1).of_job(job_id, Kind.ADAPTER)
                return adapter.sha256
            finally:
                await engine.dispose()

        return asyncio.run(read())

    def answers(self, model: str) -> tuple[list[str], set[str]]:
        """Return greedy answers of a model, and the sites that gave them."""
        texts, sites = [], set()
        for number in range(8):
            raw = self.client.chat.completions.with_raw_response.create(
                model=model,
                messages=[{"role": "user", "content": f"what is {number}?"}],
                max_tokens=8,
                temperature=0,
            )
            texts.append(raw.parse().choices[0].message.content or "")
            sites.add(str(raw.headers["x-mico-site"]))
        return texts, sites

    def models_at(self, site: str) -> set[str]:
        return set(self.federation.sites().get(site, {}).get("models", ()))


@pytest.fixture(scope="module")
def school(federation: LocalFederation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[School]:
    """A site where jobs cost money, so that they come to it only while no other takes them."""
    with federation.sdk() as client:
        made = School(federation, tmp_path_factory.mktemp("school"), client)
        try:
            made.start("home", training_usd_per_mtok=1.0)
            made.ready("home")
            yield made
        finally:
            for process in made.sites.values():
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def whole(school: School) -> str:
    """A job that nothing disturbs; meanwhile the sites start that the others die at."""
    job_id = school.create()
    school.start("first", **SLOW)
    school.start("second", engine_process=True, **SLOW)
    school.succeeded(job_id)
    return job_id


def learned(texts: list[str]) -> int:
    """Return how many answers have the form of the examples: a digit, an exclamation mark."""
    return sum(len(text) == 2 and text[0].isdigit() and text[1] == "!" for text in texts)


def test_a_job_by_the_sdk_becomes_a_model_that_answers(school: School, whole: str) -> None:
    client, job = school.client, school.job(whole)
    told = client.fine_tuning.jobs.list_events(whole, limit=100)
    steps: Any = [each.data for each in told if each.type == "metrics"]
    assert sorted(each["step"] for each in steps) == list(range(1, STEPS + 1))
    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(whole))
    assert {each.step_number for each in checkpoints} >= {STEPS - STEPS // EPOCHS}
    last = checkpoints[0].fine_tuned_model_checkpoint
    eventually(lambda: any(last in school.models_at(name) for name in school.sites), "a site serves it")
    assert learned(school.answers(last)[0]) >= 4
    before, _ = school.answers(BASE)
    after, sites = school.answers(job.fine_tuned_model)
    assert sites == {"home"}
    assert learned(before) == 0 and learned(after) >= 6, after
    listed = {each.id: each.to_dict() for each in client.models.list().data}
    assert listed[job.fine_tuned_model]["parent"] == BASE


def test_a_paused_job_trains_no_step_and_goes_on_to_the_same_adapter(school: School, whole: str) -> None:
    school.ready("first", "second")
    jobs, job_id = school.client.fine_tuning.jobs, school.create()
    site = school.site_of(job_id)
    jobs.pause(job_id)

    def stopped() -> Any:
        job = school.job(job_id)
        is_left = job.status == "queued" and job.mico["site"] is None
        return job if is_left and not school.trains(site) else None

    paused = eventually(stopped, "the job is paused, and its site trains nothing")
    assert paused.mico["paused"] and paused.fine_tuned_model is None
    assert 0 < paused.mico["step"] < STEPS
    before = school.messages(job_id)
    jobs.resume(job_id)
    school.succeeded(job_id)
    messages = school.messages(job_id)
    resumed = messages.index("The job was resumed.")
    assert messages[:resumed] == before, "while it was paused nothing happened to it"
    steps = [each.data["step"] for each in school.events(job_id) if each.type == "metrics"]
    assert steps == list(range(1, STEPS + 1)), "each step was trained once"
    assert school.digest(job_id) == school.digest(whole)


def test_jobs_end_once_with_the_same_adapter_whoever_dies(school: School, whole: str) -> None:
    school.ready("first", "second")
    eventually(lambda: not (school.trains("first") or school.trains("second")), "both have room for a run")
    federation, wanted = school.federation, school.digest(whole)
    killed, other = "first", "second"
    kept, lost = school.create_at(other), school.create_at(killed)
    assert school.site_of(lost) == killed
    school.sites[killed].kill()
    gateway = federation.running.gateways[0]
    os.kill(gateway.pid, signal.SIGKILL)
    try:
        eventually(lambda: not gateway.alive, "the gateway is gone")
    finally:
        federation.restart_dead()

    school.ready(other)
    school.succeeded(kept)  # beside no gateway it went on
    assert not [each for each in school.messages(kept) if "goes on from its last snapshot" in each]
    left = school.create_at(other)
    assert school.site_of(left) == other
    school.sites[other].terminate()  # while the first is still waited for
    assert school.sites[other].wait(60) == 0
    for job_id in (lost, left):
        job = school.succeeded(job_id)
        assert any("goes on from its last snapshot" in each for each in school.messages(job_id))
        name = job.fine_tuned_model
        eventually(lambda name=name: name in school.models_at("home"), "the site that finished it serves it")
    assert {school.digest(each) for each in (kept, lost, left)} == {wanted}

    tuned = school.job(kept).fine_tuned_model  # was served by the site that made it
    eventually(lambda: tuned in school.models_at("home"), "another fetches it")
    assert school.answers(tuned) == school.answers(school.job(whole).fine_tuned_model)
    school.client.models.delete(tuned)
    eventually(lambda: tuned not in school.models_at("home"), "the site serves it no more")
