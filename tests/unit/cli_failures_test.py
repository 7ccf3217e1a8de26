"""Failures of commands: the exit status, and on stderr the cause and what to do, without a traceback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mico.cli import DEBUG_TIP, extra_of, main
from mico.session import Session
from tests.support.command_line import leave_environment, run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    leave_environment(monkeypatch, tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_gateway_that_cant_start_says_why_without_a_traceback(empty_folder: Path) -> None:
    def start(**settings: object) -> tuple[int, str]:
        given = {"http_port": 0, "grpc_port": 0, "folder": "gw", "database_url": "sqlite:///g.db", **settings}
        options = [f"--set={name}={value}" for name, value in given.items()]
        command = [sys.executable, "-m", "mico", "gateway", "--set=site_tokens=" + "t" * 32, *options]
        path = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=path, capture_output=True, text=True, timeout=60, check=False)
        assert "Traceback" not in done.stderr
        told = done.stderr[done.stderr.index("error: ") :].splitlines()
        return done.returncode, "\n".join(told[:2])  # the log of what has started may follow

    refused = "error: the gateway can't start\ncause: "
    status, err = start()
    assert status == 1 and err.startswith(f"{refused}the database has no tables yet")
    assert err.endswith("run `mico db upgrade` for sqlite+aiosqlite:///g.db"), "not of the default one"
    assert main(["db", "upgrade", "--database", f"sqlite:///{empty_folder}/g.db"]) == 0
    (empty_folder / "file").touch()
    status, err = start(outcomes="file")
    assert status == 2 and err.startswith(f"{refused}outcomes can't be kept: ") and "'file'" in err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        taken_one = f"at 127.0.0.1:{port}: taken, or not of this machine"
        with ThreadPoolExecutor() as pool:
            names = ["grpc_port", "http_port", "metrics_port"]
            ends = pool.map(lambda name: start(**{name: port, "folder": name}), names)
        assert list(ends) == [
            (2, f"{refused}sites can't join {taken_one}"),
            (2, f"{refused}clients can't ask {taken_one}"),
            (2, f"{refused}operators can't ask {taken_one}"),
        ]


def test_an_interrupt_while_the_commands_are_imported_ends_without_a_traceback() -> None:
    interrupted = """
