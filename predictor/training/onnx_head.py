"""The head of a served graph: read out, trained further, and put back; what reads the text stays as it is.

Needs onnx; not imported in serving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from predictor import features
from predictor.training.calibrate import Kinds
from predictor.training.export import INPUTS, OWNER, SHIFT
from predictor.wordpiece import WordPieceTokenizer, pad

Array = NDArray[np.float32]
HEAD_NAMES = {
    "models.weight": "models",
    "mean": "mean",
    "scale": "scale",
    **{
        f"{layer}.{part}": f"head.{layer}.{part}"
        for layer in ("first", "second", "last")
        for part in ("weight", "bias")
    },
}
"""Names in `lexical.Head` and in the graph."""
BATCH_PROMPTS = 64


def head_of(graph: bytes) -> dict[str, Array]:
    """The head's weights by their names in `lexical.Head`."""
    kept = {each.name: each for each in onnx.load_from_string(graph).graph.initializer}
    return {name: numpy_helper.to_array(kept[drawn]).copy() for name, drawn in HEAD_NAMES.items()}


def sharpness_of(graph: bytes) -> Array:
    """The factor on the logits for each model."""
    return _column(graph, "sharpness")


def shift_of(graph: bytes) -> Array:
    """What is added, for each model, to the share that its p90 is thought to reach."""
    return _column(graph, SHIFT)


def _column(graph: bytes, name: str) -> Array:
    kept = {each.name: each for each in onnx.load_from_string(graph).graph.initializer}
    values: Array = numpy_helper.to_array(kept[name]).reshape(-1).copy()
    return values


def with_head(graph: bytes, head: dict[str, Array], sharpness: Array, shift: Array | None = None) -> bytes:
    """The same graph with another head, which may know more models, each with a sharpness and a shift."""
    model = onnx.load_from_string(graph)
    fresh = {drawn: head[name] for name, drawn in HEAD_NAMES.items()}
    fresh["sharpness"] = sharpness.reshape(-1, 1).astype(np.float32)
    fresh[SHIFT] = np.zeros_like(fresh["sharpness"]) if shift is None else shift.reshape(-1, 1)
    for constant in model.graph.initializer:
        if constant.name in fresh:
            constant.CopyFrom(
                numpy_helper.from_array(np.ascontiguousarray(fresh[constant.name]), constant.name)
            )
    changed: bytes = model.SerializeToString()
    return changed


def kinds_of(graph: bytes) -> Kinds:
    """The kinds of prompts that the graph tells apart."""
    kept = {each.name: each for each in onnx.load_from_string(graph).graph.initializer}
    weight, bias, reached = (numpy_helper.to_array(kept[f"kinds.{name}"]).copy() for name in Kinds._fields)
    return Kinds(weight, bias, reached.reshape(-1))


def with_kinds(graph: bytes, kinds: Kinds) -> bytes:
    """The same graph, bent for other kinds of prompts."""
    model = onnx.load_from_string(graph)
    fresh = {"kinds.weight": kinds.weight, "kinds.bias": kinds.bias, "kinds.reached": kinds.reached[:, None]}
    for constant in model.graph.initializer:
        if constant.name in fresh:
            value = np.ascontiguousarray(fresh[constant.name], dtype=np.float32)
            constant.CopyFrom(numpy_helper.from_array(value, constant.name))
    changed: bytes = model.SerializeToString()
    return changed


def standardised(head: dict[str, Array], inputs: Array) -> Array:
    """Inputs as the head and the kinds see them."""
    found: Array = np.clip((inputs - head["mean"]) * head["scale"], -5.0, 5.0)
    return found


def inputs_of(
    graph: bytes,
    vocabulary: Sequence[str],
    texts: Sequence[str],
    progress: Callable[[str], None] = lambda _: None,
) -> Array:
    """What the head sees of each text `[texts, inputs]`, computed by the graph itself."""
    model = onnx.load_from_string(graph)
    model.graph.output.append(helper.make_tensor_value_info(INPUTS, TensorProto.FLOAT, None))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    pieces = WordPieceTokenizer(vocabulary) if vocabulary else None
    found: list[Array] = [np.empty(0, dtype=np.float32)] * len(texts)
    by_length = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    for start in range(0, len(texts), BATCH_PROMPTS):
        chosen = by_length[start : start + BATCH_PROMPTS]
        batch = features.batch(features.bags([texts[index] for index in chosen]))
        known = {"slots": batch.slots, "weights": batch.weights, "dense": batch.dense}
        known |= {"model": np.zeros(len(chosen), dtype=np.int64), OWNER: np.arange(len(chosen))}
        if pieces is not None:
            known["pieces"] = pad([pieces.encode(texts[index]) for index in chosen])
        for index, row in zip(chosen, session.run([INPUTS], known)[0], strict=True):
            found[index] = row
        if start % (200 * BATCH_PROMPTS) == 0:
            progress(f"{start} of {len(texts)} prompts read")
    return np.stack(found)
