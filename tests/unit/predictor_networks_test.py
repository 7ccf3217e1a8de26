"""The small encoder: trimming nothing changes nothing, and the graph encodes as the trained net does."""

import numpy as np
import onnxruntime
import pytest
import torch
from transformers import BertConfig, BertModel

from predictor import features
from predictor.data import lexical_scores
from predictor.training import export, length_head, networks
from predictor.wordpiece import pad

PIECES = np.array([[3, 4, 5, 0, 0], [6, 7, 8, 9, 10], [2, 3, 0, 0, 0]])
VIEWS, MODELS, RANGES = 4, 3, 7


@pytest.fixture(scope="module")
def encoder() -> BertModel:
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        hidden_act="gelu_pytorch_tanh",
    )
    return BertModel(config).eval()


def states(trimmed: networks.TrimmedEncoder, pieces: torch.Tensor) -> torch.Tensor:
    """Return the states that the queries of a trimmed encoder read, before their normalisation."""
    captured: list[torch.Tensor] = []
    trimmed.memory_norm.register_forward_hook(lambda _, given, __: captured.append(given[0]))
    trimmed(pieces)
    return captured[0]


def test_trimming_nothing_leaves_the_encoder_as_it_was(encoder: BertModel) -> None:
    every = networks.LayerConfig(heads=4, hidden=48)
    whole = networks.TrimmedConfig(
        (every, every), queries=2, query_attention=8, query_heads=2, query_hidden=8
    )
    pieces = torch.tensor(PIECES)
    real = pieces != 0
    with torch.no_grad():
        truth = encoder(input_ids=pieces, attention_mask=real.long()).last_hidden_state
        kept = states(networks.TrimmedEncoder(whole, encoder).eval(), pieces)[:, : PIECES.shape[1]]
    assert torch.allclose(kept[real], truth[real], atol=1e-5)


def test_merging_shortens_the_sequence_and_padding_does_not_matter(encoder: BertModel) -> None:
    torch.manual_seed(4)
    kept = (networks.LayerConfig(2, 16), networks.LayerConfig(2, 16, merged=2))
    config = networks.TrimmedConfig(kept, 2, query_attention=8, query_heads=2, query_hidden=8)
    trimmed = networks.TrimmedEncoder(config, encoder).eval()
    with torch.no_grad():
        short = trimmed(torch.tensor(PIECES[:1, :4]))
        pad = trimmed(torch.tensor(np.pad(PIECES[:1], ((0, 0), (0, 7)))))
        assert states(trimmed, torch.tensor(PIECES)).shape[1] == 4
    assert torch.allclose(short, pad, atol=1e-5)


@pytest.mark.parametrize("merged", [1, 2, 4])
def test_the_graph_encodes_as_the_net_does(merged: int, encoder: BertModel) -> None:
    torch.manual_seed(2)
    kept = networks.LayerConfig(2, 16, merged)
    config = networks.TrimmedConfig((kept,), 3, query_attention=16, query_heads=2, query_hidden=24)
    body = networks.TrimmedEncoder(config, encoder)
    bags = [features.bag(text) for text in ("Hello there.", "A longer one, is it not?", "")]
    table = np.random.default_rng(3).normal(size=(features.SLOTS, VIEWS)).astype(np.float32)
    table[features.PADDING_SLOT] = 0.0
    batch = features.batch(bags)
    side = torch.tensor(
        np.concatenate([lexical_scores.tf_matrix(bags) @ table, batch.dense], axis=1).astype(np.float32)
    )
    net = networks.LengthNet(body, length_head.HeadConfig(hidden=16), side, MODELS, RANGES).eval()
    model = np.array([0, 1, 2])
    with torch.no_grad():
        truth = torch.softmax(
            net(torch.tensor(PIECES), side, torch.arange(3), torch.tensor(model)), 1
        ).numpy()

    state = {key: value.numpy() for key, value in net.state_dict().items()}
    parts = [
        {key.removeprefix(part): value for key, value in state.items() if key.startswith(part)}
        for part in ("body.", "head.")
    ]
    graph = export.student_graph(table, *parts, np.ones(MODELS, dtype=np.float32), heads=[2], query_heads=2)
    known = {"slots": batch.slots, "weights": batch.weights, "dense": batch.dense, "owner": np.arange(3)}
    known |= {"pieces": pad([row[row != 0] for row in PIECES]), "model": model}
    (served,) = onnxruntime.InferenceSession(graph).run(None, known)
    # Eight bits in the matrices and in the tables.
    assert np.abs(served - truth).max() < 0.02
