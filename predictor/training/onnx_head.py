"""Read and replace the head of a served graph. The text encoder of the graph is unchanged.

Does not train the head. Requires onnx. Not imported in serving.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from predictor import features
from predictor.training.calibrate import PromptKinds
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
"""Maps the name of a weight in `length_head.LengthHead` to its name in the graph."""
BATCH_PROMPTS = 64


def read_head(graph: bytes) -> dict[str, Array]:
    """Return the weights of the head by their names in `length_head.LengthHead`."""
    constants = _constants(graph, *HEAD_NAMES.values())
    return {name: constants[in_graph] for name, in_graph in HEAD_NAMES.items()}


def read_sharpness(graph: bytes) -> Array:
    """Return the factor on the logits for each model `[models]`."""
    return _constants(graph, "sharpness")["sharpness"].reshape(-1)


def read_shift(graph: bytes) -> Array:
    """Return the correction of the expected p90 coverage for each model `[models]`."""
    return _constants(graph, SHIFT)[SHIFT].reshape(-1)


def read_kinds(graph: bytes) -> PromptKinds:
    """Return the kinds of prompts that the graph distinguishes."""
    names = ("kinds.weight", "kinds.bias", "kinds.reached")
    weight, bias, p90_coverage = map(_constants(graph, *names).__getitem__, names)
    return PromptKinds(weight, bias, p90_coverage.reshape(-1))


def with_head(graph: bytes, head: Mapping[str, Array], sharpness: Array, shift: Array | None = None) -> bytes:
    """Return the graph with another head, which may have more models, each with a sharpness and a shift."""
    column = sharpness.reshape(-1, 1).astype(np.float32)
    return _with_constants(
        graph,
        {
            **{in_graph: head[name] for name, in_graph in HEAD_NAMES.items()},
            "sharpness": column,
            SHIFT: np.zeros_like(column) if shift is None else shift.reshape(-1, 1),
        },
    )


def with_kinds(graph: bytes, kinds: PromptKinds) -> bytes:
    """Return the graph with another classifier of prompts and coverage of its kinds."""
    constants = {
        "kinds.weight": kinds.weight,
        "kinds.bias": kinds.bias,
        "kinds.reached": kinds.p90_coverage[:, None],
    }
    return _with_constants(graph, {name: value.astype(np.float32) for name, value in constants.items()})


def _constants(graph: bytes, *names: str) -> dict[str, Array]:
    initializers = onnx.load_from_string(graph).graph.initializer
    return {each.name: numpy_helper.to_array(each).copy() for each in initializers if each.name in names}


def _with_constants(graph: bytes, replaced: Mapping[str, NDArray[np.generic]]) -> bytes:
    model = onnx.load_from_string(graph)
    for constant in model.graph.initializer:
        if constant.name in replaced:
            value = np.ascontiguousarray(replaced[constant.name])
            constant.CopyFrom(numpy_helper.from_array(value, constant.name))
    serialised: bytes = model.SerializeToString()
    return serialised


def standardise(head: Mapping[str, Array], inputs: Array) -> Array:
    """Return the inputs standardised and clipped to ±5, as in the head and the kinds."""
    clipped: Array = np.clip((inputs - head["mean"]) * head["scale"], -5.0, 5.0)
    return clipped


def head_inputs(
    graph: bytes,
    vocabulary: Sequence[str],
    texts: Sequence[str],
    progress: Callable[[str], None] = lambda _: None,
) -> Array:
    """Return the inputs of the head for each text `[texts, inputs]`, computed by the graph."""
    model = onnx.load_from_string(graph)
    model.graph.output.append(helper.make_tensor_value_info(INPUTS, TensorProto.FLOAT, None))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    tokenizer = WordPieceTokenizer(vocabulary) if vocabulary else None
    rows: list[Array] = [np.empty(0, dtype=np.float32)] * len(texts)
    by_length = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    for start in range(0, len(texts), BATCH_PROMPTS):
        chosen = by_length[start : start + BATCH_PROMPTS]
        batch = features.batch(features.bags([texts[index] for index in chosen]))
        feeds = {"slots": batch.slots, "weights": batch.weights, "dense": batch.dense}
        feeds |= {"model": np.zeros(len(chosen), dtype=np.int64), OWNER: np.arange(len(chosen))}
        if tokenizer is not None:
            feeds["pieces"] = pad([tokenizer.encode(texts[index]) for index in chosen])
        for index, row in zip(chosen, session.run([INPUTS], feeds)[0], strict=True):
            rows[index] = row
        if start % (200 * BATCH_PROMPTS) == 0:
            progress(f"{start} of {len(texts)} prompts read")
    return np.stack(rows)
