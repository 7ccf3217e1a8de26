"""`mico batch …` against a scripted gateway: files, exit statuses, JSON, a gateway that goes away, Ctrl-C."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from mico.cli import main
from mico.client import Client
from mico.commands import batch as commands
from mico.session import Session

OUTPUT = b'{"custom_id":"a"}\n'
ERRORS = b'{"custom_id":"b"}\n'
Answer = Callable[[httpx.Request], httpx.Response]


def a_batch(status: str, completed: int = 0, failed: int = 0, **more: Any) -> dict[str, Any]:
    counts = {"total": 2, "completed": completed, "failed": failed}
    times = {"created_at": 1_750_000_000, "expires_at": 1_750_086_400}
    return {"id": "batch_1", "object": "batch", "status": status, "request_counts": counts, **times, **more}


class Gateway:
    """Plays `states` one after another when asked how the batch is; the last one stays."""

    def __init__(self, *states: dict[str, Any] | int | type[BaseException]) -> None:
        self.states = list(states)
        self.uploaded = b""
        self.submitted: dict[str, Any] = {}
        self.refuses = False
        self.deleted: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/v1/files":
            self.uploaded = request.read()
            return httpx.Response(200, json={"id": "file-in"})
        if request.method == "DELETE":
            self.deleted.append(path)
            return httpx.Response(200, json={"deleted": True})
        if path.endswith("/content"):
            return httpx.Response(200, content=OUTPUT if "out" in path else ERRORS)
        if request.method == "POST" and path == "/v1/batches":
            self.submitted = json.loads(request.read())
            if self.refuses:
                return httpx.Response(400, json={"error": {"message": "no"}})
            return httpx.Response(200, json=a_batch("validating"))
        if path.endswith("/cancel"):
            return httpx.Response(200, json=a_batch("cancelling"))
        if path == "/v1/batches":
            return httpx.Response(200, json={"data": [a_batch("in_progress", 1)]})
        return self.respond(request)

    def respond(self, request: httpx.Request) -> httpx.Response:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, int):
            return httpx.Response(state, json={"error": {"message": "restarting"}})
        if isinstance(state, dict):
            return httpx.Response(200, json=state)
        raise state("gone")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "POLL_S", 0.0)
    (tmp_path / "in.jsonl").write_text("{}\n")
    return tmp_path


def play(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gateway: Gateway,
    *arguments: str,
) -> tuple[int, str, str]:
    def client(self: Session, base_url: str | None, api_key: str | None) -> Client:
        return Client("http://gateway/v1", "k", transport=httpx.MockTransport(gateway))

    monkeypatch.setattr(Session, "client", client)
    status = main(["batch", *arguments])
    return status, *capsys.readouterr()


DONE = a_batch("completed", 2, output_file_id="file-out")


def test_run_submits_waits_and_writes_the_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    gateway = Gateway(a_batch("validating"), a_batch("in_progress", 1), DONE)
    status, out, err = play(monkeypatch, capsys, gateway, "run", "in.jsonl", "-o", "answers.jsonl")
    assert (status, out) == (0, "answers.jsonl\n")
    assert (here / "answers.jsonl").read_bytes() == OUTPUT
    assert b'name="purpose"\r\n\r\nbatch' in gateway.uploaded and b"{}\n" in gateway.uploaded
    assert gateway.submitted["completion_window"] == "24h"
    assert "in_progress: 1 of 2 answered" in err and "completed: 2 of 2 lines answered" in err


def test_the_file_of_a_batch_that_is_refused_is_deleted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = Gateway(DONE)
    gateway.refuses = True
    assert play(monkeypatch, capsys, gateway, "submit", "in.jsonl")[0] == 1
    assert gateway.deleted == ["/v1/files/file-in"]
    gateway.refuses = False
    assert play(monkeypatch, capsys, gateway, "submit", "in.jsonl")[0] == 0
    assert len(gateway.deleted) == 1


def test_the_file_is_named_once_with_or_without_an_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    assert play(monkeypatch, capsys, Gateway(DONE), "run", "-i", "in.jsonl", "-o", "out.jsonl")[0] == 0
    assert (here / "out.jsonl").read_bytes() == OUTPUT
    for arguments in (("run",), ("submit", "in.jsonl", "--input", "in.jsonl")):
        status, out, err = play(monkeypatch, capsys, Gateway(DONE), *arguments)
        assert (status, out) == (2, "") and "name one file" in err


def test_lines_with_errors_are_beside_the_answers_and_in_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    partly = a_batch("completed", 1, 1, output_file_id="file-out", error_file_id="file-err")
    status, out, _ = play(monkeypatch, capsys, Gateway(partly), "run", "in.jsonl", "--json")
    told = json.loads(out)
    assert (status, told["output_path"], told["errors_path"]) == (3, "in.out.jsonl", "in.out.errors.jsonl")
    assert (here / "in.out.errors.jsonl").read_bytes() == ERRORS


def test_what_an_earlier_run_wrote_is_not_taken_for_this_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    """Where all lines failed the answers of the run before stayed under the name that was asked for."""
    answers, errors = here / "in.out.jsonl", here / "in.out.errors.jsonl"
    failed = a_batch("completed", 0, 2, error_file_id="file-err")
    for done, status, left in ((DONE, 0, [answers]), (failed, 3, [errors]), (DONE, 0, [answers])):
        assert play(monkeypatch, capsys, Gateway(done), "run", "in.jsonl")[0] == status
        assert [each for each in (answers, errors) if each.exists()] == left


def test_answers_are_written_through_a_link_which_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    """`-o /dev/stdout > FILE` as root put a file in the place of the machine's /dev/stdout."""
    link, file = here / "stdout", here / "redirected"
    file.touch()
    link.symlink_to(file)
    assert play(monkeypatch, capsys, Gateway(DONE), "fetch", "batch_1", "-o", "stdout")[0] == 0
    assert link.is_symlink() and file.read_bytes() == OUTPUT


