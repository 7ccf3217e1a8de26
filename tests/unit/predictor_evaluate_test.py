"""An evaluation scores an artifact by source and model, and writes the forecast of every row."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from predictor.artifact import DEFAULT_NAME, LEXICAL_NAME, SHIPPED, read, write
from predictor.data.dataset import HELD_OUT_PERCENT, prompt_percent, split
from predictor.errors import DataError
from predictor.evaluation import metrics
from predictor.evaluation.evaluate import evaluate
from predictor.forecast import Forecast
from predictor.onnx_forecaster import Features, OnnxForecaster

LEXICAL = SHIPPED / LEXICAL_NAME
MODELS = ("text-davinci-003", "vicuna-7b@T0.0", "vicuna-7b@T0.5")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each model answers questions with 10 tokens and stories with 300, give or take one a row."""
    rows = [
        {
            "source": "test",
            "prompt_id": f"p{index}",
            "prompt": f"Write a story about {index}." if index % 2 else f"What is {index}?",
            "model": model,
            "response_tokens": (300 if index % 2 else 10) + index % 5,
        }
        for index in range(60)
        for model in MODELS
    ]
    path = tmp_path_factory.mktemp("data") / "data.parquet"
    pd.DataFrame(rows).to_parquet(path)
    return path


def test_every_source_and_model_is_a_group_with_its_figures(data: Path) -> None:
    found = evaluate(data, artifact=LEXICAL)
    assert json.loads(json.dumps(found)) == found
    assert [group["model"] for group in found["groups"]] == list(MODELS)
    assert found["ms_per_query"] > 0
    for group in found["groups"]:
        assert group["rows"] == 60
        assert group["majority_1024"] == 0.5
        assert group["spearman"] > 0.5
        assert group["lexical"]["mae"] == group["mae"]
        assert group["peers"]["constant"]["spearman"] is None


def test_an_artifact_that_an_update_made_of_the_lexical_one_is_compared_to_that(
    data: Path, tmp_path: Path
) -> None:
    """An update keeps the artifact's name."""
    card, graph, vocabulary = read(SHIPPED / DEFAULT_NAME)
    write(tmp_path, graph, replace(card, name=LEXICAL_NAME), vocabulary)
    groups = zip(evaluate(data, artifact=tmp_path)["groups"], evaluate(data)["groups"], strict=True)
    assert all(renamed["lexical"] == group["lexical"] for renamed, group in groups)


def test_other_samples_of_one_model_are_the_ceiling(data: Path) -> None:
    davinci, cold, warm = evaluate(data, artifact=LEXICAL)["groups"]
    assert davinci["ceiling"] is None
    assert cold["ceiling"]["mae"] == warm["ceiling"]["mae"] == 0.0
    assert cold["ceiling"]["accuracy_512"] == 1.0


def likeliest_bucket(forecast: Forecast, max_length: int) -> int:
    """Return which of the paper's ten buckets has the largest probability, one bucket after the other."""
    ends = [0.0, *(forecast.share_within(max_length * place / 10) for place in range(1, 10)), 1.0]
    return max(range(10), key=lambda place: ends[place + 1] - ends[place])


def test_the_rows_written_are_the_forecasts_served(data: Path, tmp_path: Path) -> None:
    evaluate(data, artifact=LEXICAL, out=tmp_path / "rows.parquet")
    written, rows = pd.read_parquet(tmp_path / "rows.parquet"), pd.read_parquet(data)
    assert len(written) == len(rows)
    queries = [Features(row.prompt, row.model) for row in rows.itertuples()]
    for row, forecast in zip(written.itertuples(), OnnxForecaster(LEXICAL).forecast(queries), strict=True):
        assert row.expected_tokens == pytest.approx(forecast.expected(), rel=1e-4)
        assert abs(row.p50 - forecast.quantile(0.5)) <= 1
        assert abs(row.p90 - forecast.quantile(0.9)) <= 1
        assert row.bucket_512 == likeliest_bucket(forecast, 512)


