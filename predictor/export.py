"""From trained weights to the ONNX graph that serving runs: features and model in, probabilities out.

Needs onnx; training only.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from predictor.features import DENSE

OPSET = 17
Array = NDArray[np.float32]


def lexical_graph(table: Array, head: Mapping[str, Array], sharpness: Array) -> bytes:
    """The lexical model as one graph. `table` `[slots, views]` is stored as bytes with a scale per view;
    `head` holds the weights of `lexical.Head` by name; `sharpness` is a factor for each served model."""
    scale = np.abs(table).max(axis=0) / 127.0
    constants = {
        "table": np.round(table / scale).astype(np.int8),
        "table_scale": scale,
        "sharpness": sharpness.reshape(-1, 1),
        "low": np.float32(-5.0),
        "high": np.float32(5.0),
        "axis": np.array([1]),
        **{f"head.{name}": value for name, value in head.items()},
    }
    nodes = [
        ("Gather", ["table", "slots"], "gathered", {}),
        ("Cast", ["gathered"], "vectors", {"to": TensorProto.FLOAT}),
        ("Unsqueeze", ["weights", "axis"], "weights_row", {}),
        ("MatMul", ["weights_row", "vectors"], "sums", {}),
        ("Squeeze", ["sums", "axis"], "raw_scores", {}),
        ("Mul", ["raw_scores", "table_scale"], "scores", {}),
        ("Concat", ["scores", "dense"], "inputs", {"axis": 1}),
        *_head_nodes(),
        ("Gather", ["sharpness", "model"], "factor", {}),
        ("Mul", ["logits", "factor"], "sharpened", {}),
        ("Softmax", ["sharpened"], "probabilities", {"axis": 1}),
    ]
    return _graph("lexical", constants, nodes, ranges=len(head["last.bias"]))


def _head_nodes() -> list[tuple[str, list[str], str, dict[str, int]]]:
    """`lexical.Head` from `inputs` and `model` to `logits`."""
    linear = {"transB": 1}
    return [
        ("Gather", ["head.models.weight", "model"], "served", {}),
        ("Sub", ["inputs", "head.mean"], "centred", {}),
        ("Mul", ["centred", "head.scale"], "scaled", {}),
        ("Clip", ["scaled", "low", "high"], "known", {}),
        ("Concat", ["known", "served"], "first_in", {"axis": 1}),
        ("Gemm", ["first_in", "head.first.weight", "head.first.bias"], "first_out", linear),
        ("Relu", ["first_out"], "first_hidden", {}),
        ("Concat", ["first_hidden", "served"], "second_in", {"axis": 1}),
        ("Gemm", ["second_in", "head.second.weight", "head.second.bias"], "second_out", linear),
        ("Relu", ["second_out"], "second_hidden", {}),
        ("Concat", ["second_hidden", "served"], "last_in", {"axis": 1}),
        ("Gemm", ["last_in", "head.last.weight", "head.last.bias"], "logits", linear),
    ]


def _graph(
    name: str,
    constants: Mapping[str, NDArray[np.generic] | np.generic],
    nodes: list[tuple[str, list[str], str, dict[str, int]]],
    ranges: int,
) -> bytes:
    inputs = [
        helper.make_tensor_value_info("slots", TensorProto.INT64, ["queries", "width"]),
        helper.make_tensor_value_info("weights", TensorProto.FLOAT, ["queries", "width"]),
        helper.make_tensor_value_info("dense", TensorProto.FLOAT, ["queries", DENSE]),
        helper.make_tensor_value_info("model", TensorProto.INT64, ["queries"]),
    ]
    graph = helper.make_graph(
        [helper.make_node(kind, sources, [target], **options) for kind, sources, target, options in nodes],
        name,
        inputs,
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["queries", ranges])],
        [numpy_helper.from_array(np.asarray(value), key) for key, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    onnx.checker.check_model(model)
    serialised: bytes = model.SerializeToString()
    return serialised
