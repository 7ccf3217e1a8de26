"""A shipped artifact serves known models, unknown ones and any text; a damaged one says why it cannot."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway import config
from mico.known_models import KNOWN
from predictor import onnx_forecaster
from predictor.artifact import CARD_FILE, DEFAULT_NAME, GRAPH_FILE, KINDS, LEXICAL_NAME, SHIPPED
from predictor.data.licences import FREE, FREE_NOTE, LICENCES, UNSTATED
from predictor.errors import ArtifactError
from predictor.hot_reload import HotReloadForecaster
from predictor.onnx_forecaster import Features, OnnxForecaster

STORY = "Write a detailed story of a dragon who learns to play the piano."
CAPITAL = "What is the capital of France?"


@pytest.fixture(scope="module", params=KINDS.values())
def forecaster(request: pytest.FixtureRequest) -> OnnxForecaster:
    return OnnxForecaster(SHIPPED / request.param)


def test_the_default_is_one_of_those_shipped() -> None:
    assert onnx_forecaster.load().name == DEFAULT_NAME
    assert (SHIPPED / DEFAULT_NAME).is_dir()


@pytest.mark.parametrize("name", KINDS.values())
def test_shipped_artifacts_learned_from_free_sources_alone(name: str) -> None:
    card = OnnxForecaster(SHIPPED / name).card
    assert card.trained_on["sources"] and set(card.trained_on["sources"]) <= FREE
    assert all(card.licences[source] == LICENCES[source] for source in card.trained_on["sources"])
    assert card.licences[f"the shipped artifact {name}"] == "Apache-2.0"
    assert UNSTATED not in card.licences.values() and FREE_NOTE in card.notes


def test_shipped_artifacts_stay_small_and_no_other_lies_beside_them() -> None:
    assert {folder.name for folder in SHIPPED.iterdir()} == set(KINDS.values())
    assert sum(file.stat().st_size for file in SHIPPED.rglob("*") if file.is_file()) <= 20e6


@pytest.mark.parametrize("word", KINDS)
def test_a_word_selects_a_shipped_artifact(word: str, tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(f'predictor = "{word}"\nsite_tokens = ["t"]\n')
    chosen = config.load(file).predictor
    assert HotReloadForecaster(chosen).name == KINDS[word]


def test_a_folder_is_served_whatever_its_name(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED / KINDS["lexical"], tmp_path / "small")
    assert onnx_forecaster.load(tmp_path / "small").name == KINDS["lexical"]


def test_a_story_is_forecast_longer_than_a_capital(forecaster: OnnxForecaster) -> None:
    story, capital = forecaster.forecast([Features(STORY, "mico-demo"), Features(CAPITAL, "mico-demo")])
    assert story.expected() > 3 * capital.expected()
    assert sum(story.probabilities) == pytest.approx(1.0)


def test_the_served_model_matters(forecaster: OnnxForecaster) -> None:
    models = ("text-davinci-003", "o3-mini-2025-01-31")
    assert all(map(forecaster.knows, models))
    brief, wordy = forecaster.forecast([Features(STORY, model) for model in models])
    assert wordy.expected() > brief.expected()


@pytest.mark.parametrize(
    ("served", "model"),
    [("mico-demo", "smollm2-135m-INSTRUCT_concise"), *((name, "smollm2-135m-INSTRUCT") for name in KNOWN)],
)
def test_a_model_served_by_its_short_name_is_forecast_as_the_model_it_is_an_alias_of(
    forecaster: OnnxForecaster, served: str, model: str
) -> None:
    assert forecaster.knows(served)
    alias, other = forecaster.forecast([Features(STORY, served), Features(STORY, model)])
    assert alias == other


def test_an_unknown_model_gets_the_average_forecast_and_the_source_names_that(
    forecaster: OnnxForecaster,
) -> None:
    (found,) = forecaster.forecast([Features(STORY, "somebody/brand-new-model")])
    assert not forecaster.knows("somebody/brand-new-model")
    assert found.source == f"{forecaster.name}:unknown-model"
    assert found.expected() > 50


def test_a_batch_gives_what_each_query_gets_alone(forecaster: OnnxForecaster) -> None:
    texts = [STORY, "", "\ud800\x00 你好", CAPITAL * 3_000, "x" * 100_000]
    queries = [Features(text, "mico-demo") for text in texts]
    together = forecaster.forecast(queries)
    for query, found in zip(queries, together, strict=True):
        (alone,) = forecaster.forecast([query])
        # Eight-bit activations share their scale within a batch.
        assert found.probabilities == pytest.approx(alone.probabilities, abs=2e-2)


def test_no_queries_give_no_forecasts(forecaster: OnnxForecaster) -> None:
    assert forecaster.forecast([]) == []


def test_the_card_names_its_training_data(forecaster: OnnxForecaster) -> None:
    card = forecaster.card
    assert len(card.trained_on["sha256"]) == 64
    assert set(card.trained_on["sources"]) <= set(card.licences)
    assert card.figures
    assert "seed" in card.config


def test_missing_damaged_and_foreign_artifacts_are_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"card\.json is missing"):
        onnx_forecaster.load(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(SHIPPED / DEFAULT_NAME, copy)
    graph = copy / GRAPH_FILE
    graph.write_bytes(graph.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="damaged"):
        onnx_forecaster.load(copy)
    card = json.loads((copy / CARD_FILE).read_text("utf-8"))
    (copy / CARD_FILE).write_text(json.dumps({**card, "format": 99}), "utf-8")
    with pytest.raises(ArtifactError, match="format 99"):
        onnx_forecaster.load(copy)


@pytest.mark.parametrize("changed", [{"edges": None}, {"models": ["x"]}, {"aliases": {"mine": "nobody"}}])
def test_a_card_that_does_not_fit_is_refused_with_a_reason(changed: dict[str, Any], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(SHIPPED / LEXICAL_NAME, copy)
    card = json.loads((copy / CARD_FILE).read_text("utf-8"))
    (copy / CARD_FILE).write_text(json.dumps({**card, **changed}), "utf-8")
    with pytest.raises(ArtifactError, match=str(copy)):
        onnx_forecaster.load(copy)


def test_serving_loads_neither_torch_nor_scikit_learn() -> None:
    program = (
        "import sys; from predictor import onnx_forecaster; onnx_forecaster.load();"
        "print(sorted({'torch', 'sklearn', 'scipy', 'pandas', 'transformers', 'onnx'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