def test_forecasts_that_end_below_a_bucket_are_in_the_ones_before() -> None:
    """Artifacts may distinguish lengths up to a few hundred tokens."""
    edges, probabilities = (0, 256, 512), ((0.3, 0.7), (0.9, 0.1), (0.0, 1.0))
    found = metrics.likeliest_bucket(np.array(probabilities), edges, 2048)
    assert found.tolist() == [likeliest_bucket(Forecast(edges, each, ""), 2048) for each in probabilities]


def test_held_out_prompts_are_those_the_split_keeps_aside(data: Path) -> None:
    frame = pd.read_parquet(data)
    aside = frame.prompt_id.map(prompt_percent) < HELD_OUT_PERCENT
    assert evaluate(data, artifact=LEXICAL, held_out_only=True)["rows"] == aside.sum() > 0
    parts = split(frame)
    ids = [set(part.prompt_id) for part in (parts.train, parts.calibration, parts.held_out)]
    assert sum(map(len, ids)) == len(set.union(*ids)) == 60
    assert np.isclose(aside.mean(), 0.1, atol=0.1)


def test_a_report_has_a_table_and_two_plots(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots are an extra")
    evaluate(data, artifact=LEXICAL, report=tmp_path / "report")
    page = (tmp_path / "report" / "report.md").read_text("utf-8")
    assert [model in page for model in MODELS] == [True] * len(MODELS)
    for name in ("reliability.png", "predicted.png"):
        assert (tmp_path / "report" / name).read_bytes().startswith(b"\x89PNG")
        assert name in page


def test_a_file_without_rows_is_refused(data: Path, tmp_path: Path) -> None:
    pd.read_parquet(data).head(0).to_parquet(tmp_path / "empty.parquet")
    with pytest.raises(DataError, match="no rows"):
        evaluate(tmp_path / "empty.parquet", artifact=LEXICAL)


def test_the_rows_written_are_as_many_as_the_rows_read_and_in_their_order(data: Path, tmp_path: Path) -> None:
    """A file without answers to some prompts gave fewer rows: those behind were forecasts of others."""
    rows = pd.read_parquet(data)
    rows["response_tokens"] = rows.response_tokens.astype("Int64")
    rows.loc[[0, 7], "response_tokens"] = [0, pd.NA]
    rows.to_parquet(tmp_path / "some.parquet")
    found = evaluate(tmp_path / "some.parquet", artifact=LEXICAL, out=tmp_path / "rows.parquet")
    written = pd.read_parquet(tmp_path / "rows.parquet")
    assert written.prompt_id.tolist() == rows.prompt_id.tolist()
    assert written.model.tolist() == rows.model.tolist()
    assert found["rows"] == sum(group["rows"] for group in found["groups"]) == len(rows) - 2


@pytest.mark.parametrize("column", ["source", "prompt_id", "prompt", "model", "turn", "prompt_tokens"])
def test_missing_values_cost_no_row(data: Path, tmp_path: Path, column: str) -> None:
    rows = pd.read_parquet(data).assign(turn=1, prompt_tokens=5)
    rows[column] = rows[column].astype(object)
    rows.loc[3, column] = None
    rows.to_parquet(tmp_path / "some.parquet")
    found = evaluate(tmp_path / "some.parquet", artifact=LEXICAL, out=tmp_path / "rows.parquet")
    assert "NaN" not in json.dumps(found)
    assert len(pd.read_parquet(tmp_path / "rows.parquet")) == len(rows)
    assert sum(group["rows"] for group in found["groups"]) == len(rows)


@pytest.mark.parametrize(
    ("column", "value"),
    [("prompt", b"x"), ("model", b"x"), ("response_tokens", "12"), ("response_tokens", 2**62), ("turn", "x")],
)
def test_a_column_of_another_kind_is_named(data: Path, tmp_path: Path, column: str, value: object) -> None:
    pd.read_parquet(data).assign(**{column: value}).to_parquet(tmp_path / "strange.parquet")
    with pytest.raises(DataError, match=column):
        evaluate(tmp_path / "strange.parquet", artifact=LEXICAL)
