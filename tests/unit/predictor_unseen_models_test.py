"""A stranger is forecast as the known model that its first outcomes are like, and the forecast says so."""

import pytest

from predictor.artifact import LEXICAL_NAME, SHIPPED
from predictor.onnx_forecaster import Features, OnnxForecaster
from predictor.unseen_models import MODELS, BorrowingForecaster

QUESTIONS = [
    f"Write {kind} about {thing}." for kind in ("a story", "a line") for thing in ("cats", "the sea")
]
WORDY, STRANGER = "gpt4_1106_preview_verbose", "somebody/brand-new"


@pytest.fixture
def forecaster() -> BorrowingForecaster:
    return BorrowingForecaster(OnnxForecaster(SHIPPED / LEXICAL_NAME))


def told(forecaster: BorrowingForecaster, model: str) -> list[float]:
    return [each.expected() for each in forecaster.forecast([Features(text, model) for text in QUESTIONS])]


def teach(forecaster: BorrowingForecaster, rounds: int) -> None:
    """The stranger answers as the wordy model is expected to."""
    for turn in range(rounds):
        text = QUESTIONS[turn % len(QUESTIONS)]
        (like,) = forecaster.forecast([Features(text, WORDY)])
        forecaster.observe(Features(text, STRANGER), like.quantile((0.2, 0.5, 0.8)[turn % 3]))


def test_before_any_outcome_a_stranger_is_forecast_as_models_do_on_average(
    forecaster: BorrowingForecaster,
) -> None:
    (found,) = forecaster.forecast([Features(QUESTIONS[0], STRANGER)])
    assert found.source == f"{forecaster.name}:unknown-model"
    assert forecaster.likeness(STRANGER) is None


def test_outcomes_bring_a_stranger_to_the_model_it_is_like(forecaster: BorrowingForecaster) -> None:
    truth = told(forecaster, WORDY)
    before = told(forecaster, STRANGER)
    teach(forecaster, 24)
    after = told(forecaster, STRANGER)
    for right, early, late in zip(truth, before, after, strict=True):
        assert abs(late - right) < abs(early - right)
    likeness = forecaster.likeness(STRANGER)
    assert likeness is not None
    assert likeness.outcomes == 24
    assert 0.0 < likeness.share <= 1.0
    (found,) = forecaster.forecast([Features(QUESTIONS[0], STRANGER)])
    assert f"like {likeness.model}" in found.source
    assert sum(found.probabilities) == pytest.approx(1.0)


def test_more_outcomes_make_it_surer_and_better_covered(forecaster: BorrowingForecaster) -> None:
    texts = [QUESTIONS[turn % len(QUESTIONS)] for turn in range(60)]
    lengths = [5 + turn % 7 for turn in range(60)]

    def covered() -> float:
        found = forecaster.forecast([Features(text, STRANGER) for text in texts])
        return sum(
            n <= each.quantile(0.9) and each.quantile(0.9) < 200
            for n, each in zip(lengths, found, strict=True)
        )

    loose = covered()
    for text, tokens in zip(texts, lengths, strict=True):
        forecaster.observe(Features(text, STRANGER), tokens)
    assert covered() >= loose
    assert told(forecaster, STRANGER)[0] < told(forecaster, "another/stranger")[0]


def test_a_model_that_was_trained_on_learns_nothing_here(forecaster: BorrowingForecaster) -> None:
    before = told(forecaster, WORDY)
    forecaster.observe(Features(QUESTIONS[0], WORDY), 1)
    assert told(forecaster, WORDY) == before
    assert forecaster.likeness(WORDY) is None


def test_an_alias_begins_as_its_model_and_moves_when_outcomes_speak_against_it(
    forecaster: BorrowingForecaster,
) -> None:
    begin = told(forecaster, "mico-demo")
    assert begin == told(forecaster, "text-davinci-003")
    for turn in range(24):
        forecaster.observe(Features(QUESTIONS[turn % 4], "mico-demo"), 900)
    assert min(told(forecaster, "mico-demo")) > max(begin)


def test_so_many_strangers_are_followed_and_no_more(forecaster: BorrowingForecaster) -> None:
    for number in range(MODELS + 1):
        forecaster.observe(Features("Hi", f"stranger {number}"), 10)
    assert forecaster.likeness("stranger 0") is None
    assert forecaster.likeness(f"stranger {MODELS}") is not None