import runpy, sys
class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
runpy.run_module("mico", run_name="__main__")
"""
    command = [sys.executable, "-c", interrupted]
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        (("keys", "list"), 1, "mico db upgrade"),
        (("status",), 1, "mico up"),
        (("down",), 0, "nothing runs here"),
        (("gateway", "--set", "http_prot=1"), 2, "did you mean http_port?"),
        (("gateway", "--set", "http_port"), 2, "has no value"),
        (("site", "--set", "path=x"), 2, "sets path, which is unknown"),
        (("site", "--set", "slots=1"), 2, "--set name=value or the variable sets it"),
        (("sites", "list", "--base-url", "http://127.0.0.1:9/v1"), 1, "does not answer"),
        (("keys", "create", "ann", "--database", "oracle://x"), 1, "not supported"),
        (("keys", "list", "--database", "postgresql://x@127.0.0.1:9/x"), 1, "tip: see that it runs"),
        (("up", "--port", "70000"), 2, "no port"),
        (("bench", "nonsense"), 2, "mico bench lists them"),
        (("tenants", "list"), 1, "mico db upgrade"),
        (("quotas", "list"), 1, "mico db upgrade"),
        (("usage",), 1, "mico db upgrade"),
        (("usage", "--by", "colour"), 2, "choose of tenant, model, site, cloud"),
        (("audit",), 1, "mico db upgrade"),
        (("quotas", "set", "--tokens-per-min", "5"), 2, "mico quotas set --tenant"),
        (("quotas", "set", "--tenant", "a"), 2, "mico quotas set --tenant"),
        (("quotas", "set", "--tenant", "a", "--tokens-per-min", "many"), 2, "is a number, or none"),
        (("quotas", "set", "--tenant", "a", "--tokens-per-min", "9" * 20), 2, "at most 9007199254740992"),
        (("keys", "create", ""), 2, "1 to 200 printable"),
        (("keys", "create", "ann", "--tenant", "a\nb"), 2, "1 to 200 printable"),
        (("tenants", "set", "x" * 201), 2, "1 to 200 printable"),
        (("tenants", "set", "a", "--best-priority", "2147483648"), 2, "2147483647"),
        (
            ("up", "--port", "0", "--database", "postgresql://x@127.0.0.1:9/x"),
            1,
            "the database did not answer",
        ),
        (("keys", "create", "ann", "--model", ""), 2, "1 to 200 printable"),
        (("keys", "create", "ann", "--region", "a\nb"), 2, "1 to 200 printable"),
        (("pki", "invite", ""), 2, "1 to 200 printable"),
        (("pki", "revoke", ""), 2, "1 to 200 printable"),
        (("usage", "--days", "inf"), 2, "36500"),
        (("usage", "--days", "nan"), 2, "Invalid value"),
        (("batch", "show", "x" * 100_000), 1, "that can't be sent"),
        (("batch", "run", "-i", __file__, "-o", ""), 2, "nothing can be written to ."),
        (("pki", "list"), 1, "mico db upgrade"),
        (("pki", "invite", "a"), 1, "mico pki init"),
        (("keys", "rotate", "k", "--overlap", "soon"), 2, "such as 90s"),
        (("keys", "rotate", "k", "--overlap", "99999999d"), 2, "at most 36500d"),
        (("keys", "rotate", "k", "--overlap", "9" * 400), 2, "such as 90s"),
        (("keys", "create", "ann", "--days", "1e9"), 2, "36500"),
        (("keys", "list", "--database", "postgresql://u:p@w:x@h/x"), 1, "is written %40"),
        (("db", "upgrade", "--database", "postgresql://u:p@w:x@h/x"), 1, "is written %40"),
        (("quotas", "set", "--tenant", "a", "--tokens-per-min", "9" * 5000), 2, "at most 9007199254740992"),
        (("sites", "drain", "a", "--reason", "x", "--for", "0s"), 2, "until it is undone"),
        (("models", "--base-url", "http://[::1"), 2, "is no address of a gateway"),
        (("models", "--base-url", "127.0.0.1:8080"), 2, "is no address of a gateway"),
        (("models", "--api-key", "ключ"), 2, "plain letters"),
        (("chat", "-q", "\udcff", "--base-url", "http://127.0.0.1:9/v1", "-m", "m"), 1, "does not answer"),
        (("--folder", "/dev/null", "up"), 2, "nothing can be written to /dev/null"),
        (("batch", "run", "nowhere/none.jsonl"), 2, "there is no file nowhere/none.jsonl"),
        (("batch", "run", "none.jsonl"), 2, "there is no file none.jsonl"),
        (("batch", "list", "--base-url", "http://127.0.0.1:9/v1"), 1, "does not answer"),
        (("top", "-n", "1", "--base-url", "http://127.0.0.1:9/v1"), 1, "mico up starts one"),
    ],
)
def test_a_failure_says_what_to_do(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], status: int, word: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (status, "")
    assert word in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["pki list", "pki revoke alpha", "keys list", "audit", "explain x"])
def test_a_database_that_is_not_there_is_not_made_by_looking(
    command: str, capsys: pytest.CaptureFixture[str], empty_folder: Path
) -> None:
    status, out, err = run(capsys, *command.split(), "--database", "sqlite:///typo/wrong.db")
    assert (status, out) == (1, "")
    assert "cause: there is no database typo/wrong.db\ntip: " in err
    status, _, err = run(capsys, *command.split(), "--database", f"sqlite:///{empty_folder}/wrong.db")
    assert status == 1
    assert f"there is no database {empty_folder}/wrong.db" in err
    assert list(empty_folder.iterdir()) == []


def test_what_no_upgrade_mends_is_not_told_to_upgrade(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, empty_folder: Path
) -> None:
    assert main(["db", "upgrade", "--database", f"sqlite:///{empty_folder}/g.db"]) == 0
    capsys.readouterr()
    monkeypatch.setenv("MICO_GATEWAY_KEY_PEPPER", "short")
    for url, cause in (
        (f"sqlite:///{empty_folder}/g.db", "the key pepper needs"),
        ("g.db", "not of the form"),
    ):
        status, out, err = run(capsys, "keys", "create", "ann", "--database", url)
        assert (status, out) == (1, "")
        assert cause in err and "mico db upgrade" not in err


def test_what_is_not_there_is_a_failure_once_there_is_a_database(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "db", "upgrade")[0] == 0
    for arguments in (("keys", "revoke", "nope"), ("keys", "rotate", "nope")):
        status, out, err = run(capsys, *arguments)
        assert (status, out) == (1, "")
        assert "mico keys list" in err
    for arguments in (("explain", "\udcff"), ("keys", "revoke", "\udcff")):
        status, out, err = run(capsys, *arguments)
        assert (status, out) == (2, "") and "is no text" in err
    for noun in ("keys", "tenants", "quotas", "pki"):
        assert run(capsys, noun, "list", "--json")[:2] == (0, "[]\n"), noun


def test_an_unknown_option_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "status", "--nope")[0] == 2


@pytest.mark.parametrize("note", ["{", "{}", "[]", '{"processes": [{"pid": 1}]}', "\x00"])
def test_a_damaged_note_of_what_runs_is_told(
    note: str, capsys: pytest.CaptureFixture[str], empty_folder: Path
) -> None:
    (empty_folder / ".mico").mkdir()
    (empty_folder / ".mico" / "state.json").write_text(note)
    status, out, err = run(capsys, "status")
    assert (status, out) == (1, "")
    assert "state.json is damaged, or another version wrote it" in err
    assert "tip: " in err


@pytest.mark.parametrize(
    ("variable", "value", "word"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:9", "ALL_PROXY"),
        ("HTTP_PROXY", "odd://127.0.0.1:9", "HTTP_PROXY"),
        ("SSL_CERT_FILE", "/dev/null/none", "SSL_CERT_FILE"),
    ],
)
def test_an_environment_in_which_nothing_can_be_asked_is_told(
    variable: str, value: str, word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    status, out, err = run(capsys, "models", "--base-url", "http://gateway.invalid/v1")
    assert (status, out) == (1, "")
    assert word in err
    assert (
        "error: the gateway at" in run(capsys, "models", "--base-url", "http://127.0.0.1:9/v1")[2]
    )  # at this machine's own address none of it counts


@pytest.mark.parametrize(
    ("variable", "value"),
    [("MICO_PORT", "99999"), ("MICO_PORT", "-1"), ("MICO_SITES", "0"), ("MICO_SITES", "x")],
)
def test_a_number_that_cant_be_is_told_with_its_origin(
    variable: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MICO_PORT", "0")  # the default one may be taken
    monkeypatch.setenv(variable, value)
    for command in ("up", "config show"):
        status, out, err = run(capsys, *command.split())
        assert (status, out) == (2, "")
        assert err.startswith(f"error: {variable} must be ")


def test_a_refusal_of_the_machine_is_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr(Path, "mkdir", full)
    monkeypatch.setattr("mico.local.folder.create_folder", full)
    status, _, err = run(capsys, "up")
    assert (status, err) == (
        1,
        f"error: the machine refused\ncause: somewhere: No space left on device\ntip: {DEBUG_TIP}\n",
    )


@pytest.mark.parametrize("variable", ["", "MICO_DEBUG"])
def test_a_fault_of_the_program_is_a_traceback_only_with_debug(
    variable: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object, **__: object) -> None:
        raise TypeError("a list was expected")

    monkeypatch.setattr(Session, "open", wrong)
    if variable:
        monkeypatch.setenv(variable, "1")
        with pytest.raises(TypeError, match="a list was expected"):
            main(["status"])
        return
    status, out, err = run(capsys, "status")
    assert (status, out) == (1, "")
    cause = "cause: TypeError('a list was expected')"
    assert err.splitlines() == ["error: mico met a fault of its own", cause, f"tip: {DEBUG_TIP}"]


@pytest.mark.slow
@pytest.mark.parametrize(("closed", "status"), [("<&-", 0), (">&-", 1), ("2>&-", 0)])
def test_a_closed_stream_is_no_traceback_and_data_is_not_lost_in_silence(closed: str, status: int) -> None:
    command = f'"{sys.executable}" -m mico config show --json {closed}'
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, shell=True, env=path, capture_output=True, text=True, check=False)
    assert done.returncode == status
    expected = f"error: the machine refused\ncause: not writable\ntip: {DEBUG_TIP}\n" if status else ""
    assert done.stderr == expected


def test_what_a_terminal_cant_show_is_a_question_mark(empty_folder: Path) -> None:
    """In a locale without UTF-8 the table of sites, and answers in another script, were a traceback."""
    code = "from mico import cli; cli.replace_undecodable_text(); print('a█\\ud800', input())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        input=b"\xffb\n",
        capture_output=True,
        check=False,
    )
    assert done.stdout == b"a?? ?b\n", done.stderr


def test_a_predictor_that_is_not_there_is_a_failure_with_its_reason(
    capsys: pytest.CaptureFixture[str], empty_folder: Path
) -> None:
    status, out, err = run(capsys, "predictor", "forecast", "hi", "--artifact", str(empty_folder))
    assert (status, out) == (1, "")
    assert "card.json is missing" in err


def test_a_command_whose_packages_are_not_installed_says_how_to_get_them(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.delitem(sys.modules, "predictor.evaluation.evaluate", raising=False)
    (empty_folder / "corpus.parquet").touch()
    assert main(["predictor", "evaluate", "--data", "corpus.parquet"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["error", "cause", "tip"]
    assert "pandas" in lines[1]
    assert "./dev setup" in lines[2] and lines[2].endswith("with the extra train")
    assert (extra_of("torch"), extra_of("boto3"), extra_of("nonsense")) == ("engine", "aws", "")
