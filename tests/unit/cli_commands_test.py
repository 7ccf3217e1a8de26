"""Commands as a script sees them: exit status, stdout as data, stderr as words."""

from __future__ import annotations

import asyncio
import json
import os
import re
from hashlib import sha256
from pathlib import Path

import pytest

from gateway.store.store import open_store
from mico.cli import command_tree, main
from mico.commands.doctor import Verdict, check_clocks
from mico.commands.keys import audit_act, format_time
from tests.support.command_line import every_command, leave_environment, run

DATA_IS_NO_JSON = {
    "mico down",
    "mico chat",
    "mico gateway",
    "mico pki init",
    "mico pki invite",
    "mico pki revoke",
    "mico pki renew",
    "mico drill kill-site",
    "mico drill stale",
    "mico drill overload",
    "mico db upgrade",
    "mico bench",
    "mico models fetch",
}
"""They act or talk; none of them reads."""


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    leave_environment(monkeypatch, tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", [name for name, _ in every_command()])
def test_every_command_explains_itself_word_for_word(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets in a help text are text: taken for markup, defaults were lost and one page of help failed."""
    status, out, _ = run(capsys, *command.split()[1:], "--help")
    assert status == 0
    found = command_tree()
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


def test_a_key_is_hashed_with_the_pepper_of_the_environment_as_at_the_gateway(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pepper = "5a" * 32
    monkeypatch.setenv("MICO_GATEWAY_KEY_PEPPER", pepper)
    run(capsys, "db", "upgrade")
    secret = run(capsys, "keys", "create", "first", "--admin")[1].strip()

    async def is_known() -> bool:
        database = f"sqlite:///{empty_folder}/.mico/mico.db"
        async with open_store(database, empty_folder / "gateway", pepper=pepper) as store:
            return store.keys.authenticate(secret) is not None

    assert asyncio.run(is_known())
    assert not (empty_folder / ".mico" / "key-pepper").exists()


def test_a_folder_that_is_not_there_has_no_other_folders_keys(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "db", "upgrade")
    run(capsys, "keys", "create", "ann")
    status, out, err = run(capsys, "--folder", "elsewhere", "keys", "list")
    assert (status, out) == (1, "")
    assert "elsewhere/mico.db" in err
    assert not Path("elsewhere").exists()


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


def test_what_reads_speaks_json_and_the_rest_is_known() -> None:
    assert {name for name, options in every_command() if "--json" not in options} == DATA_IS_NO_JSON


def test_settings_are_shown_with_their_origin_and_without_secrets(
    capsys: pytest.CaptureFixture[str], empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty_folder / "mico.toml").write_text("[up]\nport = 9000\n")
    monkeypatch.setenv("MICO_API_KEY", "mico-very-secret-indeed")
    shown = json.loads(run(capsys, "config", "show", "--json")[1])
    assert shown["port"] == {"value": "9000", "origin": "mico.toml"}
    assert shown["api_key"] == {"value": "…deed", "origin": "MICO_API_KEY"}


def test_a_plan_of_a_site_needs_a_model_alone(capsys: pytest.CaptureFixture[str]) -> None:
    weights = Path(__file__).parents[2] / "mico/demo_model/weights"
    status, out, err = run(capsys, "site", "plan", "--set", f"model={weights}", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["kv_tokens"] > 0
    status, _, err = run(capsys, "site", "plan")
    assert status == 2
    assert "not set: model" in err and "gateways" not in err


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
