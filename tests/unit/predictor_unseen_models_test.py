"""An unseen model is forecast as the known model nearest to its first outcomes, which the source names."""

import re

import pytest

from predictor.artifact import LEXICAL_NAME, SHIPPED
from predictor.onnx_forecaster import Features, OnnxForecaster
from predictor.unseen_models import MAX_MODELS, UnseenModelForecaster

QUESTIONS = [
    f"Write {kind} about {thing}." for kind in ("a story", "a line") for thing in ("cats", "the sea")
]
WORDY, UNSEEN_MODEL = "gpt-4-1106-preview", "somebody/brand-new"


@pytest.fixture
def forecaster() -> UnseenModelForecaster:
    base = OnnxForecaster(SHIPPED / LEXICAL_NAME)
    assert base.knows(WORDY)
    return UnseenModelForecaster(base)


def expected_lengths(forecaster: UnseenModelForecaster, model: str) -> list[float]:
    return [each.expected() for each in forecaster.forecast([Features(text, model) for text in QUESTIONS])]


def answer_as_wordy(forecaster: UnseenModelForecaster, rounds: int) -> None:
    """Observe outcomes of the unseen model as if it answered as the wordy model is expected to."""
    for turn in range(rounds):
        text = QUESTIONS[turn % len(QUESTIONS)]
        (like,) = forecaster.forecast([Features(text, WORDY)])
        forecaster.observe(Features(text, UNSEEN_MODEL), like.quantile((0.2, 0.5, 0.8)[turn % 3]))


def test_before_any_outcome_an_unseen_model_is_forecast_as_the_average_of_models(
    forecaster: UnseenModelForecaster,
) -> None:
    (found,) = forecaster.forecast([Features(QUESTIONS[0], UNSEEN_MODEL)])
    assert found.source == f"{forecaster.name}:unknown-model"


def test_outcomes_move_an_unseen_model_to_the_nearest_known_one(forecaster: UnseenModelForecaster) -> None:
    truth = expected_lengths(forecaster, WORDY)
    before = expected_lengths(forecaster, UNSEEN_MODEL)
    answer_as_wordy(forecaster, 24)
    after = expected_lengths(forecaster, UNSEEN_MODEL)
    for right, early, late in zip(truth, before, after, strict=True):
        assert abs(late - right) < abs(early - right)
    (found,) = forecaster.forecast([Features(QUESTIONS[0], UNSEEN_MODEL)])
    nearest = re.fullmatch(rf"{forecaster.name}:unknown-model:(\d+)% like (.+)", found.source)
    assert nearest is not None
    assert 0 < int(nearest[1]) <= 100
    assert nearest[2] in forecaster.base.card.models
    assert sum(found.probabilities) == pytest.approx(1.0)


def test_answers_cut_short_lean_to_models_that_answer_at_length(forecaster: UnseenModelForecaster) -> None:
    before = expected_lengths(forecaster, UNSEEN_MODEL)
    for turn in range(24):
        forecaster.observe(Features(QUESTIONS[turn % 4], UNSEEN_MODEL), 400, ended=False)
    after = expected_lengths(forecaster, UNSEEN_MODEL)
    assert all(late > early for early, late in zip(before, after, strict=True))


def test_answers_cut_short_at_once_are_evidence_of_nothing(forecaster: UnseenModelForecaster) -> None:
    answer_as_wordy(forecaster, 24)
    before = expected_lengths(forecaster, UNSEEN_MODEL)
    for turn in range(300):
        forecaster.observe(Features(QUESTIONS[turn % 4], UNSEEN_MODEL), 1, ended=False)
    assert expected_lengths(forecaster, UNSEEN_MODEL) == pytest.approx(before, rel=0.1)


def test_more_outcomes_narrow_the_forecast_and_cover_better(forecaster: UnseenModelForecaster) -> None:
    texts = [QUESTIONS[turn % len(QUESTIONS)] for turn in range(60)]
    lengths = [5 + turn % 7 for turn in range(60)]

    def covered() -> float:
        found = forecaster.forecast([Features(text, UNSEEN_MODEL) for text in texts])
        return sum(
            n <= each.quantile(0.9) and each.quantile(0.9) < 200
            for n, each in zip(lengths, found, strict=True)
        )

    loose = covered()
    for text, tokens in zip(texts, lengths, strict=True):
        forecaster.observe(Features(text, UNSEEN_MODEL), tokens)
    assert covered() >= loose
    assert expected_lengths(forecaster, UNSEEN_MODEL)[0] < expected_lengths(forecaster, "another/unseen")[0]


def test_outcomes_of_a_known_model_change_nothing(forecaster: UnseenModelForecaster) -> None:
    before = expected_lengths(forecaster, WORDY)
    forecaster.observe(Features(QUESTIONS[0], WORDY), 1)
    assert expected_lengths(forecaster, WORDY) == before


def test_an_alias_begins_as_its_model_and_moves_with_its_outcomes(
    forecaster: UnseenModelForecaster,
) -> None:
    begin = expected_lengths(forecaster, "mico-demo")
    assert begin == expected_lengths(forecaster, "SmolLM2-135M-Instruct_concise")
    for turn in range(24):
        forecaster.observe(Features(QUESTIONS[turn % 4], "mico-demo"), 900)
    assert min(expected_lengths(forecaster, "mico-demo")) > max(begin)


def test_a_bounded_number_of_unseen_models_is_tracked(forecaster: UnseenModelForecaster) -> None:
    for number in range(MAX_MODELS + 1):
        forecaster.observe(Features("Hi", f"unseen {number}"), 10)
    names = "unseen 0", f"unseen {MAX_MODELS}"
    first, last = forecaster.forecast([Features("Hi", name) for name in names])
    assert first.source == f"{forecaster.name}:unknown-model"
    assert " like " in last.source


@pytest.mark.parametrize("parent", [WORDY, UNSEEN_MODEL])
def test_a_variant_begins_as_its_parent_and_then_follows_its_own_outcomes(
    forecaster: UnseenModelForecaster, parent: str
) -> None:
    answer_as_wordy(forecaster, rounds=60)
    variants = [Features(text, "a-variant", parent=parent) for text in QUESTIONS]
    found = forecaster.forecast(variants)
    assert [each.expected() for each in found] == expected_lengths(forecaster, parent)
    assert found[0].source == f"{forecaster.name}:unknown-model:as {parent}"
    for turn in range(60):
        forecaster.observe(variants[turn % len(variants)], 5)
    after = [each.expected() for each in forecaster.forecast(variants)]
    assert all(new < old / 2 for new, old in zip(after, expected_lengths(forecaster, parent), strict=True))


def test_a_variant_that_was_trained_on_is_itself(forecaster: UnseenModelForecaster) -> None:
    (found,) = forecaster.forecast([Features(QUESTIONS[0], WORDY, parent=UNSEEN_MODEL)])
    assert found.source == forecaster.name