def test_a_file_that_is_no_batch_fails_with_its_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = {"line": 7, "message": "This line is not valid JSON.", "code": "invalid_json_line"}
    failed = a_batch("failed", errors={"object": "list", "data": [fault]})
    status, out, err = play(monkeypatch, capsys, Gateway(failed), "run", "in.jsonl")
    assert (status, out) == (1, "")
    assert "line 7: This line is not valid JSON." in err


def test_a_gateway_that_restarts_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = Gateway(a_batch("in_progress"), httpx.ConnectError, 503, httpx.ReadError, DONE)
    assert play(monkeypatch, capsys, gateway, "run", "in.jsonl")[0] == 0
    monkeypatch.setattr(commands, "UNAVAILABLE_TIMEOUT_S", -1.0)
    status, _, err = play(monkeypatch, capsys, Gateway(httpx.ConnectError), "run", "in.jsonl")
    assert status == 1 and "mico batch fetch batch_1 --wait" in err


def test_a_gateway_that_is_away_is_told_once_and_waited_for_also_at_the_download(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    class AwayAtTheDownload(Gateway):
        away = 2

        def __call__(self, request: httpx.Request) -> httpx.Response:
            if request.url.path.endswith("/content") and self.away:
                self.away -= 1
                raise httpx.ConnectError("gone")
            return super().__call__(request)

    gateway = AwayAtTheDownload(
        a_batch("in_progress"), 503, httpx.ConnectError, a_batch("completed", 2, output_file_id="out")
    )
    status, _, err = play(monkeypatch, capsys, gateway, "run", "in.jsonl", "-o", "out.jsonl")
    assert status == 0
    assert (here / "out.jsonl").read_bytes() == OUTPUT
    waits = [line for line in err.splitlines() if "asked again" in line]
    assert len(waits) == 2  # one of the batch, one of its file
    assert "the gateway refused with status 503" in waits[0]


def test_a_download_to_a_pipe_that_breaks_off_is_not_begun_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    class Broken(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield OUTPUT[:5]
            raise httpx.ReadError("gone")

    class BreaksOff(Gateway):
        def __call__(self, request: httpx.Request) -> httpx.Response:
            if request.url.path.endswith("/content"):
                return httpx.Response(200, stream=Broken())
            return super().__call__(request)

    os.mkfifo(here / "pipe")
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit((here / "pipe").read_bytes)
        gateway = BreaksOff(a_batch("completed", 2, output_file_id="out"))
        arguments = ("fetch", "batch_1", "-o", str(here / "pipe"), "--wait")
        status, _, err = play(monkeypatch, capsys, gateway, *arguments)
        assert read.result(60) == OUTPUT[:5]
    assert status == 1
    assert "the download broke off" in err


def test_fetch_waits_for_a_gateway_that_is_away_from_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    gateway = Gateway(httpx.ConnectError, a_batch("completed", 2, output_file_id="out"))
    status, _, err = play(monkeypatch, capsys, gateway, "fetch", "batch_1", "-o", "out.jsonl", "--wait")
    assert status == 0 and "asked again" in err
    assert (here / "out.jsonl").read_bytes() == OUTPUT


def test_ctrl_c_leaves_the_batch_and_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = Gateway(a_batch("in_progress", 1), KeyboardInterrupt)
    status, out, err = play(monkeypatch, capsys, gateway, "run", "in.jsonl", "-o", "o.jsonl")
    assert (status, out) == (130, "")
    assert "mico batch fetch batch_1 --wait -o o.jsonl" in err


def test_the_small_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gateway = Gateway(a_batch("in_progress", 1))

    def run(*arguments: str) -> tuple[int, str, str]:
        return play(monkeypatch, capsys, gateway, *arguments)

    assert run("submit", "in.jsonl")[:2] == (0, "batch_1\n")
    assert json.loads(run("list", "--json")[1])[0]["id"] == "batch_1"
    assert "1/2" in run("list")[1]
    assert json.loads(run("show", "batch_1", "--json")[1])["status"] == "in_progress"
    assert "in_progress" in run("show", "batch_1")[1]
    assert json.loads(run("cancel", "batch_1", "--json")[1])["status"] == "cancelling"
    status, out, err = run("fetch", "batch_1")
    assert (status, out) == (1, "") and "--wait" in err
    assert run("run", "nowhere.jsonl")[0] == 2
    gateway.states = [DONE]
    assert run("fetch", "batch_1")[:2] == (0, "batch_1.out.jsonl\n")


@pytest.mark.parametrize("output", ["in.jsonl", "folder", "in2.jsonl"])
def test_answers_are_not_written_over_what_was_asked(
    output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    """Nor into a folder, which was found out when the batch was over."""
    (here / "folder").mkdir()
    (here / "in2.jsonl").symlink_to("in.jsonl")
    before, gateway = (here / "in.jsonl").read_bytes(), Gateway(DONE)
    status, out, err = play(monkeypatch, capsys, gateway, "run", "in.jsonl", "-o", output)
    assert (status, out) == (2, "")
    assert "nothing can be written to" in err
    assert not gateway.uploaded
    assert (here / "in.jsonl").read_bytes() == before


def test_a_batch_that_failed_without_a_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = play(monkeypatch, capsys, Gateway(a_batch("failed", errors=None)), "run", "in.jsonl")
    assert status == 1 and "the file is no batch" in err


def test_a_name_that_is_not_there_makes_no_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    assert play(monkeypatch, capsys, Gateway(DONE), "run", "typo/in.jsonl")[0] == 2
    assert not (here / "typo").exists()


@pytest.mark.parametrize("command", ["show", "cancel", "fetch"])
def test_no_batch_is_not_all_of_them(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`mico batch show "$ID"`, with ID unset, showed the first words of a list."""
    status, out, err = play(monkeypatch, capsys, Gateway(DONE), command, "")
    assert (status, out) == (2, "") and "no batch is named" in err


def test_a_plan_tells_what_the_lines_have_in_common_and_submits_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["to be, or not to be " * 50 + end for end in ("who?", "when?")] + ["something else"]
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": [{"role": "user", "content": text}]},
        }
        for number, text in enumerate(texts)
    ]
    (here / "in.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    gateway = Gateway(DONE)
    status, out, _ = play(monkeypatch, capsys, gateway, "plan", "in.jsonl", "--json")
    found = json.loads(out)
    assert (status, gateway.uploaded, gateway.submitted) == (0, b"", {})
    assert (found["lines"], found["groups"], found["grouped_lines"]) == (3, 1, 2)
    assert 0.3 < found["shared_share"] < 0.5
    assert "2 lines in 1 group" in play(monkeypatch, capsys, gateway, "plan", "in.jsonl")[1]
    (here / "in.jsonl").write_text("{}\n")
    status, _, err = play(monkeypatch, capsys, gateway, "plan", "in.jsonl")
    assert status == 1 and "line 1" in err


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_plan_of_a_file_without_lines_fails_as_its_batch_would(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (here / "in.jsonl").write_text(content)
    status, out, err = play(monkeypatch, capsys, Gateway(DONE), "plan", "in.jsonl", "--json")
    assert (status, out) == (1, "") and "no lines" in err


def test_a_batch_is_shown_with_what_it_shares_and_when_it_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mico = {
        "order": "blend",
        "groups": 3,
        "shared_prompt_share": 0.714,
        "in_flight": 9,
        "ends_at": 1_750_003_600,
    }
    out = play(monkeypatch, capsys, Gateway(a_batch("in_progress", 1, mico=mico)), "show", "batch_1")[1]
    for words in ("blend", "71%", "in_flight", "2025-06-15T16:06:40"):
        assert words in out


def test_a_batch_that_has_ended_is_shown_with_what_it_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = {"input_tokens": 14, "input_tokens_details": {"cached_tokens": 5}, "total_tokens": 20}
    out = play(monkeypatch, capsys, Gateway(a_batch("completed", 2, usage=usage)), "show", "batch_1")[1]
    assert "input_tokens 14, input_tokens_details cached_tokens 5, total_tokens 20" in out


def test_the_order_is_sent_where_one_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = Gateway(DONE)
    play(monkeypatch, capsys, gateway, "submit", "in.jsonl")
    assert "metadata" not in gateway.submitted
    play(monkeypatch, capsys, gateway, "submit", "in.jsonl", "--order", "prefix")
    assert gateway.submitted["metadata"] == {"mico_order": "prefix"}
