"""A model trained on a small corpus serves forecasts that fit the corpus, and its card describes it."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from mico.cli import main
from predictor.artifact import KINDS
from predictor.data.licences import BOUND_NOTE, FREE_NOTE, LICENCES, UNSTATED
from predictor.errors import DataError
from predictor.onnx_forecaster import Features, OnnxForecaster
from predictor.training.auxiliary_tasks import MaskedLMConfig
from predictor.training.distillation.recipes import DistillationConfig
from predictor.training.distillation.synthetic_prompts import PromptGeneratorConfig
from predictor.training.length_head import HeadConfig
from predictor.training.networks import LayerConfig, TrimmedConfig
from predictor.training.train import train
from predictor.training.train_loop import TrainConfig
from tests.support.fakes import pretrained

pytestmark = pytest.mark.slow

ONE_PASS = TrainConfig(epochs=1, batch_prompts=64, body_rate=1e-3, head_rate=1e-2)
TINY = DistillationConfig(
    encoders=(ONE_PASS,),
    student=TrainConfig(
        epochs=6,
        batch_prompts=64,
        body_rate=2e-3,
        head_rate=1e-2,
        teacher_share=0.5,
        match=0.5,
        moved_share=0.3,
        averaged=0.9,
    ),
    models=HeadConfig(epochs=1),
    masked=MaskedLMConfig(epochs=20, batch_rows=64, rate=3e-3),
    kept=TrimmedConfig(
        (LayerConfig(2, 16, merged=2),), 2, query_attention=16, query_heads=2, query_hidden=16
    ),
    kept_pieces=4,
    mixed_prompts=40,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.parquet"
    pretrained.corpus().to_parquet(path)
    return path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretrained.encoder_in(tmp_path_factory.mktemp("encoder"))


def check(folder: Path) -> None:
    forecaster = OnnxForecaster(folder)
    story, question = "Write a long story about thing 7.", "What is thing 7?"
    queries = [Features(story, "brief"), Features(story, "wordy"), Features(question, "brief")]
    longer, wordier, short = (each.expected() for each in forecaster.forecast(queries))
    assert longer == pytest.approx(300, rel=0.3)
    assert wordier > 1.3 * longer
    assert short < 40
    assert forecaster.card.trained_on["prompts"]["train"] > 400
    assert (
        any(row["p90_coverage"] > 0.5 for row in forecaster.card.figures.values())
        or not forecaster.card.figures
    )


def test_the_lexical_kind(corpus: Path, tmp_path: Path) -> None:
    card = train(corpus, tmp_path / "model", kind="lexical", name="tiny")
    assert card.name == "tiny"
    check(tmp_path / "model")


def test_the_default_name_is_the_folders_and_never_a_shipped_one(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "support-desk"
    assert main(["predictor", "train", str(corpus), str(out)]) == 0
    assert f"support-desk is in {out}" in capsys.readouterr().err
    (forecast,) = OnnxForecaster(out).forecast([Features("What is thing 7?", "brief")])
    assert forecast.source == "support-desk"
    for shipped in KINDS.values():
        with pytest.raises(DataError, match=f"{shipped} is what a shipped artifact is called"):
            train(corpus, tmp_path / shipped)


def test_the_card_says_whether_its_sources_allow_any_use(corpus: Path, tmp_path: Path) -> None:
    assert BOUND_NOTE in train(corpus, tmp_path / "unknown").notes
    rows = pd.read_parquet(corpus)
    for source, note in (("gsm8k", FREE_NOTE), ("alpaca", BOUND_NOTE)):
        rows.assign(source=source).to_parquet(tmp_path / f"{source}.parquet")
        card = train(tmp_path / f"{source}.parquet", tmp_path / source)
        assert note in card.notes and card.licences == {source: LICENCES[source]}


def test_buckets_and_max_length_define_the_ranges(corpus: Path, tmp_path: Path) -> None:
    card = train(corpus, tmp_path / "even", buckets=10, max_length=500)
    assert card.edges == tuple(range(0, 501, 50))
    (forecast,) = OnnxForecaster(tmp_path / "even").forecast(
        [Features("Write a long story about thing 7.", "brief")]
    )
    assert len(forecast.probabilities) == 10 and forecast.expected() == pytest.approx(300, rel=0.3)
    assert train(corpus, tmp_path / "grown", max_length=400).edges[-3:] == (290, 344, 400)
    with pytest.raises(DataError, match="50 tokens are not told apart in 51 buckets"):
        train(corpus, tmp_path / "none", buckets=51, max_length=50)


def test_the_small_kind(corpus: Path, encoder: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    card = train(
        corpus,
        tmp_path / "model",
        kind="small",
        encoder=str(encoder),
        distillation=TINY,
        device="cpu",
        progress=lines.append,
    )
    assert card.kind == "small"
    assert any("no answers' texts" in line for line in lines)
    whole, kept = ((folder / "vocab.txt").read_text().split() for folder in (encoder, tmp_path / "model"))
    assert "story" in whole and "##7" in kept and len(kept) < len(whole)
    check(tmp_path / "model")


def test_teachers_learn_from_the_texts_of_answers(corpus: Path, encoder: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    kind = {
        "kind": "small",
        "encoder": str(encoder),
        "distillation": TINY,
        "device": "cpu",
        "progress": lines.append,
    }
    frame = pd.read_parquet(corpus)[::5].assign(answer="A story.\n- a thing\n- 7 .")
    frame.to_parquet(tmp_path / "answered.parquet")
    train(tmp_path / "answered.parquet", tmp_path / "model", **kind)
    (masked,) = (float(line.split()[-1]) for line in lines if line.startswith("masked pieces"))
    assert masked < 2.5  # of 37 pieces, where chance is 3.6
    assert not any("no answers' texts" in line for line in lines)


def test_with_a_language_model(corpus: Path, encoder: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    (tmp_path / "language").mkdir()
    language = pretrained.language_model_in(tmp_path / "language")
    distillation = replace(
        TINY,
        encoders=(ONE_PASS, ONE_PASS),
        language_models=(replace(ONE_PASS, beside=1.0),) * 2,
        folds=True,
        matched=1,
        student=replace(TINY.student, visits=2, epochs=4),
        asked_prompts=30,
        asking=PromptGeneratorConfig(replace(ONE_PASS, epochs=4), at_once=30),
    )
    card = train(
        corpus,
        tmp_path / "model",
        kind="small",
        encoder=str(encoder),
        language_model=str(language),
        distillation=distillation,
        device="cpu",
        progress=lines.append,
    )
    check(tmp_path / "model")
    assert card.config["language_model"] == "language"
    assert card.licences["the language model language, a teacher and the asker of made prompts"] == UNSTATED
    assert card.licences[f"the encoder {encoder.name}, where it was begun from"] == UNSTATED
    assert "2 whole ones and 2 language models" in card.notes[-1]
    asked = next(int(line.split()[0]) for line in lines if line.endswith("new prompts asked"))
    assert f"600 prompts, {asked} asked like them, 40 made of them" in lines and asked > 10
    (weights,) = (line for line in lines if line.startswith("teachers' shares"))
    assert weights.count(",") >= 4


def test_unusable_input_is_refused_with_the_reason(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs an encoder"):
        train(corpus, tmp_path, kind="small")
    with pytest.raises(DataError, match="lexical learns from no language model"):
        train(corpus, tmp_path, kind="lexical", language_model="any")
    with pytest.raises(DataError, match="none of lexical, small, large"):
        train(corpus, tmp_path, kind="huge")
    pd.DataFrame({"prompt": ["x"]}).to_parquet(tmp_path / "bare.parquet")
    with pytest.raises(DataError, match="lacks the columns source"):
        train(tmp_path / "bare.parquet", tmp_path / "model")


def test_a_corpus_too_small_to_train_on_is_refused_with_the_reason(corpus: Path, tmp_path: Path) -> None:
    """Each of these was a traceback from deep inside."""
    rows, data = pd.read_parquet(corpus), tmp_path / "some.parquet"
    for some in (
        rows.head(1),
        rows[rows.prompt_id == rows.prompt_id.iloc[0]],
        rows.assign(model=[f"m{index}" for index in range(len(rows))]),
    ):
        some.to_parquet(data)
        with pytest.raises(DataError, match=r"prompts to learn from.* are needed"):
            train(data, tmp_path / "model")
    rows.assign(model="(unknown)").to_parquet(data)
    with pytest.raises(DataError, match="a model"):
        train(data, tmp_path / "model")


def test_answers_all_of_one_length_can_be_learned_from(corpus: Path, tmp_path: Path) -> None:
    rows, data = pd.read_parquet(corpus), tmp_path / "even.parquet"
    rows.assign(response_tokens=200).to_parquet(data)
    train(data, tmp_path / "model")
    (forecast,) = OnnxForecaster(tmp_path / "model").forecast([Features("What is thing 7?", "brief")])
    assert forecast.quantile(0.5) == pytest.approx(200, rel=0.2)
