"""Calibration makes the coverage of the p90 right, by kind of prompt and by served model."""

import numpy as np
import onnxruntime
import pytest
from scipy.special import softmax

from predictor import features
from predictor.evaluation import metrics
from predictor.training import calibrate, export, length_head, onnx_head

EDGES = (0, 10, 20, 40, 80, 160, 320)


def distributions(rows: int, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.ones(len(EDGES) - 1), rows)


def test_recalibration_keeps_the_median_and_moves_the_p90() -> None:
    edges = tuple(range(401))
    drawn = np.random.default_rng(2).dirichlet(np.ones(400), 50)
    moved = calibrate.recalibrate(drawn, np.full(50, 0.95))
    assert moved.sum(axis=1) == pytest.approx(np.ones(50))
    for q, before in ((0.5, 0.5), (0.9, 0.5 + 0.4 * 0.4 / 0.45), (0.99, 0.99)):
        quantiles, raw_quantiles = (
            metrics.quantile(each, edges, share) for each, share in ((moved, q), (drawn, before))
        )
        assert np.abs(quantiles - raw_quantiles).max() <= 2


def test_a_correct_p90_is_not_recalibrated() -> None:
    drawn = distributions(50)
    assert calibrate.recalibrate(drawn, np.full(50, calibrate.P90)) == pytest.approx(drawn)


def test_each_kind_gets_its_own_coverage() -> None:
    random = np.random.default_rng(3)
    source = np.array(["a", "b", "c"])[np.arange(3_000) % 3]
    inputs = (np.eye(3)[np.arange(3_000) % 3] * 3 + random.normal(0, 0.3, (3_000, 3))).astype(np.float32)
    coverage_of = {"a": 0.97, "b": 0.9, "c": 0.8}
    within = random.random(3_000) < np.vectorize(coverage_of.get)(source)
    kinds = calibrate.fit_p90_coverage(calibrate.fit_kinds(inputs, source), inputs, within, source)
    found = kinds.expected_coverage(inputs)
    for each, share in coverage_of.items():
        assert found[source == each].mean() == pytest.approx(share, abs=0.03)


def test_a_shift_makes_the_p90_of_a_model_cover_90_percent() -> None:
    edges, random = tuple(range(0, 401, 4)), np.random.default_rng(6)
    drawn = random.dirichlet(np.ones(100), 4_000)
    length = random.integers(1, 381, 4_000)
    stated = np.full(4_000, calibrate.P90)
    shift = calibrate.fit_shift(drawn[:2_000], length[:2_000], edges, stated[:2_000])
    quantiles = metrics.quantile(
        calibrate.recalibrate(drawn[2_000:], stated[2_000:] + shift), edges, calibrate.P90
    )
    assert metrics.coverage(length[2_000:], quantiles) == pytest.approx(0.9, abs=0.02)
    few = calibrate.fit_shift(drawn[:10], length[:10], edges, stated[:10])
    assert abs(few) < 0.1


def test_a_shift_accounts_for_the_p90_being_a_whole_number() -> None:
    edges, random = tuple(range(0, 21, 2)), np.random.default_rng(6)
    drawn, length = random.dirichlet(np.ones(10) * 3, 4_000), random.integers(1, 21, 4_000)
    stated = np.full(4_000, calibrate.P90)
    shift = calibrate.fit_shift(drawn, length, edges, stated)
    quantiles = metrics.quantile(calibrate.recalibrate(drawn, stated + shift), edges, calibrate.P90)
    assert metrics.coverage(length, quantiles) == pytest.approx(0.9, abs=0.003)


def test_the_graph_recalibrates_as_training_does() -> None:
    random = np.random.default_rng(4)
    views, models, ranges = 3, 2, len(EDGES) - 1
    width = views + features.DENSE_FEATURES
    state = length_head.head_state(
        length_head.LengthHead(length_head.HeadConfig(hidden=8, model_width=4), width, models, ranges)
    )
    table = random.normal(size=(features.SLOTS, views)).astype(np.float32)
    even = np.ones(models, dtype=np.float32)
    coverage_of = np.array([0.95, 0.8, 0.88], dtype=np.float32)
    weight = random.normal(size=(3, width)).astype(np.float32)
    kinds = calibrate.PromptKinds(weight, np.zeros(3, dtype=np.float32), coverage_of)
    graph = onnx_head.with_kinds(export.lexical_graph(table, state, even), kinds)
    assert onnx_head.read_kinds(graph).p90_coverage == pytest.approx(coverage_of)
    shift = np.array([0.0, -0.05], dtype=np.float32)
    graph = onnx_head.with_head(graph, state, even, shift)
    assert onnx_head.read_shift(graph) == pytest.approx(shift)

    texts = ["Name three colours.", "Write a poem.", ""]
    batch = features.batch([features.bag(text) for text in texts])
    known = {"slots": batch.slots, "weights": batch.weights, "dense": batch.dense}
    rows = np.array([0, 1, 0])
    (served,) = onnxruntime.InferenceSession(graph).run(None, {**known, "owner": np.arange(3), "model": rows})
    inputs = onnx_head.head_inputs(graph, (), texts)
    logits = length_head.predict_logits(length_head.load_head(state), inputs, np.arange(3), rows)
    shown = kinds.expected_coverage(onnx_head.standardise(state, inputs), shift[rows].astype(np.float64))
    assert served == pytest.approx(calibrate.recalibrate(softmax(logits, axis=1), shown), abs=1e-5)
