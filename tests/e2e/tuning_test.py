"""A job of fine-tuning over real processes: at a site that lives to its end, and at one that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from mico.local.plan import to_toml
from tests.support.local_federation import LocalFederation, eventually
from tests.support.tiny_model import write_tiny_model
from tests.support.training import chats

pytestmark = pytest.mark.e2e

BASE = "trained-base"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def client(federation: LocalFederation) -> Iterator[OpenAI]:
    with federation.sdk() as made:
        yield made


@contextmanager
def training_site(federation: LocalFederation, folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    known = tomllib.loads(federation.folder.config(federation.running.sites[0].name).read_text())
    settings = {key: known[key] for key in ("gateways", "token_file")}
    settings |= {"site": name, "slots": 4, "device": "cpu", "threads": 1, "training": True}
    settings |= {"model": str(folder / "base"), "served_model": BASE, "kv_tokens": 2048}
    config = folder / f"{name}.toml"
    config.write_text(to_toml(settings))
    command = [sys.executable, "-m", "mico", "site", "--config", str(config)]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        try:
            eventually(lambda: federation.sites().get(name, {}).get("state") == "ready", f"{name} is ready")
            yield process
        finally:
            process.kill()
            process.wait()


def create(client: OpenAI, rows: int, epochs: int) -> Any:
    lines = b"\n".join(chats(rows)) + b"\n"
    file = client.files.create(file=("rows.jsonl", lines), purpose="fine-tune")
    return client.fine_tuning.jobs.create(
        model=BASE,
        training_file=file.id,
        suffix="support",
        seed=1,
        hyperparameters={"n_epochs": epochs, "batch_size": 8, "learning_rate_multiplier": 100.0},
        extra_body={"mico": {"rank": 8, "alpha": 16}},
    )


def ended(client: OpenAI, job_id: str) -> Any:
    def over() -> Any:
        job = client.fine_tuning.jobs.retrieve(job_id)
        return job if job.status in ("succeeded", "failed", "cancelled") else None

    return eventually(over, f"{job_id} is over")


def events(client: OpenAI, job_id: str) -> list[Any]:
    return list(client.fine_tuning.jobs.list_events(job_id, limit=100))


def answers(client: OpenAI, model: str) -> tuple[list[str], set[str]]:
    """Return greedy answers of a model, and the sites that gave them."""
    texts, sites = [], set()
    for number in range(8):
        raw = client.chat.completions.with_raw_response.create(
            model=model,
            messages=[{"role": "user", "content": f"what is {number}?"}],
            max_tokens=8,
            temperature=0,
        )
        texts.append(raw.parse().choices[0].message.content or "")
        sites.add(str(raw.headers["x-mico-site"]))
    return texts, sites


def models_at(federation: LocalFederation, site: str) -> set[str]:
    return set(federation.sites()[site]["models"])


def learned(texts: list[str]) -> int:
    """Return how many answers have the form of the examples: a digit, an exclamation mark."""
    return sum(len(text) == 2 and text[0].isdigit() and text[1] == "!" for text in texts)


def test_a_job_by_the_sdk_becomes_a_model_that_answers(
    federation: LocalFederation, client: OpenAI, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path / "base")
    with training_site(federation, tmp_path, "school") as school:
        created = create(client, rows=16, epochs=6)
        job = ended(client, created.id)
        assert (job.status, job.error) == ("succeeded", None), (tmp_path / "school.log").read_text()
        steps = [each.data for each in events(client, job.id) if each.type == "metrics"]
        assert sorted(each["step"] for each in steps) == list(range(1, 13))
        checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id))
        assert {each.step_number for each in checkpoints} >= {10}
        before, _ = answers(client, BASE)
        after, sites = answers(client, job.fine_tuned_model)
        assert sites == {"school"}
        assert learned(before) == 0 and learned(after) >= 6, after
        listed = {each.id: each.to_dict() for each in client.models.list().data}
        assert listed[job.fine_tuned_model]["parent"] == BASE
        with training_site(federation, tmp_path, "other"):
            os.kill(school.pid, signal.SIGKILL)
            eventually(lambda: job.fine_tuned_model in models_at(federation, "other"), "another fetches it")
            assert answers(client, job.fine_tuned_model) == (after, {"other"})
            client.models.delete(job.fine_tuned_model)
            eventually(lambda: models_at(federation, "other") == {BASE}, "the site serves it no more")


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_another_site_finishes_from_the_snapshot_of_one_that_ended(
    federation: LocalFederation, client: OpenAI, tmp_path: Path, end: signal.Signals
) -> None:
    write_tiny_model(tmp_path / "base")
    with ExitStack() as stack:
        first = stack.enter_context(training_site(federation, tmp_path, "first"))
        created = create(client, rows=64, epochs=40)
        eventually(
            lambda: list(client.fine_tuning.jobs.checkpoints.list(created.id)),
            "a checkpoint is stored",
        )
        os.kill(first.pid, end)
        assert first.wait(60) == (0 if end is signal.SIGTERM else -end)
        stack.enter_context(training_site(federation, tmp_path, "second"))
        job = ended(client, created.id)
        log = (tmp_path / "second.log").read_text()
        assert (job.status, job.error) == ("succeeded", None), log
        told = [each.message for each in events(client, job.id)]
        assert any("goes on from its last snapshot" in each for each in told)
        after, sites = answers(client, job.fine_tuned_model)
        assert sites == {"second"}
        assert learned(after) >= 6, after
