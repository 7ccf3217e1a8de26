"""The names and types of `--json` of every read command are a promise, checked against a real federation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mico.cli import command_tree, main
from tests.support.local_federation import LocalFederation, eventually

pytestmark = pytest.mark.e2e

Run = Callable[..., tuple[int, str, str]]

SITE = (
    "assigned cached_usd_per_mtok capacity_tokens clock_ahead_s cloud devices engine input_usd_per_mtok "
    "kv_capacity_tokens kv_free_tokens kv_reserved_tokens load_age_s models name orders "
    "output_usd_per_mtok pending pinned_off prompt_tokens_total region rtt_s running slots state "
    "token_load tokens_per_s tokens_total usd_per_hour version weight"
)
PROCESS = "log name pid role state"
SHOWN_SITE = (
    "asleep cached_share capacity_tokens certificate_until cloud devices errors_per_min input_per_s "
    "input_usd_per_mtok itl_p95_s kv_used load model_count models name output_per_s output_usd_per_mtok "
    "outstanding_tokens own_bytes pending pinned_off pool region report_age_s running share slots state "
    "tokens_per_s training ttft_p95_s weight"
)
ROUTE = "changed_at figures name reason shadow source targets who"
TARGET = "model served slower_than_s weight when"
KEY = "admin created_at expires_at hint id models name regions revoked_at state tenant"
PROMISED: dict[tuple[str, ...], dict[str, str]] = {
    ("status",): {"": "base_url model processes", "processes[]": PROCESS},
    ("models",): {"[]": "created features id max_model_len object owned_by parent root state"},
    ("site", "plan", "--config", "PLAN"): {
        "": "devices gpus kv_bytes_per_token kv_tokens own_bytes ranks refused shared_bytes site slots_bytes "
        "variants",
        "gpus": "bytes devices name",
    },
    ("models", "list"): {"[]": "about bytes folder name state"},
    ("models", "show", "SITE"): {
        "[]": "context_tokens created id in_host own_bytes parent revision shared_bytes shared_with "
        "sharing_models state wake_s"
    },
    ("sites", "list"): {"[]": SITE},
    ("sites", "show", "SITE"): {"": SITE},
    ("sites", "events", "SITE"): {"[]": "at bad id kind replica site text who"},
    ("top", "-n", "1"): {
        "": "at banner clouds events model_routes pools quality replica replicas routes seq sites totals",
        "banner": "level text",
        "totals": "ended_per_min errors_per_min headroom in_flight input_per_s output_per_s queued "
        "ttft_p95_s ttft_site",
        "sites[]": SHOWN_SITE,
        "events[]": "at bad kind site text who",
        "routes[]": "attempts reason site",
    },
    ("explain", "REQUEST"): {
        "[]": "attempts usage",
        "[].usage": "asked_model attempts cheapest_nano_usd cloud completion_tokens dearest_nano_usd error "
        "first_token_s forecast_expected forecast_p50 forecast_p90 forecast_source key_id model nano_usd "
        "prompt_tokens query_id queue_s received_at request_id site status tenant total_s",
        "[].attempts[]": "cached_tokens completion_tokens decision ended first_token_s model nano_usd prices "
        "prompt_tokens resumed_tokens",
        "[].attempts[].decision.estimates[]": "cached_tokens cost finish_s first_token_s kv_tokens "
        "load_age_s price_usd site wait_s",
    },
    ("routes", "list"): {"[]": ROUTE, "[].targets[]": TARGET},
    ("routes", "show", "ROUTE"): {"": ROUTE, "targets[]": TARGET},
    ("doctor",): {"[]": "detail repair subject verdict"},
    ("keys", "list"): {"[]": KEY},
    ("tenants", "list"): {"[]": "best_priority created_at name"},
    ("quotas", "list"): {"[]": "amount in_use kind scope subject"},
    ("usage",): {"[]": "completion_tokens name prompt_tokens queries"},
    ("audit",): {"[]": "action after at before id reason site until_at who"},
    ("config", "show"): {"port": "origin value", "base_url": "origin value"},
    ("batch", "list"): {"[]": ""},
    ("tune", "list"): {"[]": ""},
    ("adapters", "list"): {"[]": ""},
    ("pki", "list"): {"[]": ""},
    ("predictor", "forecast", "Hi"): {"": "edges expected_tokens p50_tokens p90_tokens probabilities source"},
    ("predictor", "evaluate", "--data", "CORPUS"): {
        "": "artifact data digest groups held_out_only ms_per_query ms_per_query_lexical rows",
        "groups[]": "accuracy_1024 accuracy_2048 accuracy_512 ceiling kendall known_model lexical log_loss "
        "mae mae_p50 majority_1024 majority_2048 majority_512 model p50_coverage p90_coverage p99_coverage "
        "peers rows source spearman within_one_1024 within_one_2048 within_one_512",
    },
    ("simulate", "--corpus", "CORPUS", "--queries", "10"): {
        "runs[]": "affinity completed estimator hit_rate jain load machine_usd makespan_s "
        "max_ttft_over_median max_ttft_over_median_latency mean_normalized_latency mean_ttft_s offload "
        "offloads order p50_ttft_s p99_normalized_latency p99_ttft_s policy preemptions "
        "queries sites trace usd usd_per_mtok",
    },
}
SHOWN_BELOW = {"batch show", "tune show", "tune events"}
ACTS = {
    "up",
    *(f"batch {verb}" for verb in ("run", "submit", "plan", "cancel", "fetch")),
    *(f"tune {verb}" for verb in ("create", "cancel", "pause", "resume")),
    "adapters remove",
    *(f"sites {verb}" for verb in ("drain", "pause", "resume", "weight", "pin-off", "unpin")),
    *(f"keys {verb}" for verb in ("create", "rotate", "revoke")),
    *(f"{noun} set" for noun in ("tenants", "quotas", "routes")),
    *(f"routes {verb}" for verb in ("off", "remove")),
    *(f"models {verb}" for verb in ("add", "remove", "sleep", "wake")),
    *(f"predictor {verb}" for verb in ("train", "export", "update")),
}
"""They change something, and say in JSON what."""


@pytest.fixture
def run(
    federation: LocalFederation, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "MICO_DATABASE_URL", "MICO_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MICO_FOLDER", str(federation.folder.path))
    monkeypatch.setenv("MICO_BASE_URL", federation.base_url)
    monkeypatch.setenv("MICO_API_KEY", federation.api_key)

    def command(*arguments: str) -> tuple[int, str, str]:
        status = main(arguments)
        return status, *capsys.readouterr()

    return command


@pytest.fixture(scope="module")
def request_id(federation: LocalFederation) -> str:
    """A query that is answered and recorded."""
    federation.wait_until_ready()
    body = {"model": federation.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    with federation.http() as http:
        answered = http.post("/v1/chat/completions", json=body).raise_for_status()
    found = str(answered.headers["x-request-id"])
    federation.recorded_once([found])
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = [
        {"source": "alpaca", "prompt_id": f"p{i}", "prompt": f"What is {i}?", "model": "text-davinci-003",
         "response_tokens": 1 + i % 40, "prompt_tokens": 5} for i in range(120)
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("corpus") / "corpus.parquet"
    pd.DataFrame(rows).to_parquet(path)
    return str(path)


def readers(command: Any, words: tuple[str, ...] = ()) -> Iterator[str]:
    """Every command that has --json, by its name."""
    for word, each in getattr(command, "commands", {}).items():
        yield from readers(each, (*words, word))
    if any("--json" in parameter.opts for parameter in command.params):
        yield " ".join(words)


def test_every_command_that_reads_has_promised_its_names() -> None:
    asked = {" ".join(command) for command in PROMISED}
    for name in readers(command_tree()):
        promised = any(f"{each} ".startswith(f"{name} ") for each in asked)
        assert promised or name in ACTS | SHOWN_BELOW, name


def at(value: Any, path: str) -> Any:
    """Return the value at a path such as `sites[]` or `[].usage`; of a list the first."""
    for step in path.replace("[]", ".[]").split("."):
        if step == "[]":
            assert value, f"an empty list at {path} shows nothing"
            value = value[0]
        elif step:
            value = value[step]
    return value


@pytest.mark.parametrize("command", PROMISED, ids=" ".join)
def test_json_keeps_its_names(
    run: Run, federation: LocalFederation, request_id: str, corpus: str, command: tuple[str, ...]
) -> None:
    run("quotas", "set", "--tenant", "default", "--tokens-per-min", "100000000")
    run("routes", "set", "assistant", "--to", federation.model, "--reason", "a test")
    words = {
        "ROUTE": "assistant",
        "SITE": federation.running.sites[0].name,
        "REQUEST": request_id,
        "CORPUS": corpus,
        "PLAN": str(federation.folder.config(federation.running.sites[0].name)),
    }
    status, out, err = run(*(words.get(word, word) for word in command), "--json")
    run("routes", "remove", "assistant", "--reason", "a test")  # others share the federation
    assert status == 0, err
    told = json.loads(out)
    for path, names in PROMISED[command].items():
        if names:
            assert " ".join(sorted(at(told, path))) == names, path
        else:
            assert isinstance(told, list)


def test_people_read_what_happened_to_a_site(run: Run, federation: LocalFederation) -> None:
    name = federation.running.sites[0].name
    federation.wait_until_ready()
    assert eventually(lambda: "joined" in run("sites", "events", name)[1], "its coming is stored")
    for more in ((), ("--json",)):
        status, out, err = run("sites", "events", "nobody", *more)
        assert (status, out) == (1, "")
        assert "there is no site nobody" in err and name in err


def test_a_canary_is_taken_out_by_one_command_and_its_route_removed(
    run: Run, federation: LocalFederation
) -> None:
    why = ("--reason", "a rehearsal")
    status, _, err = run(
        "routes", "set", "trial", "--to", federation.model, "--to", "canary,weight=5",
        "--shadow", "shade,share=0.1", *why,
    )  # fmt: skip
    assert status == 0 and "no site serves now: canary" in err
    assert "weight 5" in run("routes", "show", "trial")[1]
    assert eventually(lambda: "shade (shadow)" in run("routes", "show", "trial")[1], "its figures")
    (changed,) = json.loads(run("routes", "off", "canary", *why, "--json")[1])
    assert [target["weight"] for target in changed["targets"]] == [1.0, 0.0]
    assert "off" in run("routes", "list")[1]
    assert run("routes", "off", "canary")[0] == 2, "without a reason"
    status, _, err = run("routes", "off", federation.model, "--route", "trial", *why)
    assert status == 1 and "remove the route" in err
    assert run("routes", "remove", "trial", *why)[0] == 0
    status, _, err = run("routes", "show", "trial")
    assert status == 1 and "there is no route trial" in err


def test_a_batch_keeps_its_names(run: Run, federation: LocalFederation, tmp_path: Path) -> None:
    body = {"model": federation.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    status, out, err = run("batch", "run", str(tmp_path / "in.jsonl"), "--json")
    assert status == 0, err
    done = json.loads(out)
    (listed, *_) = json.loads(run("batch", "list", "--json")[1])
    shown = json.loads(run("batch", "show", done["id"], "--json")[1])
    assert set(shown) == set(listed) == set(done) - {"output_path", "errors_path"}
    assert {"id", "status", "model", "created_at", "expires_at", "request_counts"} <= set(shown)
    assert shown["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


def test_a_key_that_is_unknown_has_a_status_of_its_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MICO_API_KEY", "mico-nobodys")
    for command in (
        ("models",),
        ("sites", "list"),
        ("top", "-n", "1"),
        ("batch", "list"),
        ("chat", "-q", "x"),
    ):
        status, out, err = run(*command)
        assert (status, out) == (4, ""), command
        assert "mico keys create" in err


def test_doctor_finds_a_whole_federation_well(run: Run, federation: LocalFederation) -> None:
    """Sites that other tests brought and took away are down for a day, and of them it warns."""

    def all_well() -> bool:
        told = {each["subject"]: each for each in json.loads(run("doctor", "--json")[1])}
        gone = [f"{name} is down" for name in federation.sites() if name not in ours]
        sites = ("warn", ", ".join(gone)) if gone else ("ok", f"{len(ours)} ready")
        is_well = all(told[each]["verdict"] == "ok" for each in subjects)
        return is_well and (told["sites"]["verdict"], told["sites"]["detail"]) == sites

    ours = {each.name for each in federation.running.sites}
    subjects = {"database", "processes", "gateway", "API key", "clocks"}
    federation.wait_until_ready()
    assert eventually(all_well, "each of them is well")
