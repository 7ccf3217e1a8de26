"""Inputs of the simulator: sites, loads, estimators, outages; and the command itself."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from gateway.domain import Lane
from mico.cli import main
from mico.errors import CommandFailed
from mico.simulation.affinity import affinity
from mico.simulation.compare import _outages_of_sites, bound, outage, policy
from mico.simulation.estimators import LEARNING_DELAY, estimator
from mico.simulation.federation import Outage
from mico.simulation.metrics import order_by_name, run_metrics
from mico.simulation.queries import Query, Record
from mico.simulation.specification import KV_TOKENS_PER_SLOT, PROMPT_PRICE, capacity_qps, sites_of
from mico.simulation.workloads import assign_classes
from predictor.data.dataset import HELD_OUT_PERCENT, prompt_percent
from predictor.onnx_forecaster import Features
from predictor.outcome_log import OutcomeLog

QUERIES = [Query(i, float(i), 100, 1 + i % 50) for i in range(300)]


@pytest.mark.parametrize(
    "text", ["", "0", "10000", "9" * 5000, "99999999x8", "1x" + "9" * 5000, "1x8@1..2", "1x8~.", "1x8:1.2.3"]
)
def test_what_describes_no_sites_is_refused_before_any_is_made(text: str) -> None:
    with pytest.raises(CommandFailed, match="is no group of sites"):
        sites_of(text)


PLAN = """
[pool.eu]
cloud = "aws"
group = "g"
region = "eu-west-1"
most = 3
usd_per_hour = 6.0
"""
"""A scaling plan of one pool."""


def test_groups_of_sites_are_read_and_what_is_left_out_has_a_default() -> None:
    two, _, other = sites_of("2x16@1.5~40,1x8/9000")
    assert (two.slots, two.rtt_s, two.kv_tokens) == (16, 0.04, 16 * KV_TOKENS_PER_SLOT)
    assert two.cost.base_s == pytest.approx(1.5 * other.cost.base_s)
    assert (other.slots, other.kv_tokens) == (8, 9000)
    assert len({site.name for site in sites_of("1000")}) == 1000


@pytest.mark.parametrize("text", ["", "0", "x", "2x", "2x0", "0x8", "1x8@0", "-3", "1x8~5+"])
def test_sites_that_are_none_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(CommandFailed) as failure:
        sites_of(text)
    assert "--sites" in failure.value.tip


def test_a_group_may_have_a_price_and_a_region() -> None:
    cheap, own = sites_of("1x8@2~100/9000:0.25=eu-west,1x8")
    assert (cheap.usd_per_mtok, cheap.region, cheap.kv_tokens) == (0.25, "eu-west", 9000)
    assert (own.usd_per_mtok, own.region) == (0.0, "")


def test_a_round_trip_may_be_given_for_each_gateway() -> None:
    near, same = sites_of("1x8@2~5+250/9000:0.25=eu,1x8~40")
    assert [near.seen_by(gateway).rtt_s for gateway in range(2)] == [0.005, 0.25]
    assert [same.seen_by(gateway).rtt_s for gateway in range(2)] == [0.04, 0.04]
    assert (near.kv_tokens, near.usd_per_mtok, near.region) == (9000, 0.25, "eu")


def test_so_many_queries_are_lines_of_batches_and_bound_to_a_region() -> None:
    found = assign_classes([Query(i, float(i), 10, 10) for i in range(4000)], 0.25, {"eu": 0.5, "us": 0.125})
    lines = sum(query.lane is Lane.BATCH for query in found)
    where = Counter(query.regions for query in found)
    assert lines == pytest.approx(1000, rel=0.15)
    assert where[frozenset({"eu"})] == pytest.approx(2000, rel=0.15)
    assert where[frozenset({"us"})] == pytest.approx(500, rel=0.15)
    assert [query.number for query in found] == list(range(4000))
    assert assign_classes(QUERIES, 0.0, {}) == QUERIES


def test_a_region_is_lost_with_each_of_its_sites_and_one_that_is_not_there_with_none() -> None:
    specs = sites_of("2x8=eu,1x8=us,1x8")
    lost = _outages_of_sites([outage("eu@5-9"), outage("s0003@1-2")], specs)
    assert lost == (Outage("s0000", 5, 9), Outage("s0001", 5, 9), Outage("s0003", 1, 2))
    for nowhere in ("asia@1-2", "@1-2"):
        with pytest.raises(CommandFailed, match="no such site or region"):
            _outages_of_sites([outage(nowhere)], specs)


def test_capacity_grows_with_slots_and_falls_with_slowness_and_length() -> None:
    base = capacity_qps(sites_of("1x16@1"), 100, 100)
    assert capacity_qps(sites_of("2x16@1"), 100, 100) == pytest.approx(2 * base)
    assert capacity_qps(sites_of("1x32@1"), 100, 100) > base
    assert capacity_qps(sites_of("1x16@2"), 100, 100) == pytest.approx(base / 2)
    assert capacity_qps(sites_of("1x16@1"), 100, 200) < base


@pytest.mark.parametrize("name", ["oracle", "noisy:0.3", "constant", "input", "histogram", "bins"])
def test_an_estimator_forecasts_every_query_by_a_distribution(name: str) -> None:
    forecasts = estimator(name)(QUERIES)
    assert len(forecasts) == len(QUERIES)
    for forecast in forecasts:
        assert sum(forecast.probabilities) == pytest.approx(1.0)
        assert forecast.expected() >= 1


def test_the_oracle_knows_and_the_noisy_one_errs_within_its_share() -> None:
    for query, exact, noisy in zip(
        QUERIES, estimator("oracle")(QUERIES), estimator("noisy:0.5")(QUERIES), strict=True
    ):
        assert exact.expected() == query.response_tokens == exact.quantile(0.9)
        assert abs(noisy.expected() - query.response_tokens) <= 0.5 * query.response_tokens + 1


def test_a_histogram_learns_only_from_earlier_queries() -> None:
    forecasts = estimator("histogram")(QUERIES)
    assert len({forecast.expected() for forecast in forecasts[:LEARNING_DELAY]}) == 1
    changed = [*QUERIES[:200], *(Query(i, float(i), 100, 900) for i in range(200, 300))]
    assert estimator("histogram")(changed)[: 200 + LEARNING_DELAY] == forecasts[: 200 + LEARNING_DELAY]


def test_words_that_name_nothing_are_refused_with_what_there_is() -> None:
    for wrong in (policy, order_by_name, estimator, affinity, outage, bound):
        with pytest.raises(CommandFailed) as failure:
            wrong("nonsense")
        assert failure.value.tip


@pytest.mark.parametrize("text", ["eu=2", "eu=-0.1", "eu=nan", "eu="])
def test_a_share_of_a_region_is_one_of_the_whole(text: str) -> None:
    with pytest.raises(CommandFailed, match="is no share"):
        bound(text)


@pytest.mark.parametrize("text", ["s0000@9-5", "s0000@5-5", "s0000@nan-nan", "s0000@5", "s0000@-1"])
def test_an_outage_ends_after_it_begins(text: str) -> None:
    with pytest.raises(CommandFailed, match="is no outage"):
        outage(text)


def test_the_command_prints_a_row_for_every_combination(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, trace = tmp_path / "corpus.parquet", tmp_path / "small.parquet"
    rows = [{"source": "alpaca", "prompt_id": f"p{i}", "prompt": f"What is {i}?", "model": "text-davinci-003",
             "response_tokens": 1 + i % 40, "prompt_tokens": 5} for i in range(800)]  # fmt: skip
    pd.DataFrame(rows).to_parquet(corpus)
    pd.DataFrame(
        {"arrival_s": [0.1 * i for i in range(50)], "prompt_tokens": 50, "response_tokens": 20}
    ).to_parquet(trace)
    command = ["-q", "simulate", "--trace", f"{trace},burst", "--load", "0.5,0.9", "--queries", "60"]
    choices = ["--policy", "mico,round_robin", "--estimator", "oracle", "--offload", "both"]
    assert main([*command, *choices, "--corpus", str(corpus), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert len(runs) == 2 * 2 * 2 * 2
    assert {run["trace"] for run in runs} == {"small", "burst"}
    for run in runs:
        assert run["completed"] == run["queries"]
        assert run["p99_normalized_latency"] >= run["mean_normalized_latency"] > 0
        assert run["p99_ttft_s"] >= run["p50_ttft_s"] > 0
        assert 0 < run["jain"] <= 1
        assert run["max_ttft_over_median_latency"] <= run["max_ttft_over_median"]
        assert run["offloads"] == 0 or run["offload"]


def test_the_command_compares_ways_to_use_prefix_caches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, trace = tmp_path / "corpus.parquet", tmp_path / "chats.parquet"
    rows = [{"source": "own", "prompt_id": f"p{i}", "prompt": f"What is {i}?", "model": "m",
             "response_tokens": 1 + i % 40, "prompt_tokens": 5} for i in range(400)]  # fmt: skip
    pd.DataFrame(rows).to_parquet(corpus)
    turns = [[10 * (i % 4) + block for block in range(1 + i // 4)] for i in range(40)]
    pd.DataFrame(
        {
            "arrival_s": [1.0 * i for i in range(40)],
            "prompt_tokens": [512 * len(blocks) for blocks in turns],
            "response_tokens": 20,
            "prefix_block_ids": turns,
        }
    ).to_parquet(trace)
    command = ["-q", "simulate", "--trace", f"{trace},agents,poisson", "--queries", "40", "--policy", "mico"]
    choices = ["--affinity", "prefix,none,tree:4", "--gateways", "2", "--estimator", "oracle"]
    assert main([*command, *choices, "--corpus", str(corpus), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    rates = {(run["trace"], run["affinity"]): run["hit_rate"] for run in runs}
    assert len(rates) == 9
    assert rates["chats", "prefix"] > 0.5
    assert rates["agents", "prefix"] > 0.0
    assert rates["poisson", "prefix"] == rates["poisson", "tree:4"] == 0.0
    assert all(run["mean_ttft_s"] > 0 for run in runs)


def test_the_command_says_what_is_wrong_with_its_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--corpus", str(tmp_path / "none.parquet")]) == 1
    assert "--corpus" in capsys.readouterr().err
    assert main(["simulate", "--load", "much"]) == 2
    assert "share of capacity" in capsys.readouterr().err
    assert main(["simulate", "--bound", "eu=0.1", "--sites", "1x8=us"]) == 2
    assert "no site" in capsys.readouterr().err
    for gateways in ("1", "3"):
        assert main(["simulate", "--gateways", gateways, "--sites", "1x8~5+250"]) == 2
        assert "not one for each gateway" in capsys.readouterr().err
    plan = tmp_path / "plan.toml"
    for text, told in (("pools = 1", "scaling plan can't be used"), (PLAN, "no site is in it")):
        plan.write_text(text)
        assert main(["simulate", "--sites", "1x8=us", "--scaling", str(plan)]) == 2
        assert told in capsys.readouterr().err
    for noise in ("not parquet", pd.DataFrame({"prompt": ["x"]})):
        wrong = tmp_path / "wrong.parquet"
        if isinstance(noise, str):
            wrong.write_text(noise)
        else:
            noise.to_parquet(wrong)
        assert main(["simulate", "--corpus", str(wrong)]) == 1
        assert "tip: a parquet file with the columns source, " in capsys.readouterr().err
        assert main(["simulate", "--trace", f"poisson,{wrong}"]) == 1
        assert "is no trace" in capsys.readouterr().err


def test_any_corpus_can_be_drawn_from_but_one_without_held_out_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, trace = tmp_path / "own.parquet", tmp_path / "trace.parquet"
    rows = [{"source": "own", "prompt_id": f"p{i}", "prompt": f"What is {i}?", "model": "m",
             "response_tokens": 1 + i % 40, "prompt_tokens": 5} for i in range(200)]  # fmt: skip
    pd.DataFrame({"arrival_s": [0.0, 1.0], "prompt_tokens": 50, "response_tokens": 20}).to_parquet(trace)
    command = ["simulate", "--policy", "mico", "--estimator", "oracle", "--corpus", str(corpus), "--json"]
    for frame in (pd.DataFrame(rows), pd.DataFrame(rows).drop(columns="prompt_tokens")):
        frame.to_parquet(corpus)
        assert main([*command, "--queries", "20", "--trace", f"{trace},poisson,burst"]) == 0
        runs = json.loads(capsys.readouterr().out)["runs"]
        assert [(run["trace"], run["completed"]) for run in runs] == [
            ("trace", 2), ("poisson", 20), ("burst", 20)]  # fmt: skip
    others = [row for row in rows if prompt_percent(str(row["prompt_id"])) >= HELD_OUT_PERCENT]
    pd.DataFrame(others).to_parquet(corpus)
    assert main([*command, "--trace", str(trace)]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: the corpus can't be used\ncause: ")
    assert "no held-out prompts" in told


def test_what_a_gateway_kept_of_its_own_traffic_is_a_corpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = OutcomeLog(tmp_path / "outcomes")
    for number in range(200):
        kept.add(Features(f"Tell me of {number}.", "m"), 1 + number % 40)
    command = ["simulate", "--policy", "mico", "--queries", "20", "--json"]
    assert main([*command, "--corpus", str(tmp_path / "outcomes")]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["trace"], run["completed"], run["machine_usd"]) == ("poisson", 20, 0.0)
    (tmp_path / "plan.toml").write_text(PLAN)
    command += ["--sites", "1x8=eu", "--scaling", str(tmp_path / "plan.toml"), "--start-s", "5"]
    assert main([*command, "--corpus", str(tmp_path / "outcomes")]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["machine_usd"] == pytest.approx(6.0 * run["makespan_s"] / 3600, rel=0.05)


def test_what_policies_cost_counts_every_prompt_and_answer_at_its_site() -> None:
    records = [
        Record(Query(number, 0.0, 1_000, 500), first_token_s=1.0, finish_s=2.0, site=site)
        for number, site in enumerate(("cheap", "dear", "dear"))
    ]
    found = run_metrics(records, usd_per_mtok={"cheap": 1.0, "dear": 10.0})
    assert found.usd == pytest.approx((PROMPT_PRICE * 1_000 + 500) * 21.0 / 1e6)
    assert found.usd_per_mtok == pytest.approx(7.0)
    assert run_metrics(records).usd == 0.0


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({}, "has no query to run"),
        ({"prompt_tokens": [20_000, 30_000]}, "has no query to run"),
        ({"arrival_s": [1.0, None]}, "is no trace"),
        ({"arrival_s": ["noon", "night"]}, "is no trace"),
        ({"response_tokens": [5.0, None]}, "is no trace"),
    ],
)
def test_a_trace_that_cannot_be_run_is_refused(
    columns: dict[str, list[object]], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = pd.DataFrame({"arrival_s": [0.0, 1.0], "prompt_tokens": 50, "response_tokens": 20} | columns)
    assert simulate(rows if columns else rows[:0], tmp_path) == 1
    assert told in capsys.readouterr().err


def test_counts_of_a_trace_may_be_floats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = pd.DataFrame({"arrival_s": [0.0, 1.0], "prompt_tokens": [9.0, 8.0], "response_tokens": [3.0, 2.0]})
    assert simulate(rows, tmp_path) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["completed"] == 2


@pytest.mark.parametrize("option", [("--load", "nan"), ("--load", "inf"), ("--seed", "-1")])
def test_numbers_that_no_run_can_have_are_refused(
    option: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = pd.DataFrame({"arrival_s": [0.0, 1.0], "prompt_tokens": 9, "response_tokens": 3})
    assert simulate(rows, tmp_path, *option) == 2
    assert option[0].strip("-") in capsys.readouterr().err


def simulate(trace: pd.DataFrame, folder: Path, *options: str) -> int:
    """Run the command on a trace, with a corpus and one site; return its exit status."""
    corpus = pd.DataFrame(
        {"source": "own", "prompt_id": [f"p{i}" for i in range(400)], "prompt": "Why?", "model": "m"}
    )
    corpus.assign(response_tokens=9).to_parquet(folder / "corpus.parquet")
    trace.to_parquet(folder / "trace.parquet")
    files = ["--trace", str(folder / "trace.parquet"), "--corpus", str(folder / "corpus.parquet")]
    names = ["--policy", "mico", "--estimator", "oracle", "--sites", "1x8/10000", "--json"]
    return main(["-q", "simulate", *files, *names, *options])
