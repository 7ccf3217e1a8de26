"""Training and serving agree: the exported graph computes what the trained weights compute."""

import numpy as np
import onnxruntime
import pytest
import torch
from scipy.special import softmax

from predictor import features
from predictor.data import lexical_scores
from predictor.training import export, length_head

TEXTS = ["Name three colours.", "Write a long story about the sea, with 3 chapters.", "", "Sum 12 and 30."]
VIEWS, MODELS, RANGES = 4, 3, 7


@pytest.fixture(scope="module")
def head() -> length_head.LengthHead:
    random = np.random.default_rng(5)
    rows = length_head.HeadRows(
        prompt=np.arange(64) % 4,
        model=random.integers(1, MODELS, 64),
        target=random.dirichlet(np.ones(RANGES), 64).astype(np.float32),
        weight=np.ones(64, dtype=np.float32),
    )
    inputs = random.normal(size=(4, VIEWS + features.DENSE_FEATURES)).astype(np.float32)
    return length_head.fit(
        inputs, rows, MODELS, length_head.HeadConfig(epochs=2, batch_rows=16, hidden=8, model_width=4)
    )


def test_the_graph_computes_what_the_weights_do(head: length_head.LengthHead) -> None:
    random = np.random.default_rng(6)
    table = random.normal(size=(features.SLOTS, VIEWS)).astype(np.float32)
    table[features.PADDING_SLOT] = 0.0
    sharpness = np.array([1.0, 0.5, 2.0], dtype=np.float32)
    weights = {key: value.numpy() for key, value in head.state_dict().items()}
    session = onnxruntime.InferenceSession(export.lexical_graph(table, weights, sharpness))

    bags = [features.bag(text) for text in TEXTS]
    model = np.array([0, 1, 2, 1])
    batch = features.batch(bags)
    known = {"slots": batch.slots, "weights": batch.weights, "dense": batch.dense}
    (served,) = session.run(None, {**known, "owner": np.arange(len(TEXTS)), "model": model})
    inputs = np.concatenate([lexical_scores.tf_matrix(bags) @ table, batch.dense], axis=1).astype(np.float32)
    logits = length_head.predict_logits(head, inputs, np.arange(len(TEXTS)), model)
    trained = softmax(logits * sharpness[model][:, None], axis=1)
    # The graph keeps the table in bytes: 1/127 of a view's largest weight is its grain.
    assert np.abs(served - trained).max() < 0.02


def test_the_same_seed_gives_the_same_head(head: length_head.LengthHead) -> None:
    random = np.random.default_rng(5)
    rows = length_head.HeadRows(
        prompt=np.arange(64) % 4,
        model=random.integers(1, MODELS, 64),
        target=random.dirichlet(np.ones(RANGES), 64).astype(np.float32),
        weight=np.ones(64, dtype=np.float32),
    )
    inputs = random.normal(size=(4, VIEWS + features.DENSE_FEATURES)).astype(np.float32)
    config = length_head.HeadConfig(epochs=2, batch_rows=16, hidden=8, model_width=4)
    again = length_head.fit(inputs, rows, MODELS, config)
    for name, value in head.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
