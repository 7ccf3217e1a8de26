"""Commands as a script sees them: exit status, stdout as data, stderr as words."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import typer.main

from mico.cli import DEBUG_TIP, app, main
from mico.commands.doctor import Verdict, check_clocks
from mico.commands.keys import audit_act, format_time

ROOT = Path(__file__).resolve().parents[2]
DATA_IS_NO_JSON = {
    "mico down",
    "mico chat",
    "mico gateway",
    "mico site",
    "mico pki init",
    "mico pki invite",
    "mico pki revoke",
    "mico pki renew",
    "mico drill kill-site",
    "mico drill stale",
    "mico drill overload",
    "mico db upgrade",
    "mico bench",
}
"""They act or talk; none of them reads."""


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, and nothing of the environment that could name another gateway or database."""
    for name in (
        "MICO_BASE_URL",
        "MICO_API_KEY",
        "MICO_DATABASE_URL",
        "MICO_FOLDER",
        "OPENAI_BASE_URL",
        "MICO_DEBUG",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


def every_command(command: Any = None, name: str = "mico") -> Iterator[tuple[str, set[str]]]:
    """The full name of each command, with its options."""
    command = command or typer.main.get_command(app)
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, {option for parameter in command.params for option in parameter.opts}
        return
    for word, each in inner.items():
        yield from every_command(each, f"{name} {word}")


@pytest.mark.parametrize("command", [name for name, _ in every_command()])
def test_every_command_explains_itself_word_for_word(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets in a help text are text: taken for markup, defaults were lost and one page of help failed."""
    status, out, _ = run(capsys, *command.split()[1:], "--help")
    assert status == 0
    found = typer.main.get_command(app)
    for word in command.split()[1:]:
        found = found.commands[word]  # type: ignore[attr-defined]
    shown = re.sub(r"\s+", "", out)
    for parameter in found.params:
        assert re.sub(r"\s+", "", getattr(parameter, "help", None) or "") in shown


def test_a_key_is_made_listed_and_revoked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "db", "upgrade")[0] == 0
    status, out, _ = run(capsys, "keys", "create", "ann", "--tenant", "lab", "--model", "m", "--json")
    made = json.loads(out)
    assert (status, made["tenant"], made["models"], made["state"]) == (0, "lab", ["m"], "ready")
    _, out, _ = run(capsys, "keys", "list", "--json")
    assert [key["id"] for key in json.loads(out)] == [made["id"]]
    assert made["key"] not in out
    assert run(capsys, "keys", "revoke", made["id"])[0] == 0
    _, out, _ = run(capsys, "keys", "list", "--json")
    assert json.loads(out)[0]["state"] == "revoked"


def test_a_table_of_keys_tells_their_regions_and_their_end(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "db", "upgrade")
    bound = ("--region", "eu", "--region", "asia", "--days", "3")
    made = json.loads(run(capsys, "keys", "create", "ann", *bound, "--json")[1])
    run(capsys, "keys", "create", "bob")
    heading, *rows = run(capsys, "keys", "list")[1].splitlines()
    ann, bob = sorted(rows, key=lambda row: "bob" in row)
    assert re.search(r"models +regions +admin +created_at +expires_at", heading)
    assert re.search(rf"ready +all +asia, eu +False +\S+ +{re.escape(made['expires_at'])} *$", ann)
    assert re.search(r"ready +all +all +False +\S+ +never *$", bob)


def test_a_gateway_that_cant_start_says_why_without_a_traceback(empty_folder: Path) -> None:
    def start(**settings: object) -> tuple[int, str]:
        given = {"http_port": 0, "grpc_port": 0, "folder": "gw", "database_url": "sqlite:///g.db", **settings}
        options = [f"--set={name}={value}" for name, value in given.items()]
        command = [sys.executable, "-m", "mico", "gateway", "--set=site_tokens=" + "t" * 32, *options]
        path = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=path, capture_output=True, text=True, timeout=60, check=False)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr[done.stderr.index("error: ") :].strip()

    refused = "error: the gateway can't start\ncause: "
    status, err = start()
    assert status == 1 and err.startswith(f"{refused}the database has no tables yet")
    assert main(["db", "upgrade", "--database", f"sqlite:///{empty_folder}/g.db"]) == 0
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        taken_one = f"at 127.0.0.1:{port}: taken, or not of this machine"
        with ThreadPoolExecutor() as pool:
            ends = pool.map(lambda name: start(**{name: port, "folder": name}), ["grpc_port", "http_port"])
        assert list(ends) == [
            (2, f"{refused}sites can't join {taken_one}"),
            (2, f"{refused}clients can't ask {taken_one}"),
        ]


def test_benchmarks_are_listed_and_given_their_own_options(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    assert re.search(r"^paper +Repeat MICO's evaluation", capfd.readouterr().out, re.M)
    assert main(["bench", "decide", "--help"]) == 0
    assert "usage: decide.py" in capfd.readouterr().out
    assert main(["bench", "decide", "--nonsense"]) == 2


def test_the_audit_and_the_usage_are_tables_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "db", "upgrade")
    run(capsys, "keys", "create", "ann", "--tenant", "lab", "--reason", "launch")
    status, out, _ = run(capsys, "audit")
    assert status == 0
    assert re.search(r"at the command line +create key key_\w+ +none +tenant lab.* launch", out)
    status, out, _ = run(capsys, "usage", "--by", "cloud")
    assert (status, out.split()) == (0, ["cloud", "queries", "prompt", "tokens", "completion", "tokens"])


def test_the_secret_alone_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "db", "upgrade")
    _, out, err = run(capsys, "keys", "create", "ann")
    assert out.startswith("mico-")
    assert len(out.split()) == 1
    assert "can't be shown again" in err


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        (("keys", "list"), 1, "mico db upgrade"),
        (("status",), 1, "mico up"),
        (("down",), 0, "nothing runs here"),
        (("gateway", "--set", "http_prot=1"), 2, "did you mean http_port?"),
        (("gateway", "--set", "http_port"), 2, "has no value"),
        (("site", "--set", "slots=1"), 2, "not set"),
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


def test_what_reads_speaks_json_and_the_rest_is_known() -> None:
    assert {name for name, options in every_command() if "--json" not in options} == DATA_IS_NO_JSON


def test_an_unknown_option_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "status", "--nope")[0] == 2


def test_settings_are_shown_with_their_origin_and_without_secrets(
    capsys: pytest.CaptureFixture[str], empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty_folder / "mico.toml").write_text("[up]\nport = 9000\n")
    monkeypatch.setenv("MICO_API_KEY", "mico-very-secret-indeed")
    shown = json.loads(run(capsys, "config", "show", "--json")[1])
    assert shown["port"] == {"value": "9000", "origin": "mico.toml"}
    assert shown["api_key"] == {"value": "…deed", "origin": "MICO_API_KEY"}


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    assert run(capsys, "--version")[:2] == (0, f"mico {version('mico')}\n")


def test_doctor_names_the_repair(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "doctor", "--json", "--base-url", "http://127.0.0.1:9/v1")
    findings = {finding["subject"]: finding for finding in json.loads(out)}
    assert status == 1
    assert findings["python"]["verdict"] == "ok"
    assert (findings["database"]["verdict"], findings["database"]["repair"]) == ("warn", "mico up")
    assert findings["gateway"]["verdict"] == "fail"
    known = {name for name, _ in every_command()}
    for finding in findings.values():
        assert finding["verdict"] == "ok" or finding["repair"], finding
        for command in re.findall(r"\bmico(?: [a-z-]+)+", finding["repair"]):
            assert any(command.startswith(name) for name in known), command
    assert "API key" not in findings


@pytest.mark.parametrize(
    ("url", "detail", "repair"),
    [
        ("sqlite:///new.db", "there is no database new.db", "mico db upgrade"),
        ("sqlite:///empty.db", "has no tables yet", "mico db upgrade"),
        ("sqlite:///noise.db", "not a database", "start it, or correct its address: mico config show"),
        ("postgresql://x@127.0.0.1:9/x", "127.0.0.1", "start it, or correct its address: mico config show"),
        ("oracle://x", "not supported", "start it, or correct its address: mico config show"),
    ],
)
def test_doctor_tells_a_database_that_is_away_from_one_that_is_not_prepared(
    url: str, detail: str, repair: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("empty.db").touch()
    Path("noise.db").write_text("no database at all " * 200)
    monkeypatch.setenv("MICO_DATABASE_URL", url)
    _, out, _ = run(capsys, "doctor", "--json", "--base-url", "http://127.0.0.1:9/v1")
    (found,) = (each for each in json.loads(out) if each["subject"] == "database")
    assert (found["verdict"], found["repair"]) == ("fail", repair)
    assert detail in found["detail"]


def test_doctor_names_each_site_whose_clock_is_off() -> None:
    assert list(check_clocks({"old": None})) == []
    (well,) = check_clocks({"a": 0.004, "b": -0.9, "old": None})
    assert (well.verdict, well.detail) == (Verdict.OK, "2 sites within 900 ms of the gateway")
    (off,) = check_clocks({"a": 0.0, "b": 61.0, "c": -1.5})
    assert (off.verdict, off.detail) == (Verdict.WARN, "b is 61.0 s ahead, c is 1.5 s behind")
    assert off.repair


def test_a_key_whose_end_no_calendar_has_does_not_hide_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    """The admin API and older versions could set such an end: every list of keys failed from then on."""
    assert format_time(1e18) == format_time(float("inf")) == "9999-12-31T23:59:59+00:00"


def test_who_has_no_name_on_this_machine_is_told_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number of its own: no key could be made there."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert audit_act("").who == f"user {os.getuid()} at the command line"


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
        "error: the gateway at" in run(capsys, "models")[2]
    )  # at this machine's own address none of it counts


@pytest.mark.parametrize(
    ("variable", "value"),
    [("MICO_PORT", "99999"), ("MICO_PORT", "-1"), ("MICO_SITES", "0"), ("MICO_SITES", "x")],
)
def test_a_number_that_cant_be_is_told_with_its_origin(
    variable: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_explain_knows_nothing_of_an_unknown_id(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "db", "upgrade")
    status, out, err = run(capsys, "explain", "no-such-id")
    assert (status, out) == (1, "")
    assert "nothing is known of no-such-id" in err


def test_a_forecast_is_a_distribution_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "predictor", "forecast", "Write an essay about rivers", "--json")
    told = json.loads(out)
    assert status == 0
    assert sum(told["probabilities"]) == pytest.approx(1.0)
    assert 0 < told["p50_tokens"] <= told["p90_tokens"]
    assert told["source"]


def test_what_is_exported_forecasts_the_same_and_is_never_written_over(
    capsys: pytest.CaptureFixture[str], empty_folder: Path
) -> None:
    status, out, _ = run(capsys, "predictor", "export", "mine", "--artifact", "lexical", "--json")
    told = json.loads(out)
    assert (status, told["kind"], told["folder"]) == (0, "lexical", "mine")
    assert sha256((empty_folder / "mine" / "model.onnx").read_bytes()).hexdigest() == told["sha256"]
    ask = ("predictor", "forecast", "Name three rivers", "--json", "--artifact")
    assert run(capsys, *ask, "mine") == run(capsys, *ask, "lexical")
    status, out, err = run(capsys, "predictor", "export", "mine")
    assert (status, out) == (1, "") and "mine holds an artifact already" in err
    (empty_folder / "mine" / "model.onnx").write_bytes(b"torn")
    status, out, err = run(capsys, "predictor", "export", "again", "--artifact", "mine")
    assert (status, out) == (1, "") and "is damaged" in err
    assert not (empty_folder / "again").exists()


def test_a_predictor_that_is_not_there_is_a_failure_with_its_reason(
    capsys: pytest.CaptureFixture[str], empty_folder: Path
) -> None:
    status, out, err = run(capsys, "predictor", "forecast", "hi", "--artifact", str(empty_folder))
    assert (status, out) == (1, "")
    assert "card.json is missing" in err
