"""`mico tune …` and `mico adapters …` against a scripted gateway: what is sent, shown and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from mico.cli import main
from mico.client import Client
from mico.session import Session


def a_job(status: str = "running", *, paused: bool = False) -> dict[str, Any]:
    progress = {"paused": paused, "site": "gpu-1", "step": 3, "total_steps": 12, "trained_tokens": 4_500}
    return {
        "id": "ftjob-1",
        "object": "fine_tuning.job",
        "model": "qwen",
        "status": status,
        "created_at": 1_750_000_000,
        "error": None,
        "mico": progress,
    }


EVENT = {"created_at": 1_750_000_000, "level": "warn", "message": "gpu-1 was lost"}
MODEL = {
    "id": "ft:qwen:acme::1a2b3c4d",
    "model": "qwen",
    "rank": 16,
    "step_number": 12,
    "bytes": 18_000_000,
    "served": False,
    "created_at": 1_750_000_000,
}


class Gateway:
    """Answers every request of the commands, and keeps what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.refuses: dict[str, int] = {}  # the status of paths

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode()
        self.asked.append((request.method, path))
        if path in self.refuses:
            return httpx.Response(self.refuses[path], json={"error": {"message": "no"}})
        if path == "/v1/files":
            assert b"fine-tune" in request.read()
            return httpx.Response(200, json={"id": f"file-{len(self.asked)}"})
        if request.method == "POST":
            self.bodies.append(json.loads(request.read()))
            return httpx.Response(200, json=a_job("queued", paused=path.endswith("/pause")))
        if request.method == "DELETE":
            return httpx.Response(200, json={"id": "x", "object": "model", "deleted": True})
        if path.startswith("/v1/fine_tuning/models"):
            return httpx.Response(200, json={"data": [MODEL]})
        if "/events" in path:
            return httpx.Response(200, json={"data": [EVENT | {"message": "the newest"}, EVENT]})
        return httpx.Response(200, json={"data": [a_job()]} if "?" in path else a_job())


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gateway:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    found = Gateway()

    def client(self: Session, base_url: str | None, api_key: str | None) -> Client:
        return Client("http://gateway/v1", "k", transport=httpx.MockTransport(found))

    monkeypatch.setattr(Session, "client", client)
    return found


def test_create_uploads_and_says_only_what_was_given(
    gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["rows.jsonl", "--model", "qwen", "--valid", "rows.jsonl", "--epochs", "2", "--suffix", "s"]
    assert main(["tune", "create", *given]) == 0
    assert capsys.readouterr().out == "ftjob-1\n"
    (body,) = gateway.bodies
    assert (body["model"], body["training_file"], body["validation_file"]) == ("qwen", "file-1", "file-2")
    assert body["method"]["supervised"]["hyperparameters"]["n_epochs"] == 2
    assert body["method"]["supervised"]["hyperparameters"]["batch_size"] is None
    assert (body["suffix"], body["seed"], body["mico"]["target"]) == ("s", None, "all-linear")


def test_a_missing_file_is_named_before_anything_is_sent(
    gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "create", "none.jsonl", "--model", "qwen"]) == 2
    assert "there is no file none.jsonl" in capsys.readouterr().err
    assert gateway.asked == []


def test_the_files_of_a_job_that_is_refused_are_deleted(gateway: Gateway) -> None:
    gateway.refuses = {"/v1/fine_tuning/jobs": 400, "/v1/files/file-1": 400}
    assert main(["tune", "create", "rows.jsonl", "--valid", "rows.jsonl", "--model", "qwen"]) == 1
    deleted = [path for method, path in gateway.asked if method == "DELETE"]
    assert deleted == ["/v1/files/file-1", "/v1/files/file-2"]


def test_jobs_are_listed_shown_and_told_of(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "list"]) == 0
    listed = capsys.readouterr().out
    assert "ftjob-1" in listed and "3/12" in listed and "4,500" in listed and "gpu-1" in listed
    assert main(["tune", "show", "ftjob-1"]) == 0
    assert "2025-06-15T15:06:40+00:00" in capsys.readouterr().out
    assert main(["tune", "events", "ftjob-1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("warn: gpu-1 was lost") and lines[1].endswith("the newest")
    assert main(["tune", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["id"] == "ftjob-1"


@pytest.mark.parametrize("verb", ["cancel", "pause", "resume"])
def test_a_job_is_turned(gateway: Gateway, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert main(["tune", verb, "ftjob/1"]) == 0
    assert gateway.asked == [("POST", f"/v1/fine_tuning/jobs/ftjob%2F1/{verb}")]
    assert capsys.readouterr().err.strip().endswith("paused" if verb == "pause" else "queued")


def test_adapters_are_listed_and_removed(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["adapters", "list"]) == 0
    listed = capsys.readouterr().out
    assert MODEL["id"] in listed and "18,000,000" in listed and " no " in listed
    assert main(["adapters", "remove", MODEL["id"]]) == 0
    assert gateway.asked[-1] == ("DELETE", "/v1/models/ft%3Aqwen%3Aacme%3A%3A1a2b3c4d")
    assert "is deleted" in capsys.readouterr().err
    for command in (["adapters", "remove", ""], ["tune", "show", ""]):
        assert main(command) == 2
